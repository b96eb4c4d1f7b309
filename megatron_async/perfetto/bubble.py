"""The bubble of a pipeline: the share of its time in which a stage does not compute.

A stage idles between two launches, and it stands still inside of one until another stage's message
is there. On a CPU the receives of messages are timed. Inside a graph nothing is, but the timelines
of two stages tell it: F of a ticket cannot begin before the stage in front is through with it, and
T of one not before the last stage's S of it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_async.device.protocol import Span
from megatron_async.engine.stepping.loop import NO_TICKET
from megatron_async.perfetto.timeline import DeviceStep, device_steps

if TYPE_CHECKING:
    from megatron_async.ranks.timelines import RankTimeline

RECEIVE = "receive"
"""How the collectives are called in which a stage waits for another one."""


class Stage(NamedTuple):
    """What one rank of a stage did: its device's timeline, and its collectives where they are
    seen."""

    device: Sequence[Span]
    collectives: Sequence[Span] = ()


def by_stage(own: Stage, others: Sequence[RankTimeline]) -> list[Stage]:
    """What the first rank of each stage did, in the order of the stages; ``own`` is rank 0's."""
    stages = {0: own}
    for each in others:
        stages.setdefault(each.stage, Stage(each.device, each.collectives))
    return [stages[stage] for stage in sorted(stages)]


def bubble(stages: Sequence[Stage], start_ns: int = 0) -> list[float] | None:
    """By stage the share of the time, in which all of them had launches, that it did not compute.

    Where no receives are seen, an S in front of an F that waits counts as waiting: it is short.

    Args:
        stages: in their order, on one clock.
        start_ns: what began before is left out.

    Returns:
        None where there is one stage, or too little to tell.
    """
    steps = [device_steps(stage.device) for stage in stages]
    shown = [[step for step in each if step.span.start_ns >= start_ns] for each in steps]
    if len(stages) < 2 or not all(shown):
        return None
    begin = max(each[0].span.start_ns for each in shown)
    end = min(each[-1].span.end_ns for each in shown)
    if end <= begin:
        return None
    forwarded = [{step.forwarded: step.span.end_ns for step in each} for each in steps]
    sampled = {step.sampled: step.span.start_ns for step in steps[-1]}
    shares = []
    for number, each in enumerate(shown):
        receives = [span for span in stages[number].collectives if span.name == RECEIVE]
        before = forwarded[number - 1] if number and not receives else {}
        busy = 0
        for step in each:
            ready = 0 if receives else _ready_ns(step, before, sampled)
            busy += _within(max(ready, step.span.start_ns), step.span.end_ns, begin, end)
        busy -= sum(_within(span.start_ns, span.end_ns, begin, end) for span in receives)
        shares.append(1 - busy / (end - begin))
    return shares


def _within(start_ns: int, end_ns: int, begin: int, end: int) -> int:
    return max(0, min(end_ns, end) - max(start_ns, begin))


def _ready_ns(step: DeviceStep, before: dict[int, int], sampled: dict[int, int]) -> int:
    """When what ``step`` takes of other stages was there; 0 of what nobody has seen."""
    ready = 0
    if step.forwarded != NO_TICKET:
        ready = before.get(step.forwarded, 0)
    if step.taken != NO_TICKET:
        ready = max(ready, sampled.get(step.taken, 0))
    return ready


def said(shares: Sequence[float]) -> str:
    """For people: ``stage 0 12.5 %, stage 1 3.0 %``."""
    return ", ".join(f"stage {n} {100 * share:.1f} %" for n, share in enumerate(shares))
