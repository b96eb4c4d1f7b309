"""Overlap is real: what the host and the device do at the same time, without a sleep."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.requests.guidance import Guidance
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.step.plan import Ticket
from megatron_async.step.records import StepResult
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import hash_engine, sampling_params
from tests.support.guided_rows import guide, marked
from tests.support.hash_model import HashModel
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone
from tests.support.patience import PATIENCE_SECONDS

STEPS = 12


class GatedModel(HashModel):
    """Each forward after the first ``free`` stops half way until the host has opened its gate."""

    def __init__(self, free: int, **options: Any) -> None:
        super().__init__(**options)
        self.free = free
        self.gate = threading.Semaphore(0)
        self.running = threading.Semaphore(0)
        self.forwards = 0

    def forward(self, token_ids, position_ids, context):  # type: ignore[no-untyped-def]
        self.forwards += 1
        if self.forwards > self.free:
            self.running.release()
            assert self.gate.acquire(timeout=PATIENCE_SECONDS), (
                "the host never committed during this forward"
            )
        return super().forward(token_ids, position_ids, context)


@pytest.mark.parametrize("depth", (1, 2, 4))
def test_host_commits_step_n_while_the_forward_of_step_n_plus_1_runs(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward n + 1 cannot end before commit n has ended, and commit n does not begin before
    forward n + 1 has begun: if they did not overlap, the two would wait for each other."""
    model = GatedModel(free=1)
    ask = Ask(prompt=(4,), max_new=STEPS)
    committed_while_running: list[int] = []
    commit = DecodeLoop._commit

    def gated_commit(self: DecodeLoop, ticket: Ticket, *arguments: Any) -> None:
        overlapping = ticket.number + 1 < STEPS
        if overlapping:
            assert model.running.acquire(timeout=PATIENCE_SECONDS), (
                "the next forward had not been launched"
            )
        commit(self, ticket, *arguments)
        if overlapping:
            committed_while_running.append(ticket.number)
            model.gate.release()

    monkeypatch.setattr(DecodeLoop, "_commit", gated_commit)
    with hash_engine(depth, model=model, max_requests=2, block_count=8) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
    assert request.generated_tokens == decode_alone(ask)[0]
    assert committed_while_running == list(range(STEPS - 1))


class GatedDraftingModel(GatedModel, DraftingHashModel):
    """The same with drafts."""


