"""The kernels of a stretch of steps, from ``torch.profiler``, on the host's clock."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
"""One of the profiler's Chrome trace; microseconds of its own clock."""

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_MARK = "megatron_async.clock"
MARKS = 8


class DeviceKernel(NamedTuple):
    """A kernel or copy; times in nanoseconds of the host's clock."""

    name: str
    start_ns: int
    end_ns: int


class KernelProfiler:
    """Profiles from its construction to :meth:`take`.

    The profiler times host and device by one clock of its own. Annotations whose time is known on
    the host's clock too give the difference; the shortest of them the best.
    """

    def __init__(self, *, device_activity: bool = True) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU]
        if device_activity:
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._marks: list[tuple[int, int]] = []
        for number in range(MARKS):
            before = time.perf_counter_ns()
            with record_function(f"{_MARK} {number}"):
                pass
            self._marks.append((before, time.perf_counter_ns()))

    def take(self) -> list[DeviceKernel]:
        """Stop, and return what ran on the device, which must be idle."""
        return kernels_of(self.take_events(), self._marks)

    def take_events(self) -> list[Event]:
        """Stop, and return the profiler's own trace events."""
        self._profile.stop()
        return events_of(self._profile)


def kernels_of(events: list[Event], marks: list[tuple[int, int]]) -> list[DeviceKernel]:
    """Device work in a profiler's events. Mark i lies between the two host times ``marks[i]``."""
    shift = clock_shift_ns(events, marks)
    found = []
    for event in device_work(events):
        start = _ns(event["ts"]) + shift
        found.append(DeviceKernel(event["name"], start, start + _ns(event["dur"])))
    return found


def clock_shift_ns(events: list[Event], marks: list[tuple[int, int]]) -> int:
    """What to add to the profiler's times, in nanoseconds, to get the host's."""
    shifts = []
    for event in events:
        name = event.get("name", "")
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and _MARK in name:
            before, after = marks[int(name.split()[-1])]
            middle = _ns(event["ts"]) + _ns(event["dur"]) // 2
            shifts.append((after - before, (before + after) // 2 - middle))
    if not shifts:
        raise RuntimeError("the profiler's trace does not show the annotations that align it")
    return min(shifts)[1]


def events_of(profile: Any) -> list[Event]:
    """All events of a ``torch.profiler.profile`` that has been stopped."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
        return events


def device_work(events: Iterable[Event]) -> Iterator[Event]:
    """Kernels, copies and fills."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES:
            yield event


def _ns(microseconds: float | str) -> int:
    return round(float(microseconds) * 1e3)
