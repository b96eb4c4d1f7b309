"""The normal checks catch every fault of ``tests/support/mutants.py``.

One fixed workload has everything: stops, ends by length, shared prefixes, chunks, pressure on the
cache, evictions, pauses, aborts, priorities, new weights, new sampling parameters; for some faults
rows bring windows of drafts, of which some are wrong. Without a fault it passes at every depth;
with one of them it fails by a typed error or an assertion, each with a name of its own:

- ``IntegrityError``: the product's own checks (blocks, slots, rings, device and host agree);
- ``WrongTokensError``: another token than the oracle's, or another reason for the end;
- ``TokenAfterEndError``: something emitted for a request that had ended;
- ``WrongCountsError``: launched, committed and discarded do not add up, a token was discarded
  that nothing had ended, or a request holds more blocks than its rows can reach;
- ``DeadRowWroteError``, ``DeadRowLivedError``, ``DeadRowReadsExpertError``: the device worked for a
  request that it had ended, or had been told to end.

What costs no token, such as which block is reused first, has scenarios of its own in
``tests/support/pinned.py``; these fail by an ``AssertionError``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import EngineCounters
from megatron_async.errors import IntegrityError
from megatron_async.request.request import DEVICE_ENDS, DynamicInferenceRequest, FinishReason
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.scheduler.events import Commit
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan
from megatron_async.step.records import StepResult
from tests.support.cuda_rings import CudaRingsDevice
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, hash_engine, sampling_params
from tests.support.hybrid_hash_model import DeadRowReadsExpertError, HybridLayers
from tests.support.mutants import MUTANTS, WINDOW, Mutant
from tests.support.oracle import Ask, decode_with_salts
from tests.support.pinned import SCENARIOS
from tests.support.token_tickets import TokenTickets

MOST_STEPS = 1500
BLOCKS = {1: (4, 14), WINDOW: (1, 120)}
"""Block size and count, by window. Windows cross blocks, so that a step assigns more of them than
its packet has rows."""
HYBRID_ASKS = {1: 16, WINDOW: 6}
SNAPSHOTS = {1: 4, WINDOW: 12}
"""Requests of the workload with a model that has recurrent layers, by window, and fewer snapshots
than its prefixes."""


class WrongTokensError(AssertionError):
    pass


class TokenAfterEndError(AssertionError):
    pass


class WrongCountsError(AssertionError):
    pass


class DeadRowWroteError(AssertionError):
    pass


class DeadRowLivedError(AssertionError):
    pass


CAUGHT: dict[str, type[BaseException]] = {
    error.__name__: error
    for error in (
        WrongTokensError,
        TokenAfterEndError,
        WrongCountsError,
        DeadRowWroteError,
        DeadRowLivedError,
        DeadRowReadsExpertError,
        IntegrityError,
        IndexError,
        KeyError,
    )
}


class WatchfulModel(DraftingHashModel):
    """Refuses rows that have ended and yet write outside the null block. Of four drafts one is
    wrong."""

    def __init__(self, window: int) -> None:
        super().__init__(window - 1, error_rate=0.25)

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: ForwardBatch
    ) -> torch.Tensor:
        dead = context.finished[context.token_slots]
        if bool((context.slot_mapping[dead] >= context.block_size_tokens).any()):
            raise DeadRowWroteError("a row that has ended wrote outside the null block")
        return super().forward(token_ids, position_ids, context)


class WatchfulHybridModel(HybridLayers, WatchfulModel):
    """The same with recurrent layers and experts."""


@functools.cache
def expected(
    ask: Ask,
    salts: tuple[tuple[int, int], ...],
    changes: tuple[tuple[int, Ask], ...],
    history: Callable[[list[int], int], int],
) -> tuple[list[int], str]:
    """Tokens and reason of ``ask`` alone, with the weights that ``salts`` say, and sampled as
    ``changes`` say."""
    return decode_with_salts(ask, list(salts), changes, history)


def workload(window: int) -> list[Ask]:
    """Prompts of three beginnings, so that prefixes are shared; a third may stop early. With
    windows the longest are longer."""
    rng = random.Random(11)
    beginnings = [tuple(rng.randrange(61) for _ in range(20)) for _ in range(3)]
    beginnings.append(beginnings[0][:4] + beginnings[1][4:8] + beginnings[2][:12])
    asks = []
    for index in range(32):
        # The first two arrive together and are longer than a chunk; the third begins with blocks
        # that they have, but elsewhere.
        head = beginnings[0]
        if index == 2:
            head = beginnings[0][4:12]
        elif index > 2:
            head = beginnings[index % 4][: rng.choice((1, 8, 13, 20))]
        prompt = (*head, *(rng.randrange(61) for _ in range(rng.randint(0, 6))))
        sampled = index % 2 == 0
        asks.append(
            Ask(
                prompt=prompt,
                max_new=rng.choice((1, 2, 7, 16, 24) if window == 1 else (1, 2, 7, 40, 60)),
                stop_ids=tuple(rng.sample(range(61), 8)) if index % 3 == 0 else (),
                temperature=1.0 if sampled else 0.0,
                top_k=20 if sampled else 0,
                seed=index,
            )
        )
    return asks


class Run:
    """One pass over the workload with all checks on."""

    def __init__(
        self,
        depth: int,
        debug: bool = True,
        device: type[CpuDevice] = CpuDevice,
        window: int = 1,
        hybrid: bool = False,
    ) -> None:
        self.asks = workload(window)[: HYBRID_ASKS[window] if hybrid else None]
        self.hybrid = hybrid
        self.pace = 3 if hybrid else 5
        self.model = (WatchfulHybridModel if hybrid else WatchfulModel)(window)
        self.window = window
        self.tickets = TokenTickets()
        self.depth = depth
        self.debug = debug
        self.device = device
        self.salts = {0: 0}
        self.aborted: set[int] = set()
        self.ended: set[int] = set()
        self.finished: dict[int, DynamicInferenceRequest] = {}

    def start(self) -> EngineCounters:
        """Decode everything; raises what a check finds."""
        with (
            watched(self.depth),
            hash_engine(
                self.depth,
                model=self.model,
                device=self.device(poison=self.debug),
                debug=self.debug,
                max_requests=4,
                block_size_tokens=BLOCKS[self.window][0],
                block_count=BLOCKS[self.window][1] * (1 + self.hybrid),
                prefill_chunk_tokens=8,
                state_snapshot_count=SNAPSHOTS[self.window],
            ) as engine,
        ):
            engine.observe(self.tickets)
            for step in range(MOST_STEPS):
                self._events(engine, step)
                self._take(engine.step_modern())
                if len(self.ended) == len(self.asks) and not engine.has_unfinished_requests():
                    break
            else:
                raise WrongCountsError("the engine does not come to an end")
        self._check(engine.counters)
        return engine.counters

    def _events(self, engine: DynamicInferenceEngine, step: int) -> None:
        pair = step // self.pace
        if step % self.pace == 0 and pair < len(self.asks) // 2:
            for index in (pair * 2, pair * 2 + 1):
                ask = self.asks[index]
                engine.add_request(
                    index, list(ask.prompt), sampling_params(ask), priority=index % 3 - 1
                )
                self.tickets.watch(engine.get_request(index))
        active = list(engine.outputs.keys)
        if not active:
            return
        if step % 7 == 4:
            engine.update_sampling_params(active[0], temperature=step % 3 / 2, top_k=10, seed=step)
            engine.update_sampling_params(active[-1], temperature=1.0, seed=step)
        if step % 13 == 6:
            engine.evict_request(active[0])
        if step % 17 == 9:
            engine.pause_request(active[step % len(active)])
        if step % 17 == 15:
            for request_id in active:
                engine.resume_request(request_id)
        if step % 19 == 18:
            running = [n for n in active if engine.get_request(n).generated_tokens]
            victim = (running or active)[-1]
            if engine.abort_request(victim):
                self.aborted.add(victim)
        if step in (30, 60):
            self.salts[engine.update_weights({"salt": step})] = step

    def _take(self, result: dict[str, Any]) -> None:
        for output in result["tokens"]:
            if output.request_id in self.ended:
                raise TokenAfterEndError(f"request {output.request_id} had ended: {output}")
            if output.finish_reason is not None:
                self.ended.add(output.request_id)
        for request in result["finished_request_records"]:
            self.finished[request.request_id] = request

    def _check(self, counters: EngineCounters) -> None:
        requests = [self.finished[index] for index in range(len(self.asks))]
        for ask, request in zip(self.asks, requests, strict=True):
            salts = tuple((s.start, self.salts[s.version]) for s in request.weight_spans)
            changes = self.tickets.changes(request, ask)
            tokens, reason = expected(ask, salts or ((0, 0),), changes, self.model.history)
            if request.finish_reason is FinishReason.ABORT:
                tokens, reason = tokens[: len(request.generated_tokens)], "abort"
                if request.request_id not in self.aborted:
                    raise WrongCountsError(f"request {request.request_id} was aborted by nobody")
            if (request.generated_tokens, request.finish_reason) != (tokens, reason):
                raise WrongTokensError(
                    f"{request.request_id}: {request.generated_tokens} != {tokens}"
                )
            counts = request.counters
            is_foreseen = request.finish_reason is FinishReason.LENGTH and self.window == 1
            most = 0 if is_foreseen else self.depth + 1
            if counts.discarded > most or counts.committed != len(tokens):
                raise WrongCountsError(f"{request.request_id}: {counts}, {reason}")
            if counts.launched + counts.accepted != counts.committed + counts.discarded:
                raise WrongCountsError(f"{request.request_id}: {counts}")
        if (
            counters.steps_launched != counters.steps_committed
            or counters.tokens_committed != sum(len(r.generated_tokens) for r in requests)
            or counters.tokens_discarded != sum(r.counters.discarded for r in requests)
        ):
            raise WrongCountsError(f"{counters}")


@contextmanager
def watched(depth: int) -> Iterator[None]:
    """Looks at what the device says of rows that have ended, and at the blocks that are held."""
    plan, commit = Scheduler.plan, Scheduler.commit
    ended_by_host: dict[int, int] = {}
    """First ticket that is sampled when the device has been told."""

    def watched_plan(self: Scheduler) -> Plan | None:
        planned = plan(self)
        if planned is not None:
            for sequence in self.table.sequences.values():
                if sequence.reason is FinishReason.ABORT:
                    # S of the step before rides with this launch, behind its control.
                    ended_by_host.setdefault(sequence.key, planned.number - 1)
        return planned

    def watched_commit(self: Scheduler, plan: Plan, result: StepResult) -> Commit:
        sequences = dict(self.table.sequences)
        taken = commit(self, plan, result)
        counts = dict(zip(plan.rows.keys, result.counts, strict=True))
        for key in taken.discarded:
            knows = sequences[key].reason in DEVICE_ENDS
            if counts[key] and (knows or plan.number >= ended_by_host.get(key, plan.number + 1)):
                raise DeadRowLivedError(f"request {key} had ended, and the device went on with it")
        for sequence in self.table.decoding[0].values():
            reach = len(sequence.tokens) - 1 + (depth + 1) * self.limits.window
            if len(sequence.blocks) > -(-reach // self.limits.block_size):
                raise WrongCountsError(f"request {sequence.key} holds {len(sequence.blocks)}")
        return taken

    with (
        patch.object(Scheduler, "plan", watched_plan),
        patch.object(Scheduler, "commit", watched_commit),
    ):
        yield


@pytest.mark.sweep
@pytest.mark.parametrize("window", BLOCKS)
@pytest.mark.parametrize("device", (CpuDevice, CudaRingsDevice))
@pytest.mark.parametrize("depth", DEPTHS)
def test_workload_passes_without_a_fault_and_has_everything(
    depth: int, device: type[CpuDevice], window: int
) -> None:
    run = Run(depth, device=device, window=window)
    counters = run.start()
    reasons = {r.finish_reason for r in run.finished.values()}
    assert reasons == set(FinishReason) - {FinishReason.ERROR}  # that is for NaN logits
    assert (counters.tokens_accepted > 0) == (window > 1)
    assert counters.steps_with_control > 8
    assert sum(len(r.sampling_spans) for r in run.finished.values()) > 8
    for name in (
        "stalls",
        "evictions",
        "pauses",
        "resumes",
        "tokens_cached",
        "tokens_replayed",
        "steps_with_waiting",
    ):
        assert getattr(counters, name) > 0, name
    assert counters.prefill_chunks > len(run.asks)
    assert counters.barriers == 2
    assert len({s.version for r in run.finished.values() for s in r.weight_spans}) == 3
    assert (counters.tokens_discarded > 0) == (depth > 0)


@pytest.mark.parametrize("window", BLOCKS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_workload_passes_with_recurrent_layers_and_experts(depth: int, window: int) -> None:
    run = Run(depth, window=window, hybrid=True)
    counters = run.start()
    assert (counters.tokens_accepted > 0) == (window > 1)
    for name in ("evictions", "pauses", "resumes", "tokens_cached", "states_restored"):
        assert getattr(counters, name) > 0, name
    assert counters.state_snapshots_taken > SNAPSHOTS[window]
    assert (counters.tokens_discarded > 0) == (depth > 0)


@pytest.mark.sweep
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_pass_without_a_fault(scenario: Callable[[int, bool], None], depth: int) -> None:
    for debug in (True, False):
        scenario(depth, debug)


def finders_of(fault: Mutant) -> dict[str, type[BaseException]]:
    """What may find ``fault``: a scenario asserts, and the workload has an error for each check."""
    return CAUGHT if fault.scenario is None else {"AssertionError": AssertionError}


def look_for(fault: Mutant, depth: int, debug: bool = True) -> None:
    """Run what is to find ``fault``."""
    if fault.scenario is None:
        Run(depth, debug, fault.device, fault.window, fault.hybrid).start()
    else:
        fault.scenario(depth, debug)


@pytest.mark.sweep("fault")
@pytest.mark.parametrize(
    ("fault", "depth"),
    [(fault, depth) for fault in MUTANTS for depth in DEPTHS if depth >= fault.least_depth],
    ids=lambda value: value.name if isinstance(value, Mutant) else None,
)
def test_fault_is_caught(fault: Mutant, depth: int) -> None:
    with fault.active(), pytest.raises(tuple(finders_of(fault)[name] for name in fault.caught_by)):
        look_for(fault, depth)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", MUTANTS, ids=lambda fault: fault.name)
def test_fault_is_caught_by_what_users_see_without_debug_checks(fault: Mutant) -> None:
    with fault.active(), pytest.raises(tuple(finders_of(fault).values())):
        look_for(fault, depth=2, debug=False)
