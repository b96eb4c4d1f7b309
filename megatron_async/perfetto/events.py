"""A recording of steps as Chrome's trace event format, which Perfetto reads.

Times are rounded to 1/8 microsecond. Binary floats hold that exactly, so a reader that scales and
truncates finds slices that touch still touching: Perfetto drops those that overlap by a nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_async.device.kernel_profiler import DeviceKernel
from megatron_async.device.protocol import Span
from megatron_async.engine.lifecycle.host_timeline import HostTimeline
from megatron_async.engine.stepping.loop import NO_TICKET
from megatron_async.perfetto.bubble import Stage, bubble, by_stage
from megatron_async.perfetto.timeline import DeviceStep, device_steps
from megatron_async.request.request import StepReport

if TYPE_CHECKING:
    from megatron_async.ranks.timelines import RankTimeline

PROCESS = 1
"""Rank 0's number; that of rank n is n more."""
HOST_LANE, DEVICE_LANE, FIRST_KERNEL_LANE = 1, 2, 3
GRID_NS = 125

Event = dict[str, Any]


class Recording(NamedTuple):
    """Some steps: the host's slices in the order of their ends, the device's in stream order.

    What began before ``start_ns`` was not meant to be shown.

    Attributes:
        ranks: the other ranks of the model, on the same clock.
        collectives: those that rank 0's device ran, where they are seen.
    """

    title: str
    device_name: str
    start_ns: int
    host: HostTimeline
    device: list[Span]
    kernels: list[DeviceKernel]
    ranks: Sequence[RankTimeline] = ()
    collectives: Sequence[Span] = ()


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
    bubble: list[float] | None
    """By stage, see :func:`~megatron_async.perfetto.bubble.bubble`."""


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
        sampled = recording.host.reports.get(step.handed_out)
        if sampled is not None and sampled.drafted:
            args |= {"drafted": sampled.drafted, "accepted": sampled.accepted}
        writer.slice(DEVICE_LANE, step.span, step.title, args)
    writer.collectives(recording.collectives)
    stages = _add_ranks(recording, steps, writer)
    flows = _flows(host, stages, writer)
    _counters(recording.host, start, writer)
    kernel_lanes = {PROCESS: writer.kernels(recording.kernels)}
    for each in recording.ranks:
        process = PROCESS + each.rank
        kernel_lanes[process] = writer.kernels(each.kernels, process)
    tickets = [launch.ticket for launch in recording.host.launches if launch.time_ns >= start]
    commits = [span for span in host if span.name == "commit"]
    first, last = (tickets[0], tickets[-1]) if tickets else (NO_TICKET, NO_TICKET)
    overlapped = len(overlapped_commits(commits, [step for _, each in stages for step in each]))
    reports = [
        recording.host.reports[c.ticket] for c in commits if c.ticket in recording.host.reports
    ]
    drafts = sum(report.drafted for report in reports), sum(report.accepted for report in reports)
    own = Stage(recording.device, recording.collectives)
    pauses = bubble(by_stage(own, recording.ranks), start)
    summary = Summary(first, last, len(commits), overlapped, flows, *drafts, pauses)
    return [*_metadata(recording, kernel_lanes), *writer.in_order()], summary


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


def _add_ranks(
    recording: Recording, own: list[DeviceStep], writer: _Writer
) -> list[tuple[int, list[DeviceStep]]]:
    """Add what ranks other than 0 did; returns for each stage the process that shows its first
    rank, with the device's work there."""
    stages = {0: (PROCESS, own)}
    for each in recording.ranks:
        process = PROCESS + each.rank
        start = recording.start_ns
        for span in each.host:
            if span.start_ns >= start:
                ticket = {"ticket": span.ticket}
                writer.slice(HOST_LANE, span, _host_title(span, None), ticket, process)
        steps = [step for step in device_steps(each.device) if step.span.start_ns >= start]
        for step in steps:
            args = {"ticket": step.span.ticket, "work": step.span.name}
            writer.slice(DEVICE_LANE, step.span, step.title, args, process)
        writer.collectives(each.collectives, process)
        stages.setdefault(each.stage, (process, steps))
    return [stages[stage] for stage in sorted(stages)]


