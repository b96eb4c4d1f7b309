"""How fast the host is while something is measured, and who else uses it: its time a step means
little without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import psutil

REFERENCE_RUNS = 25


class HostConditions(NamedTuple):
    """Of one round.

    ``reference_us`` is how long :func:`reference_work` took before and after it. Cores are means
    over the round: ``other_threads_cores`` kept busy by this process besides the measuring thread,
    ``other_processes_cores`` by the others that this machine can see, ``stolen_cores`` withheld by
    the machine that this one is a guest of.
    """

    reference_us: tuple[float, float]
    other_threads_cores: float
    other_processes_cores: float
    stolen_cores: float


class HostWatch:
    """``with HostWatch() as watch: measure()``, then ``watch.conditions``."""

    conditions: HostConditions

    def __enter__(self) -> Self:
        self._reference = reference_us()
        self._before = _used()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        wall, thread, process, machine, stolen = (
            now - before for now, before in zip(_used(), self._before, strict=True)
        )
        self.conditions = HostConditions(
            reference_us=(self._reference, reference_us()),
            # Clocks of different grain: a difference can come out below nothing.
            other_threads_cores=max((process - thread) / wall, 0.0),
            other_processes_cores=max((machine - process) / wall, 0.0),
            stolen_cores=stolen / wall,
        )


def reference_us() -> float:
    """Microseconds of :func:`reference_work`, the median of ``REFERENCE_RUNS``."""
    times = []
    for _ in range(REFERENCE_RUNS):
        started = time.perf_counter_ns()
        reference_work()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) * 1e-3


def reference_work() -> int:
    """The same look-ups and sums on every host: what a scheduler does, of about its length."""
    counts: dict[int, int] = {}
    for number in range(500):
        counts[number & 31] = counts.get(number & 31, 0) + number
    return sum(counts.values())


def conditions_line(found: Sequence[HostConditions]) -> str:
    """All rounds in a line, for people."""
    times = [us for one in found for us in one.reference_us]
    cores = ", ".join(
        f"{what} {max(getattr(one, field) for one in found):.1f}"
        for what, field in (
            ("other threads", "other_threads_cores"),
            ("other processes", "other_processes_cores"),
            ("stolen", "stolen_cores"),
        )
    )
    return (
        f"host: reference work {min(times):.0f} to {max(times):.0f} us; "
        f"cores at most, of a round: {cores}"
    )


def _used() -> tuple[float, float, float, float, float]:
    """Seconds: of the clock, of this thread, of this process, of the machine, stolen from it."""
    process, machine = psutil.Process().cpu_times(), psutil.cpu_times()
    return (
        time.perf_counter(),
        time.thread_time(),
        process.user + process.system,
        # Niced work is apart here, and not in the process's figures; Linux alone tells.
        machine.user + machine.system + getattr(machine, "nice", 0.0),
        getattr(machine, "steal", 0.0),
    )
