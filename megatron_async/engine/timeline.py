"""What the host did when, and the device: the two timelines of an engine, on one clock.

Nothing is built into the loop for this: a :class:`HostTimeline` puts clocks around the methods of
one engine, and takes them away again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_async.device.cpu import CpuDevice, Span
from megatron_async.device.cuda import CudaDevice
from megatron_async.device.cuda_timeline import CudaTimeline
from megatron_async.device.protocol import Device
from megatron_async.errors import ConfigError
from megatron_async.step.plan import Plan

NO_TICKET = -1


class Launch(NamedTuple):
    """What was launched when."""

    ticket: int
    time_ns: int
    decode_rows: int
    prefill_rows: int
    tokens: int


class HostTimeline:
    """Slices of the host's work on ``engine`` since it was attached, in the order of their ends.

    ``plan``; ``launch`` with ``pack`` (the packet) and ``launch S`` in it; ``book launch``;
    ``wait``; ``commit`` with ``book`` (records, text) in it. A slice holds the ticket it is about,
    or :data:`NO_TICKET` where a plan found nothing to launch.

    Args:
        engine: stands between two steps. Its steps run on one thread.

    Attributes:
        in_flight: tickets whose tokens the host had not taken when the timeline began.
    """

    def __init__(self, engine: Any) -> None:
        self.in_flight = len(engine._in_flight)
        self.slices: list[Span] = []
        self.launches: list[Launch] = []
        self._taken = NO_TICKET
        self._claimed = 0
        self._replaced: list[tuple[Any, str, Any]] = []
        controller = engine.controller
        self._time(engine.scheduler, "plan", "plan", self._of_plan)
        self._time(controller, "launch", "launch", self._of_launch)
        self._time(controller, "_sample", "launch S", lambda ticket, _: int(ticket.number))
        self._time(engine, "_launched", "book launch", lambda plan, _: int(plan.number))
        self._time(controller._results, "wait", "wait", self._of_wait)
        self._time(engine, "_commit", "commit", lambda plan, _: int(plan.number))
        self._time(engine._book, "commit", "book", lambda *_: self._taken)
        self._time_packing(controller._packets, engine.device)

    def detach(self) -> None:
        """Leave the engine as it was."""
        while self._replaced:
            owner, method, before = self._replaced.pop()
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)

    def _replace(self, owner: Any, method: str, by: Callable[..., Any]) -> None:
        self._replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, by)

    def _time(self, owner: Any, method: str, name: str, ticket: Callable[[Any, Any], int]) -> None:
        """Put a clock around a method; ``ticket`` is told its first argument and its result."""
        call = getattr(owner, method)
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = call(*args, **kwargs)
            end = clock()
            number = ticket(args[0] if args else None, result)
            self.slices.append(Span(name, number, start, end))
            return result

        self._replace(owner, method, timed)

    def _time_packing(self, packets: Any, device: Any) -> None:
        """A packet is written between the claim of its entry and the mark of its ticket."""
        claim, mark_ticket = packets.claim, device.mark_ticket

        def timed_claim(number: int) -> Any:
            self._claimed = time.perf_counter_ns()
            return claim(number)

        def timed_mark(ticket: int) -> None:
            self.slices.append(Span("pack", ticket, self._claimed, time.perf_counter_ns()))
            mark_ticket(ticket)

        self._replace(packets, "claim", timed_claim)
        self._replace(device, "mark_ticket", timed_mark)

    @staticmethod
    def _of_plan(_: None, plan: Plan | None) -> int:
        return NO_TICKET if plan is None else plan.number

    def _of_launch(self, plan: Plan, _: Any) -> int:
        prefills = len(plan.prefills)
        now = time.perf_counter_ns()
        self.launches.append(Launch(plan.number, now, plan.decode_rows, prefills, plan.num_tokens))
        return plan.number

    def _of_wait(self, number: int, _: Any) -> int:
        self._taken = number
        return number


def start_device_timeline(device: Device) -> None:
    """Record from now on when work runs on ``device``; on CUDA this waits for it once.

    Raises:
        ConfigError: the device has no timeline.
    """
    if isinstance(device, CpuDevice):
        device.timeline = []
    elif isinstance(device, CudaDevice):
        device.timeline = CudaTimeline(device.stream)
    else:
        raise ConfigError(f"a {type(device).__name__} records no timeline; use cpu or cuda")


def take_device_timeline(device: Device) -> list[Span]:
    """Wait for ``device``, stop recording, and return what ran, in stream order."""
    device.synchronize()
    if not isinstance(device, CpuDevice | CudaDevice) or device.timeline is None:
        return []
    timeline, device.timeline = device.timeline, None
    spans = timeline.spans() if isinstance(timeline, CudaTimeline) else timeline
    return [span for span in spans if span.name != "synchronize"]


class DeviceStep(NamedTuple):
    """A span of the device; which tickets' S and F are in it, :data:`NO_TICKET` for none."""

    span: Span
    sampled: int
    forwarded: int

    @property
    def title(self) -> str:
        """The span's name with ticket numbers in it: ``S4 H2D F5``."""
        words = self.span.name.split()
        numbers = {"S": self.sampled, "F": self.forwarded}
        return " ".join(f"{word}{numbers.get(word, '')}" for word in words)


def device_steps(spans: Sequence[Span]) -> list[DeviceStep]:
    """Tell S and F of tickets apart. S always samples what the last F before it left pending."""
    steps = []
    pending = NO_TICKET
    for span in spans:
        words = span.name.split()
        has_sample, has_forward = "S" in words, "F" in words
        sampled = NO_TICKET
        if has_sample:
            # The first span of a timeline may sample a forward from before it.
            sampled = span.ticket - has_forward if pending == NO_TICKET else pending
        forwarded = span.ticket if has_forward else NO_TICKET
        if has_forward:
            pending = span.ticket
        steps.append(DeviceStep(span, sampled, forwarded))
    return steps
