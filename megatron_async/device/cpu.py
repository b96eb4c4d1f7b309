"""The CPU as a device: one worker thread is the stream, so launches really are asynchronous.

Two test modes find races that a fast machine hides. *Jitter* sleeps a random time around each
piece of device work and each host wait. *Poison* fills consumed buffers with garbage and checks
that every packet and every result is written once and taken once.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import numpy as np
import torch

from megatron_async.device.protocol import CaptureWatch, Graph, Ints, Span
from megatron_async.errors import EngineStoppedError, IntegrityError

POISON = -0x5A5A5A5B
"""What consumed int32 buffers are filled with."""

MAX_JITTER_SECONDS = 2e-4
FAILED_SECONDS = 1.0
"""For what a device runs to be over when it is closed after it has failed."""


_Queue: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], None], str, int, int] | None]"


class CpuDevice:
    """An ordered worker thread with the interface of a GPU stream."""

    captures = False

    def __init__(
        self, *, jitter_seed: int | None = None, poison: bool = False, record: bool = False
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.poison = poison
        self.timeline: deque[Span] | None = deque() if record else None
        self.jitters = jitter_seed is not None
        self._jitter = random.Random(jitter_seed)
        self._work: _Queue = queue.SimpleQueue()
        self._ticket = self.sampled = -1
        self.failure: BaseException | None = None
        self.watch: CaptureWatch | None = None
        # Not a condition: one that a signal interrupts may not get its lock back.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The thread holds no more than the work that it runs, so that what nobody refers to any
        # more goes away, and the thread with it.
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(self._work, weakref.ref(self), self._over),
            name="cpu-stream",
            daemon=True,
        )
        self._thread.start()
        # At exit too: a daemon thread inside torch must not live on while the interpreter ends.
        self._end = weakref.finalize(self, _end, self._work, self._thread, self._over)

    def enqueue(self, work: Callable[[], None], name: str) -> None:
        self.raise_failure()
        self._work.put((work, name, self._ticket, self.sampled))

    def inline(self) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def capture(self, work: Callable[[], None], name: str, *, has_run: bool = False) -> Graph:
        watch = self.watch
        return _RecordedCall(self, work if watch is None else watch.watched(work, name), name)

    def packet_ring(self, entries: int, width: int) -> CpuPacketRing:
        return CpuPacketRing(self, entries, width)

    def result_ring(self, entries: int, width: int, *, of_steps: bool = True) -> CpuResultRing:
        return CpuResultRing(self, entries, width)

    def mark_ticket(self, ticket: int) -> None:
        self._ticket = ticket

    def synchronize(self) -> None:
        done = threading.Event()
        self._work.put((done.set, "synchronize", self._ticket, -1))
        while not done.wait(timeout=0.1):
            self.raise_failure()
        self.raise_failure()

    def start_timeline(self, most: int | None = None) -> None:
        self.timeline = deque(maxlen=most)

    def finished_spans(self) -> list[Span]:
        timeline = self.timeline
        spans = [] if timeline is None else timeline.copy()
        return [span for span in spans if span.name != "synchronize"]

    def take_timeline(self) -> list[Span]:
        self.synchronize()
        spans = self.finished_spans()
        self.drop_timeline()
        return spans

    def drop_timeline(self) -> None:
        self.timeline = None

    def close(self) -> None:
        # Work of one that has failed may wait for another rank, which does not come.
        seconds = None if self.failure is None else FAILED_SECONDS
        _end(self._work, self._thread, self._over, seconds)
        self._end.detach()  # not before: a signal may interrupt the wait
        if self.failure is None:  # else a thread that waits now would wait for ever
            self.failure = EngineStoppedError("the device is closed; build a new engine")
            self.wake()

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.wake()

    def raise_failure(self) -> None:
        """Raise what device work raised, if it did."""
        if self.failure is not None:
            raise self.failure

    def wake(self) -> None:
        """What the host waits for may be there."""
        self._wakes.put(None)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Block the host; raises what device work raised."""
        while not ready():
            self.raise_failure()
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=1.0)
        with contextlib.suppress(queue.Empty):
            while True:  # of what was there before it was waited for
                self._wakes.get_nowait()

    def sleep_jitter(self) -> None:
        """Sleep a random time."""
        if self._jitter.random() < 0.5:
            time.sleep(self._jitter.random() * MAX_JITTER_SECONDS)

    def run(self, work: Callable[[], None], name: str, ticket: int, sampled: int = -1) -> None:
        """Do one piece of work, on the stream's thread."""
        if self.failure is not None and name != "synchronize":
            return
        if self.jitters:
            self.sleep_jitter()
        start = time.perf_counter_ns()
        try:
            work()
        except BaseException as error:  # handed to the host at its next call
            self.failure = error
            self.wake()
        timeline = self.timeline  # another thread may drop it meanwhile
        if timeline is not None:
            timeline.append(Span(name, ticket, start, time.perf_counter_ns(), sampled))


