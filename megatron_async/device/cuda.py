"""A CUDA GPU: one stream, graphs that share a memory pool, pinned rings read by device counters."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from megatron_async.device.protocol import CaptureWatch, Graph, Ints, Span
from megatron_async.errors import IntegrityError

if TYPE_CHECKING:
    from megatron_async.device.cuda_timeline import CudaTimeline

WARM_UP_RUNS = 1
"""Before a capture: by then kernels are loaded, libraries have their workspaces."""
SPINS_BETWEEN_CHECKS = 2000


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector away: an engine that nobody refers to has graphs, and to
    destroy one invalidates the capture of another (pytorch/pytorch#161037)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaDevice:
    """Launches on one stream; graphs are captured from the same stream into one pool.

    Args:
        graphs: capture what is launched again and again. Without it the same kernels in the same
            shapes are launched one by one.
    """

    captures = True

    def __init__(self, torch_device: torch.device, *, graphs: bool = True) -> None:
        self.torch_device = torch_device
        self._graphs = graphs
        self.stream = torch.cuda.Stream(torch_device)
        self._pool = torch.cuda.graph_pool_handle()
        self._rings: list[_Counted] = []
        self.results_taken = 0
        """Results that the host has taken: what came before their S on the stream is over."""
        self.timeline: CudaTimeline | None = None
        self.ticket = self.sampled = -1
        self.failure: BaseException | None = None
        """Why what is on the stream may never end."""
        self.watch: CaptureWatch | None = None

    def enqueue(self, work: Callable[[], None], name: str) -> None:
        timeline = self.timeline  # another thread may drop it meanwhile
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            if timeline is None:
                work()
            else:
                timeline.record(work, name, self.ticket, self.sampled)

    @contextmanager
    def inline(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            yield

    def capture(self, work: Callable[[], None], name: str, *, has_run: bool = False) -> Graph:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(0 if has_run else WARM_UP_RUNS):
                work()
            self.stream.synchronize()
            made: Graph
            if self._graphs:
                captured = work if self.watch is None else self.watch.watched(work, name)
                made = _CudaGraph(self, self._captured(captured), name)
            else:
                made = _EagerCall(self, work, name)
        # Warm-up ran for real: put the rings back to where they were.
        for ring in self._rings:
            ring.rewind()
        return made

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            no_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        return graph

    def packet_ring(self, entries: int, width: int) -> CudaPacketRing:
        ring = CudaPacketRing(self, entries, width)
        self._rings.append(ring)
        return ring

    def result_ring(self, entries: int, width: int, *, of_steps: bool = True) -> CudaResultRing:
        ring = CudaResultRing(self, entries, width, of_steps=of_steps)
        self._rings.append(ring)
        return ring

    def mark_ticket(self, ticket: int) -> None:
        self.ticket = ticket

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def start_timeline(self, most: int | None = None) -> None:
        from megatron_async.device.cuda_timeline import CudaTimeline

        self.timeline = CudaTimeline(self.stream, most)

    def finished_spans(self) -> list[Span]:
        timeline = self.timeline
        return [] if timeline is None else timeline.finished()

    def take_timeline(self) -> list[Span]:
        self.synchronize()
        timeline, self.timeline = self.timeline, None
        return [] if timeline is None else timeline.spans()

    def drop_timeline(self) -> None:
        self.timeline = None

    def fail(self, error: BaseException) -> None:
        self.failure = error

    def close(self) -> None:
        from megatron_async.device import waiting_grids

        if self.failure is None:
            self.stream.synchronize()
        waiting_grids.release(self)
        self._rings.clear()  # they refer back


class _CudaGraph:
    def __init__(self, device: CudaDevice, graph: torch.cuda.CUDAGraph, name: str) -> None:
        self._device = device
        self._graph = graph
        self._name = name
        # To enter a ``torch.Stream`` costs the host a fraction of ``torch.cuda.stream``: all else
        # that a step costs it is short. One for each graph, since it cannot be entered twice.
        stream = device.stream
        self._stream = torch.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def replay(self) -> None:
        device = self._device
        timeline = device.timeline  # another thread may drop it meanwhile
        with self._stream:
            if timeline is None:
                self._graph.replay()
            else:
                timeline.record(self._graph.replay, self._name, device.ticket, device.sampled)


class _EagerCall:
    """A call that is made anew each time, in place of a graph."""

    def __init__(self, device: CudaDevice, work: Callable[[], None], name: str) -> None:
        self._device = device
        self._work = work
        self._name = name

    def replay(self) -> None:
        self._device.enqueue(self._work, self._name)


class _Counted:
    """A ring with a counter on the device; the host keeps its own count of what it launched.

    On a device that is no GPU, as in tests of what the host does, its memory is not pinned.
    """

    def __init__(self, device: CudaDevice, entries: int, width: int) -> None:
        self._device = device
        on = device.torch_device
        pinned = on.type == "cuda"
        self.ring = torch.zeros(entries, width, dtype=torch.int32, pin_memory=pinned)
        self._views: list[Ints] = [entry.numpy() for entry in self.ring]
        self.counter = torch.zeros(1, dtype=torch.int64, device=on)
        self._done = 0

    def restart(self) -> None:
        self._done = 0
        self.rewind()

    def rewind(self) -> None:
        self._device.stream.synchronize()
        self.counter.fill_(self._done)
        self._device.synchronize()


class CudaPacketRing(_Counted):
    """Packets in pinned memory, numbered like the tickets that they belong to.

    Whether the device has read a packet the host knows without asking: the S whose tokens are
    result n comes after the H2D that read packet n in stream order, so with result n taken packet n
    is consumed. That is a comparison of two integers of the host. A count of the packets read, in
    pinned memory, would be known some microseconds earlier and cost every step a store over the
    bus; it would be needed by a ring whose numbers are not those of tickets.

    The same check keeps results: S(n) is launched after packet n was claimed, so the entry that it
    writes was taken before, in a ring of as many entries.
    """

    def claim(self, number: int) -> Ints:
        if number != self._done:
            raise IntegrityError(f"packet {number} claimed, {self._done} is next")
        if number - self._device.results_taken >= len(self._views):
            raise IntegrityError(f"packet {number} would overwrite one not consumed yet")
        self._done += 1
        return self._views[number % len(self._views)]

    def read(self, into: torch.Tensor, width: int) -> None:
        from megatron_async.kernels.rings import read_packet

        read_packet(self.ring, self.counter, into, width)


class CudaResultRing(_Counted):
    """Results in pinned memory with a sequence number that the host polls: the tokens' way back
    does not wait for the forward behind them, and no CUDA call is made to see them."""

    def __init__(
        self, device: CudaDevice, entries: int, width: int, *, of_steps: bool = True
    ) -> None:
        super().__init__(device, entries, width)
        self._of_steps = of_steps
        self.sequence = torch.zeros(
            1, dtype=torch.int32, pin_memory=device.torch_device.type == "cuda"
        )
        self._seen = self.sequence.numpy()
        self._note(0)

    def publish(self, record: torch.Tensor) -> None:
        from megatron_async.kernels.rings import publish

        publish(self.ring, self.sequence, self.counter, record)

    def restart(self) -> None:
        self._note(0)
        super().restart()

    def rewind(self) -> None:
        super().rewind()
        self.sequence.fill_(self._done)

    def wait(self, number: int, width: int) -> Ints:
        if number != self._done:
            raise IntegrityError(f"result {number} taken, {self._done} is next")
        seen = self._seen
        spins = 0
        while (int(seen[0]) - (number + 1)) & 0x80000000:
            spins += 1
            if spins % SPINS_BETWEEN_CHECKS == 0:
                if self._device.failure is not None:
                    raise self._device.failure
                self._device.stream.query()  # raises when a kernel has failed
                time.sleep(0)
        values = self._views[number % len(self._views)][:width].copy()
        if ((int(seen[0]) - number) & 0xFFFFFFFF) > len(self._views):
            raise IntegrityError(f"result {number} was overwritten before it was taken")
        self._note(number + 1)
        return values

    def skip(self, number: int) -> None:
        if number != self._done:
            raise IntegrityError(f"result {number} skipped, {self._done} is next")
        self._note(number + 1)

    def put_back(self, number: int) -> None:
        if self._done == number + 1:
            self._note(number)

    def _note(self, taken: int) -> None:
        """The host has taken this number of results."""
        self._done = taken
        if self._of_steps:
            self._device.results_taken = taken
