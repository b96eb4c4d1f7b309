"""Measures what decode steps cost, before the first request, to choose how much to draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

from megatron_async.runner.model_runner import ModelRunner
from megatron_async.step.plan import Plan, RowMap

ROUNDS, WARM_UP_STEPS, TIMED_STEPS = 2, 2, 4

StepCost = tuple[int, int, float]
"""Rows, window, and seconds of a step."""


def measure_step_costs(
    runner: ModelRunner, buckets: Sequence[int], windows: Sequence[int], null_slot: int
) -> tuple[StepCost, ...]:
    """Seconds of steady decode steps, with what they draft, of padding rows: at the shortest
    context, so that windows differ by their tokens alone. Of two rounds, between which whatever
    else runs may have gone, the shorter time counts.

    Args:
        buckets: padded row counts, ascending; measured are those that double at least, and the
            last.
    """
    chosen: list[int] = []
    for rows in buckets:
        if not chosen or rows >= 2 * chosen[-1] or rows == buckets[-1]:
            chosen.append(rows)
    seconds: dict[tuple[int, int], float] = {}
    for _, shape in product(range(ROUNDS), list(product(chosen, windows))):
        measured = _seconds(runner, *shape, null_slot)
        seconds[shape] = min(seconds.get(shape, measured), measured)
    return tuple((*shape, least) for shape, least in seconds.items())


def _seconds(runner: ModelRunner, rows: int, window: int, null_slot: int) -> float:
    """The mean of some steps in a row; the runner is as before."""
    row_map = RowMap((null_slot,) * rows, (0,) * rows, (0,) * rows, (window,) * rows)
    first = Plan(
        number=0, rows=row_map, decode_rows=rows, assignments=(), window=window, drafts=window - 1
    )
    ends = []
    ticket = runner.launch(first)
    for number in range(1, WARM_UP_STEPS + TIMED_STEPS + 1):
        following = runner.launch(first._replace(number=number))
        runner.take(ticket)
        ends.append(time.perf_counter())
        ticket = following
    runner.take(ticket)
    runner.restart()
    return (ends[-1] - ends[WARM_UP_STEPS - 1]) / TIMED_STEPS