def _run(queued: _Queue, device_of: weakref.ref[CpuDevice], over: threading.Event) -> None:
    try:
        with torch.inference_mode():
            while (item := queued.get()) is not None:
                device = device_of()
                if device is not None:
                    device.run(*item)
                del item, device
    finally:
        over.set()


def _end(
    queued: _Queue,
    thread: threading.Thread,
    over: threading.Event,
    seconds: float | None = None,
) -> None:
    queued.put(None)
    # A join that a signal has interrupted takes the thread for ended (python/cpython#90882).
    if thread is not threading.current_thread() and over.wait(seconds):
        thread.join()


class _RecordedCall:
    def __init__(self, device: CpuDevice, work: Callable[[], None], name: str) -> None:
        self._device = device
        self._work = work
        self._name = name

    def replay(self) -> None:
        self._device.enqueue(self._work, self._name)


class CpuPacketRing:
    """Packets from the host to the worker thread; the counters make each entry's life visible."""

    def __init__(self, device: CpuDevice, entries: int, width: int) -> None:
        self._device = device
        self._ring = torch.zeros(entries, width, dtype=torch.int32)
        self._views: list[Ints] = [entry.numpy() for entry in self._ring]
        self._claimed = 0
        self._consumed = 0

    def claim(self, number: int) -> Ints:
        self._device.raise_failure()
        if number != self._claimed:
            raise IntegrityError(f"packet {number} claimed, {self._claimed} is next")
        if number - self._consumed >= len(self._views):
            raise IntegrityError(f"packet {number} would overwrite one not consumed yet")
        self._claimed += 1
        return self._views[number % len(self._views)]

    def read(self, into: torch.Tensor, width: int) -> None:
        entry = self._ring[self._consumed % len(self._views)]
        into[:width].copy_(entry[:width])
        if self._device.poison:
            entry.fill_(POISON)
        self._consumed += 1

    def restart(self) -> None:
        self._claimed = self._consumed = 0


class CpuResultRing:
    """Results from the worker thread to the host, taken once and in order."""

    def __init__(self, device: CpuDevice, entries: int, width: int) -> None:
        self._device = device
        self._ring = torch.zeros(entries, width, dtype=torch.int32)
        self._published = 0
        self._taken = 0
        self._last: Ints = np.zeros(0, np.int32)
        """What was taken last."""

    def publish(self, record: torch.Tensor) -> None:
        entries = self._ring.shape[0]
        if self._published - self._taken >= entries:
            raise IntegrityError(f"result {self._published} would overwrite one not taken yet")
        self._ring[self._published % entries, : record.numel()].copy_(record)
        self._published += 1
        self._device.wake()

    def wait(self, number: int, width: int) -> Ints:
        if number != self._taken:
            raise IntegrityError(f"result {number} taken, {self._taken} is next")
        device = self._device
        if device.jitters:
            device.sleep_jitter()
        device.wait_until(lambda: self._published > number)
        entry = self._ring[number % self._ring.shape[0]]
        values: Ints = entry[:width].numpy().copy()
        if device.poison and np.any(values == POISON):
            raise IntegrityError(f"result {number} holds a consumed value")
        self._last = values
        self._taken += 1
        if device.poison:
            entry.fill_(POISON)
        return values

    def skip(self, number: int) -> None:
        if number != self._taken:
            raise IntegrityError(f"result {number} skipped, {self._taken} is next")
        self._taken += 1

    def put_back(self, number: int) -> None:
        if self._taken == number + 1:
            entry = self._ring[number % self._ring.shape[0]]
            entry[: len(self._last)] = torch.from_numpy(self._last)
            self._taken = number

    def restart(self) -> None:
        self._published = self._taken = 0
