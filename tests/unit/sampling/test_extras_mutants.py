"""Faults that an extended S can have are found by the checks of its parity tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from megatron_async.engine.requests.host_ends import HostEnds
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.errors import IntegrityError
from megatron_async.runner import sampling_stage as stage
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.masks import MaskRing
from megatron_async.runner.prompt_log_probs import PromptTargets
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.extras import SlotExtras
from megatron_async.step.plan import Plan
from megatron_async.step.records import StepResult
from tests.unit.engine import test_extras_parity as extras
from tests.unit.engine import test_guided_requests as guided


@functools.cache
def extras_of(event: str) -> Callable[[int], None]:
    def check(depth: int) -> None:
        extras.check(extras.run(event, depth)[0])

    return check


def guided_of(depth: int) -> None:
    requests, _ = guided.run(depth, "none")
    for name, request in requests.items():
        assert guided.what_came(request) == guided.serial()[name], name


class Fault(NamedTuple):
    target: Any
    method: str
    make: Callable[[Any], Any]
    found_by: Callable[[int], None]
    depths: tuple[int, ...] = (0, 2)


def tokens_are_not_counted(original: Any) -> Any:
    return lambda *args: None


def tokens_of_dead_rows_are_counted(original: Any) -> Any:
    def advance(tables: Any, slots: Any, tokens: Any, counts: Any, positions: Any) -> None:
        original(tables, slots, tokens, counts.clamp(min=1), positions + 1)

    return advance


def a_slot_keeps_the_extras_of_the_request_before(original: Any) -> Any:
    return lambda self, slot: None


def an_evicted_request_forgets_its_output(original: Any) -> Any:
    def admit(self: ExtrasTables, slot: int, asked: SlotExtras) -> None:
        original(self, slot, asked._replace(tokens=asked.tokens[: asked.prompt_length]))

    return admit


def prompts_count_as_output(original: Any) -> Any:
    def admit(self: ExtrasTables, slot: int, asked: SlotExtras) -> None:
        original(self, slot, asked._replace(prompt_length=0))

    return admit


def the_mask_of_the_step_before(original: Any) -> Any:
    return lambda self, number: original(self, number - 1)


def masks_without_the_tokens_in_flight(original: Any) -> Any:
    def before_plan(self: DecodeLoop) -> None:
        pending = self._runner.pending
        if self._scheduler.table.guided and pending is not None:
            self._guidance.prepare(pending)

    return before_plan


def what_comes_behind_a_host_end_is_kept(original: Any) -> Any:
    def keep(self: HostEnds, key: int, tokens: Any) -> int | None:
        kept: int | None = original(self, key, tokens)
        self.late = getattr(self, "late", {})  # type: ignore[attr-defined]
        was, self.late[key] = self.late.get(key), kept  # type: ignore[attr-defined]
        return was

    return keep


def log_probabilities_of_the_next_row(original: Any) -> Any:
    def commit(self: Scheduler, plan: Plan, result: StepResult) -> Any:
        if result.log_probs is not None and len(result.log_probs) > 1:
            result = result._replace(log_probs=result.log_probs[::-1].copy())
        return original(self, plan, result)

    return commit


def log_probabilities_of_the_prompt_token_before(original: Any) -> Any:
    def of(plan: Plan) -> Any:
        found = original(plan)
        return found and found._replace(tokens=tuple(max(at - 1, 0) for at in found.tokens))

    return staticmethod(of)


FAULTS = (
    Fault(stage, "advance", tokens_are_not_counted, extras_of("none")),
    Fault(stage, "advance", tokens_of_dead_rows_are_counted, extras_of("none")),
    Fault(ExtrasTables, "clear", a_slot_keeps_the_extras_of_the_request_before, extras_of("none")),
    Fault(ExtrasTables, "admit", an_evicted_request_forgets_its_output, extras_of("evictions")),
    Fault(ExtrasTables, "admit", prompts_count_as_output, extras_of("none")),
    Fault(MaskRing, "entry", the_mask_of_the_step_before, guided_of),
    Fault(DecodeLoop, "_before_plan", masks_without_the_tokens_in_flight, guided_of, (2, 4)),
    Fault(HostEnds, "keep", what_comes_behind_a_host_end_is_kept, guided_of),
    Fault(Scheduler, "commit", log_probabilities_of_the_next_row, extras_of("none")),
    Fault(PromptTargets, "of", log_probabilities_of_the_prompt_token_before, extras_of("none")),
)


@functools.cache
def finds_nothing_without_a_fault(check: Callable[[int], None], depth: int) -> None:
    """Several faults have the same check."""
    check(depth)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.make.__name__)
def test_fault_is_found(fault: Fault) -> None:
    for depth in fault.depths:
        finds_nothing_without_a_fault(fault.found_by, depth)
        original = getattr(fault.target, fault.method)
        with (
            patch.object(fault.target, fault.method, fault.make(original)),
            pytest.raises((AssertionError, IntegrityError, ValueError)),
        ):
            fault.found_by(depth)
