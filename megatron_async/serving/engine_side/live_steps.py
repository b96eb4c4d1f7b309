"""The last steps of the engine, recorded while somebody looks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_async.device.protocol import Span
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.host_timeline import HostTimeline

STEPS = 64
"""Shown at most."""
DEVICE_SPANS = 4 * STEPS
LEASE_SECONDS = 2.0
"""For which a recording goes on after it was last read."""
SHOWN = frozenset({"plan", "launch", "wait", "commit"})
"""Slices of the host: the others are inside of these."""


class LiveSteps:
    """One recording for all readers. It begins with the first :meth:`read` and ends when nobody
    has read for ``LEASE_SECONDS``; without one a step pays nothing. It holds the last steps alone.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._host: HostTimeline | None = None
        self._end = 0.0
        self._is_aside = False

    def read(self) -> list[dict[str, Any]]:
        """The last steps that were committed, in order; none while a profile is being taken.

        Each has its ``ticket``; ``decode_rows`` and ``prefill_rows``, and the ``tokens`` of its
        forward; ``committed``, ``discarded``, ``drafted``, ``accepted``, ``effective_depth`` and
        ``reason`` of its ``StepReport``; and what ``host`` and ``device`` did for it, as [name,
        start, duration] in microseconds since the first.
        """
        with self._lock:
            self._end = time.monotonic() + LEASE_SECONDS
            if self._is_aside:
                return []
            if self._host is None:
                self._start()
            host = self._host
        assert host is not None
        return _steps(host, self._engine.device.finished_spans())

    def is_over(self) -> bool:
        """There is a recording that nobody reads any more."""
        return self._host is not None and time.monotonic() > self._end

    def stop(self) -> None:
        """End the recording, unless somebody has begun to read again."""
        with self._lock:
            if self.is_over():
                self._stop()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Nothing is recorded inside: somebody else needs the device's timeline."""
        with self._lock:
            self._is_aside = True
            self._stop()
        try:
            yield
        finally:
            self._is_aside = False

    def _start(self) -> None:
        engine = self._engine
        with engine.lock.gate, engine.lock.mutex:  # between two steps
            engine.device.start_timeline(DEVICE_SPANS)
            self._host = HostTimeline(engine, STEPS)

    def _stop(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.detach()
            self._engine.device.drop_timeline()


def _steps(host: HostTimeline, device: list[Span]) -> list[dict[str, Any]]:
    from megatron_async.perfetto.timeline import device_steps

    # Copies: the engine's thread goes on.
    reports, launches, slices = host.reports.copy(), host.launches.copy(), host.slices.copy()
    of_host: dict[int, list[Span]] = defaultdict(list)
    of_device: dict[int, list[Span]] = defaultdict(list)
    for span in slices:
        if span.name in SHOWN and span.ticket in reports:
            of_host[span.ticket].append(span)
    steps = device_steps(device)
    taken = {span.ticket: span.end_ns for span in slices if span.name == "wait"}
    # S has begun before its tokens were taken: what looks otherwise is the drift of the clocks.
    late = (s.span.start_ns - taken.get(s.handed_out, s.span.start_ns) for s in steps)
    drift = max([0, *late])
    for step in steps:
        _, ticket, begin, end, _ = step.span
        if ticket in reports:
            of_device[ticket].append(Span(step.title, ticket, begin - drift, end - drift))
    spans = (*of_host.values(), *of_device.values())
    start = min((span.start_ns for each in spans for span in each), default=0)
    shown = []
    for launch in launches:
        report = reports.get(launch.ticket)
        if report is None:
            continue  # in flight
        shown.append(
            {
                "ticket": launch.ticket,
                "decode_rows": launch.decode_rows,
                "prefill_rows": launch.prefill_rows,
                "tokens": launch.tokens,
                "committed": report.committed,
                "discarded": report.discarded,
                "drafted": report.drafted,
                "accepted": report.accepted,
                "effective_depth": report.effective_depth,
                "reason": report.reason,
                "host": _in_microseconds(of_host[launch.ticket], start),
                "device": _in_microseconds(of_device[launch.ticket], start),
            }
        )
    return shown


def _in_microseconds(spans: Iterable[Span], start_ns: int) -> list[tuple[str, float, float]]:
    return [
        (span.name, (span.start_ns - start_ns) / 1e3, (span.end_ns - span.start_ns) / 1e3)
        for span in spans
    ]