@pytest.mark.parametrize("depth", (0, 1, 2))
def test_masks_along_drafts_are_made_while_the_forward_runs_over_them(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward ends before the masks of its window are there."""
    model = GatedDraftingModel(free=0, num_speculative_tokens=3, error_rate=0.0, guide=guide)
    ask = marked(Ask(prompt=(1, 1, 1), max_new=STEPS), 3)
    prepared: dict[int, int] = {}
    prepare = Guidance.prepare

    def gated_prepare(self: Guidance, ticket: Ticket) -> dict[int, int]:
        guessed = prepare(self, ticket)
        if ticket.number not in prepared:
            prepared[ticket.number] = ticket.plan.window
            assert model.running.acquire(timeout=PATIENCE_SECONDS)
            model.gate.release()
        return guessed

    monkeypatch.setattr(Guidance, "prepare", gated_prepare)
    with hash_engine(
        depth, model=model, tokenizer=hash_tokenizer(), max_requests=2, block_count=8
    ) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
    assert request.generated_tokens == decode_alone(ask)[0]
    assert request.counters.accepted > STEPS / 2
    assert list(prepared.values()).count(4) > 1


@pytest.mark.parametrize("depth", (1, 2, 4))
def test_nobody_waits_for_the_accepted_count(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward n + 1 has begun before the host knows how many drafts of step n were accepted, and
    cannot end before the host has committed step n, however long that takes it."""
    drafts = 2
    model = GatedDraftingModel(free=1, num_speculative_tokens=drafts, error_rate=0.0)
    ask = Ask(prompt=(4,), max_new=1 + (STEPS - 1) * (1 + drafts))
    accepted_while_running: list[int] = []
    commit = DecodeLoop._commit

    def gated_commit(self: DecodeLoop, ticket: Ticket, result: StepResult, *others: Any) -> None:
        overlapping = self.in_flight_count > 0
        if overlapping:
            assert model.running.acquire(timeout=PATIENCE_SECONDS), (
                "the next forward had not been launched"
            )
        commit(self, ticket, result, *others)
        if overlapping:
            accepted_while_running.append(sum(result.counts) - 1)
            model.gate.release()

    monkeypatch.setattr(DecodeLoop, "_commit", gated_commit)
    with hash_engine(depth, model=model, max_requests=2, block_count=8) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
        assert engine.counters.tokens_per_row == 1 + drafts
    assert request.generated_tokens == decode_alone(ask)[0]
    # Each step that brought tokens; those launched past the end bring none.
    assert accepted_while_running[:STEPS] == [0] + [drafts] * (STEPS - 1)
    assert 0 < request.counters.discarded <= depth


@pytest.mark.parametrize("depth", (0, 1, 2))
def test_timeline_shows_forwards_in_flight_at_a_commit(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's commits against the device's recorded timeline. Serial: the device does nothing
    during any commit. Otherwise each commit but the last ones lies behind `depth` launches."""
    device = CpuDevice(record=True)
    commits: list[tuple[int, int, int]] = []
    ahead: list[int] = []
    commit = DecodeLoop._commit

    def timed_commit(self: DecodeLoop, ticket: Ticket, *arguments: Any) -> None:
        ahead.append(self.in_flight_count)
        start = time.perf_counter_ns()
        commit(self, ticket, *arguments)
        commits.append((ticket.number, start, time.perf_counter_ns()))

    monkeypatch.setattr(DecodeLoop, "_commit", timed_commit)
    with hash_engine(depth, device=device, max_requests=2, block_count=8, debug=False) as engine:
        engine.generate([[4]], sampling_params(Ask(prompt=(4,), max_new=STEPS)))
    assert ahead == [depth] * (STEPS - depth) + list(range(depth))[::-1]

    spans = [span for span in device.timeline or [] if span.ticket >= 0]
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
    assert [s.ticket for s in spans] == sorted(s.ticket for s in spans)
    if depth == 0:
        # S publishes the tokens as the last thing it does; its span may end a moment later.
        forwards = [s for s in spans if "F" in s.name]
        assert len(forwards) == len(commits) == STEPS
        for _, start, end in commits:
            assert not any(s.start_ns < end and s.end_ns > start for s in forwards)
    else:
        assert sum(s.name == "S H2D F" for s in spans) >= STEPS - 3


def test_device_failure_reaches_the_caller() -> None:
    class Broken(HashModel):
        def forward(self, token_ids, position_ids, context):  # type: ignore[no-untyped-def]
            raise RuntimeError("kernel failed")

    with (
        hash_engine(1, model=Broken(), max_requests=2, block_count=8) as engine,
        pytest.raises(RuntimeError, match="kernel failed"),
    ):
        engine.generate([[1, 2]], sampling_params(Ask(prompt=(1, 2), max_new=4)))


def test_pending_logits_survive_a_finish_beside_them() -> None:
    """Row 0 ends while row 1's logits are pending: the row map of F, not the new one, is used."""
    short, long = Ask(prompt=(1,), max_new=3), Ask(prompt=(2,), max_new=20)
    for depth in (0, 1, 2):
        with hash_engine(depth, max_requests=2, block_count=8) as engine:
            requests = engine.generate([[1], [2]], [sampling_params(short), sampling_params(long)])
        assert requests[0].generated_tokens == decode_alone(short)[0]
        assert requests[1].generated_tokens == decode_alone(long)[0]
        assert torch.all(engine.cache.slots.finished)
