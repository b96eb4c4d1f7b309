"""What the engine needs of a device. Everything a device does, it does in the order of its stream.

Two implementations: ``cuda`` (streams, graphs, pinned rings) and ``cpu`` (a worker thread is the
stream), so that the same engine, races included, runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]


class Span(NamedTuple):
    """One piece of work in a timeline; times in nanoseconds of ``time.perf_counter_ns``. An S in it
    is that of ticket ``sampled``."""

    name: str
    ticket: int
    start_ns: int
    end_ns: int
    sampled: int = -1


class Graph(Protocol):
    """Device work recorded once and replayed many times."""

    def replay(self) -> None:
        """Put the work on the stream and return at once."""


class PacketRing(Protocol):
    """Pinned buffers through which the host feeds the device, one entry a step."""

    def claim(self, number: int) -> Ints:
        """Host: the entry of step ``number`` to write, [width] int32.

        Raises:
            IntegrityError: ``number`` is not the next, or the entry's last packet has not been
                consumed, as far as the host can know without asking the device (WAR hazard).
        """

    def read(self, into: torch.Tensor, width: int) -> None:
        """Device: copy the first ``width`` elements of the next entry into ``into``, consume it."""

    def restart(self) -> None:
        """Host: number from 0 again; nothing is in flight."""


class ResultRing(Protocol):
    """Pinned buffers through which the device answers: one entry for each S, or for each time that
    the host asks to see something else."""

    def publish(self, record: torch.Tensor) -> None:
        """Device: hand out ``record`` [n] int32 as the next result."""

    def wait(self, number: int, width: int) -> Ints:
        """Host: block until result ``number`` is there and copy its first ``width`` elements.

        Each result is taken once, in order. The only place where the host waits for the device.
        """

    def skip(self, number: int) -> None:
        """Host: result ``number``, the next one, is not wanted; what publishes it has been
        launched."""

    def put_back(self, number: int) -> None:
        """Host: a signal came while ``number`` was waited for. If it was taken all the same, it is
        there to be taken again."""

    def restart(self) -> None:
        """Host: number from 0 again; nothing is in flight."""


class CaptureWatch(Protocol):
    """Sees what is captured."""

    def watched(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        """``work``, whose first run is seen: that which becomes the graph."""


class Device(Protocol):
    """A place to run a step on."""

    torch_device: torch.device
    captures: bool
    """True when shapes inside a graph are fixed and no device value may steer the host."""
    failure: BaseException | None
    """What waits for the device raise; None while it works."""
    sampled: int
    """The ticket of the next S that is enqueued, set ahead of it (for timelines)."""
    watch: CaptureWatch | None
    """It sees what is captured from now on; None for nothing."""

    def enqueue(self, work: Callable[[], None], name: str) -> None:
        """Run ``work`` on the stream after all that was enqueued before; returns at once."""

    def inline(self) -> AbstractContextManager[None]:
        """The caller's own tensor operations are the stream's inside, while nothing is queued."""

    def capture(self, work: Callable[[], None], name: str, *, has_run: bool = False) -> Graph:
        """Record ``work`` as a graph. ``work`` may run several times while it is captured.

        Args:
            has_run: all of its parts were captured before, in these shapes.
        """

    def packet_ring(self, entries: int, width: int) -> PacketRing:
        """A ring of ``entries`` packets of ``width`` int32."""

    def result_ring(self, entries: int, width: int, *, of_steps: bool = True) -> ResultRing:
        """A ring of ``entries`` results of at most ``width`` int32. With ``of_steps`` there is one
        for each S, and one that is taken says that its step is over."""

    def mark_ticket(self, ticket: int) -> None:
        """Work enqueued from now on belongs to this ticket (for timelines)."""

    def start_timeline(self, most: int | None = None) -> None:
        """Record from now on when work runs, the last ``most`` pieces of it; on CUDA this waits for
        the device once."""

    def finished_spans(self) -> list[Span]:
        """What of the recorded work is over, in stream order; waits for nothing. From any
        thread."""

    def take_timeline(self) -> list[Span]:
        """Wait for the device, stop recording, and return what ran, in stream order."""

    def drop_timeline(self) -> None:
        """Stop recording; waits for nothing."""

    def synchronize(self) -> None:
        """Wait until the device has nothing to do; raises what device work raised."""

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in all waits for the device, now and from now on; any thread may call
        it."""

    def close(self) -> None:
        """Release threads and graphs."""
