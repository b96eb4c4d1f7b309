"""A recording of steps as Chrome's trace event format, which Perfetto reads.

Times are rounded to 1/8 microsecond. Binary floats hold that exactly, so a reader that scales and
truncates finds slices that touch still touching: Perfetto drops those that overlap by a nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megatron_async.device.kernel_profiler import DeviceKernel
from megatron_async.device.protocol import Span
from megatron_async.engine.lifecycle.host_timeline import HostTimeline
from megatron_async.engine.stepping.loop import NO_TICKET
from megatron_async.perfetto.timeline import DeviceStep, device_steps
from megatron_async.request.request import StepReport

PROCESS = 1
HOST_LANE, DEVICE_LANE, FIRST_KERNEL_LANE = 1, 2, 3
GRID_NS = 125

Event = dict[str, Any]


class Recording(NamedTuple):
    """Some steps: the host's slices in the order of their ends, the device's in stream order.

    What began before ``start_ns`` was not meant to be shown: the device's part of it says which
    ticket's logits were pending.
    """

    title: str
    device_name: str
    start_ns: int
    host: HostTimeline
    device: list[Span]
    kernels: list[DeviceKernel]


class Summary(NamedTuple):
    """How much of the host's work the device did not wait for.

    ``overlapped`` of ``commits`` commits ran while the forward of a later ticket did. Of
    ``drafted`` drafts that those commits saw ``accepted`` were right.
    """

    first_ticket: int
    last_ticket: int
    commits: int
    overlapped: int
    flows: int
    drafted: int
    accepted: int


def trace_events(recording: Recording) -> tuple[list[Event], Summary]:
    """All events in order of time, metadata first, and what they show."""
    start = recording.start_ns
    steps = [step for step in device_steps(recording.device) if step.span.start_ns >= start]
    host = [span for span in recording.host.slices if span.start_ns >= start]
    writer = _Writer(start)
    for span in host:
        # Nothing is reported of a step that the engine was committing at the end.
        report = recording.host.reports.get(span.ticket) if span.name == "commit" else None
        args = {"ticket": span.ticket} | ({} if report is None else report._asdict())
        writer.slice(HOST_LANE, span, _host_title(span, report), args)
    for step in steps:
        args = {"ticket": step.span.ticket, "work": step.span.name}
        sampled = recording.host.reports.get(step.sampled)
        if sampled is not None and sampled.drafted:
            args |= {"drafted": sampled.drafted, "accepted": sampled.accepted}
        writer.slice(DEVICE_LANE, step.span, step.title, args)
    flows = _flows(host, steps, writer)
    _counters(recording.host, start, writer)
    kernels = [kernel for kernel in recording.kernels if kernel.start_ns >= start]
    lanes = _lay_out(kernels)
    for lane, content in enumerate(lanes, FIRST_KERNEL_LANE):
        for kernel in content:
            span = Span("kernel", NO_TICKET, kernel.start_ns, kernel.end_ns)
            writer.slice(lane, span, short_name(kernel.name), {"name": kernel.name})
    tickets = [launch.ticket for launch in recording.host.launches if launch.time_ns >= start]
    commits = [span for span in host if span.name == "commit"]
    first, last = (tickets[0], tickets[-1]) if tickets else (NO_TICKET, NO_TICKET)
    overlapped = len(overlapped_commits(commits, steps))
    reports = [
        recording.host.reports[c.ticket] for c in commits if c.ticket in recording.host.reports
    ]
    drafts = sum(report.drafted for report in reports), sum(report.accepted for report in reports)
    summary = Summary(first, last, len(commits), overlapped, flows, *drafts)
    return [*_metadata(recording, len(lanes)), *writer.in_order()], summary


def overlapped_commits(commits: Sequence[Span], steps: Sequence[DeviceStep]) -> list[int]:
    """Tickets whose commit ran, at least in part, while the forward of a later one did."""

    def overlaps(step: DeviceStep, commit: Span) -> bool:
        begins, ends = step.span.start_ns, step.span.end_ns
        later = step.forwarded > commit.ticket
        return later and begins < commit.end_ns and ends > commit.start_ns

    return [each.ticket for each in commits if any(overlaps(step, each) for step in steps)]


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, namespaces, template and function arguments."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = name.split("<")[0].split("(")[0].strip()
    return name.split("::")[-1] or kernel


class _Writer:
    """Collects events; ``in_order`` sorts them as a reader needs them."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._events: list[tuple[tuple[int, int, int], Event]] = []

    def slice(self, lane: int, span: Span, name: str, args: Event) -> None:
        start, end = self._grid(span.start_ns), self._grid(span.end_ns)
        event = {"name": name, "cat": span.name, "ph": "X", "dur": _us(end - start)}
        self._add(lane, (start, start - end, 0), event | {"args": args})

    def flow(self, phase: str, lane: int, span: Span, ticket: int) -> None:
        """One point of a ticket's arrow, bound to the slice that encloses the span's begin."""
        start, end = self._grid(span.start_ns), self._grid(span.end_ns)
        event = {"name": "ticket", "cat": "ticket", "ph": phase, "id": ticket, "bp": "e"}
        self._add(lane, (start, start - end, 1), event)

    def counter(self, name: str, time_ns: int, values: dict[str, int]) -> None:
        event = {"name": name, "ph": "C", "args": values}
        self._add(HOST_LANE, (self._grid(time_ns), 0, 2), event)

    def in_order(self) -> list[Event]:
        return [event for _, event in sorted(self._events, key=lambda item: item[0])]

    def _add(self, lane: int, order: tuple[int, int, int], event: Event) -> None:
        """``order``: time, and among equal times what ends later is around the others, and a flow
        comes after its slice."""
        where = {"ts": _us(order[0]), "pid": PROCESS, "tid": lane}
        self._events.append((order, event | where))

    def _grid(self, time_ns: int) -> int:
        return (time_ns - self._start_ns) // GRID_NS


