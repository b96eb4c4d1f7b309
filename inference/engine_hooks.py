"""Stands in for the hooks of an engine that offers none yet; to be deleted as a whole.

What takes its place: ``engine.observe(observer)`` for :func:`observe`, ``engine.in_flight_count``,
``step["steps"]``, ``request.steps`` and the engine's own ``StepReport``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple


class StepReport(NamedTuple):
    """One committed step."""

    ticket: int
    effective_depth: int
    overlapped: bool
    reason: str | None
    committed: int
    discarded: int


def in_flight_count(engine: Any) -> int:
    return len(engine._in_flight)


def reports_of_step(step: dict[str, Any]) -> list[StepReport]:
    return list(step.get("steps", ()))


def reports_of_request(request: Any) -> list[StepReport]:
    return list(getattr(request, "steps", ()))


def observe(engine: Any, observer: Any) -> Callable[[], None]:
    """Put clocks around methods of one engine; returns what takes them away again."""
    replaced: list[tuple[Any, str, Any]] = []
    on_span: Any = getattr(observer, "on_span", None)
    on_launch: Any = getattr(observer, "on_launch", None)
    on_commit: Any = getattr(observer, "on_commit", None)
    clock = time.perf_counter_ns
    claimed = taken = -1
    commit: Any = engine._commit
    note_launch: Any = engine._launched

    def replace(owner: Any, method: str, by: Callable[..., Any]) -> None:
        replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, by)

    def span(owner: Any, method: str, name: str, ticket: Callable[[Any, Any], int]) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = call(*args, **kwargs)
            on_span(name, ticket(args[0] if args else None, result), start, clock())
            return result

        replace(owner, method, timed)

    def of_wait(number: int, _: Any) -> int:
        nonlocal taken
        taken = number
        return number

    def add_spans() -> None:
        controller = engine.controller
        span(engine.scheduler, "plan", "plan", lambda _, plan: -1 if plan is None else plan.number)
        span(controller, "launch", "launch", lambda plan, _: int(plan.number))
        span(controller, "_sample", "sample", lambda ticket, _: int(ticket.number))
        span(controller._results, "wait", "wait", of_wait)
        span(engine, "_commit", "commit", lambda plan, _: int(plan.number))
        span(engine._book, "commit", "output", lambda *_: taken)
        claim, mark = controller._packets.claim, engine.device.mark_ticket

        def timed_claim(number: int) -> Any:
            nonlocal claimed
            claimed = clock()
            return claim(number)

        def timed_mark(ticket: int) -> None:
            on_span("pack", ticket, claimed, clock())
            mark(ticket)

        replace(controller._packets, "claim", timed_claim)
        replace(engine.device, "mark_ticket", timed_mark)

    def launched(plan: Any) -> None:
        on_launch(plan)
        note_launch(plan)

    def committed(plan: Any, result: Any, barrier: Any = None) -> None:
        before = engine.counters.tokens_committed, engine.counters.tokens_discarded
        commit(plan, result, barrier=barrier)
        kept, lost = engine.counters.tokens_committed, engine.counters.tokens_discarded
        reason = engine._not_overlapped(barrier)
        depth = len(engine._in_flight)
        said = None if reason is None else reason.value
        on_commit(
            StepReport(plan.number, depth, depth > 0, said, kept - before[0], lost - before[1])
        )

    if on_span is not None:
        add_spans()
    if on_launch is not None:
        replace(engine, "_launched", launched)
    if on_commit is not None:
        commit = engine._commit  # with the clock around it
        replace(engine, "_commit", committed)

    def detach() -> None:
        while replaced:
            owner, method, before = replaced.pop()
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)

    return detach
