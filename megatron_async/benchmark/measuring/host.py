"""How fast the host is while something is measured, and what else uses it: its time a step means
little without."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import psutil

REFERENCE_RUNS = 25


class HostConditions(NamedTuple):
    """The host during one round.

    ``reference_us`` is how long :func:`reference_work` took before and after it. Cores are means
    over the round: ``other_threads_cores`` kept busy by this process besides the measuring thread,
    ``other_processes_cores`` by the others that this machine can see, ``stolen_cores`` withheld by
    the machine that this one is a guest of.
    """

    reference_us: tuple[float, float]
    other_threads_cores: float
    other_processes_cores: float
    stolen_cores: float


@contextmanager
def host_watch() -> Iterator[list[HostConditions]]:
    """``with host_watch() as seen: measure()``, then the conditions are in ``seen``."""
    seen: list[HostConditions] = []
    reference, before = reference_us(), _used()
    yield seen
    pairs = zip(_used(), before, strict=True)
    wall, thread, process, machine, stolen = (now - earlier for now, earlier in pairs)
    # Clocks of different grain: a difference can come out below nothing.
    threads, processes = max((process - thread) / wall, 0.0), max((machine - process) / wall, 0.0)
    seen.append(HostConditions((reference, reference_us()), threads, processes, stolen / wall))


def reference_us() -> float:
    """Microseconds of :func:`reference_work`, the median of ``REFERENCE_RUNS``."""
    times = timeit.repeat(reference_work, number=1, repeat=REFERENCE_RUNS)
    return statistics.median(times) * 1e6


def reference_work() -> int:
    """The same look-ups and sums on every host: what a scheduler does, of about its length."""
    counts: dict[int, int] = {}
    for number in range(500):
        counts[number & 31] = counts.get(number & 31, 0) + number
    return sum(counts.values())


def conditions_line(found: Sequence[HostConditions]) -> str:
    """All rounds in a line, for people."""
    times = [us for one in found for us in one.reference_us]
    return (
        f"host: reference work {min(times):.0f} to {max(times):.0f} us; cores at most, of a round: "
        f"other threads {max(one.other_threads_cores for one in found):.1f}, "
        f"other processes {max(one.other_processes_cores for one in found):.1f}, "
        f"stolen {max(one.stolen_cores for one in found):.1f}"
    )


def _used() -> tuple[float, float, float, float, float]:
    """Seconds: of the clock, of this thread, of this process, of the machine, stolen from it."""
    process, machine = psutil.Process().cpu_times(), psutil.cpu_times()
    # Niced work is apart here, and not in the process's figures; Linux alone tells.
    niced, stolen = getattr(machine, "nice", 0.0), getattr(machine, "steal", 0.0)
    busy, of_machine = process.user + process.system, machine.user + machine.system + niced
    return time.perf_counter(), time.thread_time(), busy, of_machine, stolen