def _us(grid: int) -> float:
    return grid * GRID_NS / 1000


def _host_title(span: Span, report: StepReport | None) -> str:
    if span.ticket == NO_TICKET:
        return f"{span.name}: nothing"
    drafts = ""
    if report is not None and report.drafted:
        drafts = f": {report.accepted} of {report.drafted} drafts"
    return f"{span.name} {span.ticket}{drafts}"


def _flows(host: Sequence[Span], steps: Sequence[DeviceStep], writer: _Writer) -> int:
    """Arrows from launch n over F(n) and S(n) to commit n, for tickets that have all four."""
    points = (
        ("s", HOST_LANE, {span.ticket: span for span in host if span.name == "launch"}),
        ("t", DEVICE_LANE, {step.forwarded: step.span for step in steps}),
        ("t", DEVICE_LANE, {step.sampled: step.span for step in steps}),
        ("f", HOST_LANE, {span.ticket: span for span in host if span.name == "commit"}),
    )
    tickets = set.intersection(*(set(spans) for _, _, spans in points)) - {NO_TICKET}
    for ticket in sorted(tickets):
        for phase, lane, spans in points:
            writer.flow(phase, lane, spans[ticket], ticket)
    return len(tickets)


def _counters(host: HostTimeline, start_ns: int, writer: _Writer) -> None:
    """Rows of each launch, the tickets in flight (launched, their tokens not taken), and the drafts
    of each commit."""
    changes = [(launch.time_ns, 1) for launch in host.launches]
    changes += [(span.end_ns, -1) for span in host.slices if span.name == "wait"]
    in_flight = host.in_flight + sum(change for time_ns, change in changes if time_ns < start_ns)
    shown = sorted(change for change in changes if change[0] >= start_ns)
    for time_ns, change in [(start_ns, 0), *shown] if shown else []:
        in_flight += change
        writer.counter("tickets in flight", time_ns, {"tickets": in_flight})
    for launch in host.launches:
        if launch.time_ns >= start_ns:
            rows = {"decode": launch.decode_rows, "prefill": launch.prefill_rows}
            writer.counter("rows", launch.time_ns, rows)
    for span in host.slices:
        report = host.reports.get(span.ticket) if span.name == "commit" else None
        if report is not None and report.drafted and span.start_ns >= start_ns:
            rejected = report.drafted - report.accepted
            drafts = {"accepted": report.accepted, "rejected": rejected}
            writer.counter("drafts", span.start_ns, drafts)


def _lay_out(kernels: Iterable[DeviceKernel]) -> list[list[DeviceKernel]]:
    """Distribute kernels over as few lanes as their overlaps need."""
    lanes: list[list[DeviceKernel]] = []
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start_ns, kernel.end_ns)):
        lane = next((lane for lane in lanes if lane[-1].end_ns <= kernel.start_ns), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(kernel)
    return lanes


def _metadata(recording: Recording, kernel_lanes: int) -> list[Event]:
    names = {HOST_LANE: "host", DEVICE_LANE: f"device: {recording.device_name}"}
    for lane in range(kernel_lanes):
        names[FIRST_KERNEL_LANE + lane] = "kernels" + (f" {lane + 1}" if lane else "")
    said: list[tuple[str, int, Event]] = [("process_name", HOST_LANE, {"name": recording.title})]
    for lane, name in names.items():
        said.append(("thread_name", lane, {"name": name}))
        said.append(("thread_sort_index", lane, {"sort_index": lane}))
    common = {"ph": "M", "ts": 0.0, "pid": PROCESS}
    return [{**common, "name": name, "tid": lane, "args": args} for name, lane, args in said]