class _Writer:
    """Collects events; ``in_order`` sorts them as a reader needs them."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._events: list[tuple[tuple[int, int, int], Event]] = []

    def collectives(self, spans: Iterable[Span], process: int = PROCESS) -> None:
        for span in spans:
            if span.start_ns >= self._start_ns:
                self.slice(DEVICE_LANE, span, span.name, {"work": "collective"}, process)

    def kernels(self, kernels: Iterable[DeviceKernel], process: int = PROCESS) -> int:
        """Returns the number of lanes that they take."""
        lanes = _lay_out(kernel for kernel in kernels if kernel.start_ns >= self._start_ns)
        for lane, content in enumerate(lanes, FIRST_KERNEL_LANE):
            for kernel in content:
                span = Span("kernel", NO_TICKET, kernel.start_ns, kernel.end_ns)
                name = short_name(kernel.name)
                self.slice(lane, span, name, {"name": kernel.name}, process)
        return len(lanes)

    def slice(self, lane: int, span: Span, name: str, args: Event, process: int = PROCESS) -> None:
        start, end = self._grid(span.start_ns), self._grid(span.end_ns)
        event = {"name": name, "cat": span.name, "ph": "X", "dur": _us(end - start)}
        self._add(lane, (start, start - end, 0), event | {"args": args}, process)

    def flow(self, phase: str, process: int, lane: int, span: Span, ticket: int, after: int) -> int:
        """One point of a ticket's arrow, bound to the slice that encloses it: at its begin, or
        later in it if the point before, at ``after``, is later. Returns where it is."""
        start, end = self._grid(span.start_ns), self._grid(span.end_ns)
        at = min(max(start, after + 1), max(start, end - 1))
        event = {"name": "ticket", "cat": "ticket", "ph": phase, "id": ticket, "bp": "e"}
        self._add(lane, (at, at - end, 1), event, process)
        return at

    def counter(self, name: str, time_ns: int, values: dict[str, int]) -> None:
        event = {"name": name, "ph": "C", "args": values}
        self._add(HOST_LANE, (self._grid(time_ns), 0, 2), event)

    def in_order(self) -> list[Event]:
        return [event for _, event in sorted(self._events, key=lambda item: item[0])]

    def _add(
        self, lane: int, order: tuple[int, int, int], event: Event, process: int = PROCESS
    ) -> None:
        """``order``: time, and among equal times what ends later is around the others, and a flow
        comes after its slice."""
        where = {"ts": _us(order[0]), "pid": process, "tid": lane}
        self._events.append((order, event | where))

    def _grid(self, time_ns: int) -> int:
        return (time_ns - self._start_ns) // GRID_NS


def _us(grid: int) -> float:
    return grid * GRID_NS / 1000


def _host_title(span: Span, report: StepReport | None) -> str:
    if span.ticket == NO_TICKET:
        return span.name if span.name == "receive" else f"{span.name}: nothing"
    drafts = ""
    if report is not None and report.drafted:
        drafts = f": {report.accepted} of {report.drafted} drafts"
    return f"{span.name} {span.ticket}{drafts}"


def _flows(
    host: Sequence[Span], stages: Sequence[tuple[int, list[DeviceStep]]], writer: _Writer
) -> int:
    """Arrows from launch n over F(n) of each stage, S(n) of the last one and T(n) of the first one
    to commit n, for tickets that have them all."""
    first, last = stages[0], stages[-1]
    launches = {span.ticket: span for span in host if span.name == "launch"}
    commits = {span.ticket: span for span in host if span.name == "commit"}
    points = [("s", PROCESS, HOST_LANE, launches)]
    for process, steps in stages:
        points.append(("t", process, DEVICE_LANE, {step.forwarded: step.span for step in steps}))
    points.append(("t", last[0], DEVICE_LANE, {step.sampled: step.span for step in last[1]}))
    if len(stages) > 1:
        points.append(("t", PROCESS, DEVICE_LANE, {step.taken: step.span for step in first[1]}))
    points.append(("f", PROCESS, HOST_LANE, commits))
    tickets = set.intersection(*(set(spans) for *_, spans in points)) - {NO_TICKET}
    for ticket in sorted(tickets):
        at = -1
        for phase, process, lane, spans in points:
            at = writer.flow(phase, process, lane, spans[ticket], ticket, at)
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


def _metadata(recording: Recording, kernel_lanes: Mapping[int, int]) -> list[Event]:
    """``kernel_lanes``: their number by process."""
    device = f"device: {recording.device_name}"
    title = f"rank 0: {recording.title}" if recording.ranks else recording.title
    said = _names(PROCESS, title, device, kernel_lanes[PROCESS])
    for each in recording.ranks:
        process, place = PROCESS + each.rank, f"rank {each.rank}, stage {each.stage}"
        said += _names(process, place, "device", kernel_lanes[process])
    return said


def _names(process: int, title: str, device: str, kernel_lanes: int) -> list[Event]:
    lanes = {HOST_LANE: "host", DEVICE_LANE: device}
    for lane in range(kernel_lanes):
        lanes[FIRST_KERNEL_LANE + lane] = "kernels" + (f" {lane + 1}" if lane else "")
    said: list[tuple[str, int, Event]] = [
        ("process_name", HOST_LANE, {"name": title}),
        ("process_sort_index", HOST_LANE, {"sort_index": process}),
    ]
    for lane, name in lanes.items():
        said.append(("thread_name", lane, {"name": name}))
        said.append(("thread_sort_index", lane, {"sort_index": lane}))
    common = {"ph": "M", "ts": 0.0, "pid": process}
    return [{**common, "name": name, "tid": lane, "args": args} for name, lane, args in said]
