"""Sampling parameters of a running request change inside the chain, by control before S."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_async.errors import RequestError
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference
from megatron_async.sampling_params import SamplingParams
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, drive, greedy, hash_engine
from tests.support.hash_model import hash_history, hash_logits

pytestmark = pytest.mark.sweep

SIZES: dict[str, Any] = {"max_requests": 3, "block_size_tokens": 4, "block_count": 60}


def sampled(count: int, **values: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": 3, **values}, num_tokens_to_generate=count, termination_id=-1
    )


def expected(request: DynamicInferenceRequest, first: SamplingParams) -> list[int]:
    """The tokens that the record's spans say: each by the parameters that held at its step."""
    tokens = list(request.prompt_tokens)
    tickets = [report.ticket for report in request.steps]
    assert len(tickets) == len(request.generated_tokens)
    for ticket in tickets:
        held = [span.params for span in request.sampling_spans if span.ticket <= ticket]
        params = held[-1] if held else first
        logits = torch.tensor([hash_logits(hash_history(tokens))])
        inverse = 0.0 if params.greedy else 1.0 / params.temperature
        token = sample_tokens_reference(
            logits,
            SampleInputs(
                torch.tensor([inverse]),
                torch.tensor([params.top_k], dtype=torch.int32),
                torch.tensor([params.top_p]),
                torch.tensor([params.seed or 0]),
                torch.tensor([len(tokens)]),
            ),
        )
        tokens.append(int(token))
    return tokens[len(request.prompt_tokens) :]


