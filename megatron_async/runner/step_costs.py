"""What decode steps cost, measured before the first request: for who chooses how much to draft."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence

from megatron_async.runner.model_runner import ModelRunner
from megatron_async.step.plan import Plan, RowMap

WARM_UP_STEPS, TIMED_STEPS = 2, 5

StepCost = tuple[int, int, float]
"""Rows, window, and seconds of a step."""


def measure_step_costs(
    runner: ModelRunner, buckets: Sequence[int], windows: Iterable[int], null_slot: int
) -> tuple[StepCost, ...]:
    """Seconds of steady decode steps, with what they draft, of padding rows: at the shortest
    context, where the forward costs the same for all windows but for the tokens.

    Args:
        buckets: padded row counts, ascending; measured are those that double at least.
    """
    chosen: list[int] = []
    for rows in buckets:
        if not chosen or rows >= 2 * chosen[-1] or rows == buckets[-1]:
            chosen.append(rows)
    return tuple(
        (rows, window, _seconds(runner, rows, window, null_slot))
        for rows in chosen
        for window in windows
    )


def _seconds(runner: ModelRunner, rows: int, window: int, null_slot: int) -> float:
    row_map = RowMap((null_slot,) * rows, (0,) * rows, (0,) * rows, (window,) * rows)
    ends = []
    ticket = runner.launch(Plan(0, row_map, rows, (), window=window, drafts=window - 1))
    for number in range(1, WARM_UP_STEPS + TIMED_STEPS + 2):
        plan = Plan(number, row_map, rows, (), window=window, drafts=window - 1)
        following = runner.launch(plan)
        runner.take(ticket)
        ends.append(time.perf_counter())
        ticket = following
    runner.take(ticket)
    runner.restart()
    timed = ends[WARM_UP_STEPS:]
    return statistics.median(end - start for start, end in itertools.pairwise(timed))