@pytest.mark.parametrize("depth", DEPTHS)
def test_new_parameters_hold_from_the_step_that_the_record_says(depth: int) -> None:
    first = sampled(40)
    with hash_engine(depth, **SIZES, jitter_seed=1) as engine:
        future = engine.add_request(0, [1, 2], first)
        other = engine.add_request(1, [3], sampled(40, seed=4))
        alone = engine.generate([[3]], sampled(40, seed=4))[0].generated_tokens
        assert other.done() or engine.has_unfinished_requests()
        drive(engine)
        undisturbed = future.result(timeout=0).generated_tokens
    changes = [{"temperature": 0.2}, {"top_k": 3, "temperature": 3.0}, {"seed": 99}, {"top_p": 0.5}]
    with hash_engine(depth, **SIZES, jitter_seed=1) as engine:
        future = engine.add_request(0, [1, 2], first)
        other = engine.add_request(1, [3], sampled(40, seed=4))
        steps = 0
        while engine.has_unfinished_requests():
            engine.step_modern()
            steps += 1
            if steps % 8 == 0 and changes:
                assert engine.update_sampling_params(0, **changes.pop(0))
        counters = engine.counters
    request = future.result(timeout=0)
    assert [s.params.temperature for s in request.sampling_spans] == [0.2, 3.0, 3.0, 3.0]
    assert request.sampling_spans[-1].params.seed == 99
    assert request.generated_tokens == expected(request, first) != undisturbed
    assert other.result(timeout=0).generated_tokens == alone
    assert counters.steps_with_control == 4
    assert counters.barriers == 0
    if depth:
        assert counters.steps_overlapped >= counters.steps_committed - depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_update_reaches_the_sample_at_the_head_of_its_own_launch(depth: int) -> None:
    """At depth 1 the S of the next launch samples a forward that was launched before the call."""
    with hash_engine(depth, **SIZES) as engine:
        future = engine.add_request(0, [1], greedy(20))
        for _ in range(5):
            engine.step_modern()
        engine.update_sampling_params(0, temperature=1.0, seed=5)
        engine.step_modern()
        drive(engine)
    (span,) = future.result(timeout=0).sampling_spans
    # Launched so far: tickets 0 to 4. Serial decoding has sampled them all.
    assert span.ticket == (4 if depth else 5)
    assert future.result(timeout=0).generated_tokens == expected(
        future.result(timeout=0), greedy(20)
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_updates_of_waiting_paused_and_evicted_requests_hold_when_they_run(depth: int) -> None:
    rng = random.Random(depth)
    first = [sampled(30, seed=i) for i in range(6)]
    with hash_engine(depth, **{**SIZES, "block_count": 24}, jitter_seed=2) as engine:
        futures = [engine.add_request(i, [i + 1, 7], params) for i, params in enumerate(first)]
        while engine.has_unfinished_requests():
            active = engine.step_modern()["active_request_ids"]
            if not active:
                continue
            victim = rng.choice(active)
            draw = rng.random()
            if draw < 0.25:
                engine.pause_request(victim)
            elif draw < 0.4:
                engine.evict_request(victim)
            elif draw < 0.7:
                for number in active:
                    engine.resume_request(number)
            if rng.random() < 0.4:
                engine.update_sampling_params(victim, temperature=rng.choice((0.0, 0.5, 2.0)))
            if rng.random() < 0.2:
                engine.update_sampling_params(victim, top_k=rng.choice((0, 1, 5)), seed=8)
        assert engine.counters.evictions and engine.counters.pauses
    for future, params in zip(futures, first, strict=True):
        request = future.result(timeout=0)
        assert request.generated_tokens == expected(request, params)
    assert sum(len(f.result().sampling_spans) for f in futures) > 5


def test_updates_hold_for_whole_windows_of_drafts() -> None:
    first = sampled(40)
    with hash_engine(1, model=DraftingHashModel(2, 0.3), **SIZES) as engine:
        future = engine.add_request(0, [1], first)
        for _ in range(6):
            engine.step_modern()
        engine.update_sampling_params(0, temperature=0.0)
        drive(engine)
    request = future.result(timeout=0)
    assert len(request.sampling_spans) == 1 and request.counters.accepted > 0
    assert request.generated_tokens == expected(request, first)


def test_two_changes_before_a_step_add_up() -> None:
    with hash_engine(1, **SIZES) as engine:
        future = engine.add_request(0, [1], greedy(12))
        engine.step_modern()
        engine.update_sampling_params(0, temperature=0.7)
        engine.update_sampling_params(0, top_k=9)
        drive(engine)
    params = future.result(timeout=0).sampling_params
    assert (params.temperature, params.top_k) == (0.7, 9)
    assert engine.counters.steps_with_control == 1


def test_a_launch_without_control_takes_no_control_packet() -> None:
    with hash_engine(1, **SIZES) as engine:
        engine.generate([[1], [2]], greedy(20))
        assert engine.counters.steps_with_control == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"num_tokens_to_generate": 3}, "num_tokens_to_generate of a running request"),
        ({"nothing": 3}, "nothing of a running request"),
    ),
)
def test_what_cannot_be_changed_is_refused_by_name(changes: Any, message: str) -> None:
    with hash_engine(1, **SIZES) as engine:
        future = engine.add_request(0, [1], greedy(5))
        with pytest.raises(RequestError, match=message):
            engine.update_sampling_params(0, **changes)
        drive(engine)
        assert future.result(timeout=0).sampling_spans == []
        assert engine.update_sampling_params(0, temperature=1.0) is False  # it has ended


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_update_behind_an_abort_leaves_the_record_as_it_was_sampled(depth: int) -> None:
    with hash_engine(depth, **SIZES) as engine:
        future = engine.add_request(0, [1], greedy(40))
        for _ in range(6):
            engine.step_modern()
        engine.abort_request(0)
        engine.update_sampling_params(0, temperature=2.0)
        drive(engine)
    request = future.result(timeout=0)
    assert request.finish_reason == "abort"
    assert request.sampling_params.temperature == 0.0 and request.sampling_spans == []


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_the_device_learns_of_an_end_that_the_host_alone_knows(depth: int) -> None:
    """The rows of an aborted request that are in flight are dead on the device too: from the next
    launch on they write to the null block, and their samples are no tokens."""
    brought: list[int] = []
    with hash_engine(depth, **SIZES) as engine:
        take = engine.runner.take

        def watching(ticket: Any) -> Any:
            result = take(ticket)
            if 0 in ticket.plan.rows.keys:
                brought.append(result.counts[ticket.plan.rows.keys.index(0)])
            return result

        engine.runner.take = watching  # type: ignore[method-assign]
        aborted = engine.add_request(0, [1], greedy(40))
        other = engine.add_request(1, [2], greedy(40))
        for _ in range(8):
            engine.step_modern()
        engine.abort_request(0)
        drive(engine)
        assert engine.counters.steps_with_control == 1
        assert engine.counters.tokens_discarded == depth
    # With one step in flight its S rides with the very launch that brings the end.
    assert brought[-depth:] == [1] * (depth - 1) + [0]
    assert brought[:-depth] == [1] * (len(brought) - depth)
    assert aborted.result(timeout=0).finish_reason == "abort"
    assert len(other.result(timeout=0).generated_tokens) == 40
