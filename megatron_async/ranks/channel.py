"""Messages from rank 0 to all others, in order, without waiting for them.

On one host they go through a ring in shared memory that all followers read, each at its own pace;
one that has nothing to read for a while goes to sleep, and is woken through its connection. Over
hosts the connections carry the messages themselves.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from megatron_async.errors import ConfigError, IntegrityError

RING_BYTES = 1 << 24
"""Size of the ring. Rank 0 waits where a follower is that far behind, which no steady step is."""
HEAD = struct.Struct("<Q")
FULL_SECONDS = 60.0
"""For a follower to read on, where the ring is full."""
MODE = 0o600


class Sender(Protocol):
    """Rank 0's end."""

    def send(self, data: bytes) -> None:
        """Hand a message to all followers; waits for nobody in a steady step."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """A follower's end."""

    def receive(self) -> bytes:
        """The next message; waits for it."""

    def close(self) -> None: ...


class _Ring:
    """Shared memory: the bytes written so far, for each follower the bytes that it has read and
    whether it sleeps, all int64; then the data, a length before each message.

    One writer for each word, but for those that say which follower sleeps, and an aligned word of
    eight bytes is written and read whole. Fences keep the data ahead of the count. And they keep
    nobody asleep: the writer writes the count and then looks which followers sleep, a reader says
    that it sleeps and then looks at the count, so that one of them sees what the other has written.
    """

    def __init__(self, memory: mmap.mmap, followers: int) -> None:
        words = 1 + 2 * followers
        counts = np.frombuffer(memory, dtype=np.int64, count=words)
        self.written = counts[:1]
        self.read, self.asleep = counts[1 : 1 + followers], counts[1 + followers :]
        self._data = np.frombuffer(memory, dtype=np.uint8, offset=8 * words)
        self._fence = threading.Lock()

    def fence(self) -> None:
        """What was written and read before is so for all, ahead of what comes after: one locked
        instruction on x86, a release ahead of an acquire elsewhere."""
        for _ in range(2):
            self._fence.acquire()
            self._fence.release()

    @property
    def size(self) -> int:
        return len(self._data)

    def copy_in(self, at: int, data: bytes) -> None:
        start = at % self.size
        first = min(len(data), self.size - start)
        values = np.frombuffer(data, dtype=np.uint8)
        self._data[start : start + first] = values[:first]
        self._data[: len(data) - first] = values[first:]

    def copy_out(self, at: int, length: int) -> bytes:
        start = at % self.size
        first = min(length, self.size - start)
        return self._data[start : start + first].tobytes() + self._data[: length - first].tobytes()


class RingSender:
    """The writer of a ring.

    Args:
        wake: wakes a follower, by its place.
        check: raises why a follower will never read on.
    """

    def __init__(
        self,
        followers: int,
        wake: Callable[[int], None],
        check: Callable[[], None],
        size: int = RING_BYTES,
    ) -> None:
        self.descriptor, memory = _new_memory(_bytes_of_ring(size, followers))
        self._ring = _Ring(memory, followers)
        self._wake, self._check = wake, check

    def send(self, data: bytes) -> None:
        ring = self._ring
        at, length = int(ring.written[0]), HEAD.size + len(data)
        if length > ring.size:
            raise IntegrityError(f"a message of {len(data)} bytes exceeds the ring's {ring.size}")
        if at + length - int(ring.read.min()) > ring.size:
            self._wait_for_room(at + length)
        ring.copy_in(at, HEAD.pack(len(data)) + data)
        ring.fence()
        ring.written[0] = at + length
        ring.fence()
        # Others write these words meanwhile, which numpy's searches refuse: a copy.
        for place, asleep in enumerate(ring.asleep.tolist()):
            if asleep:
                ring.asleep[place] = 0
                self._wake(place)

    def _wait_for_room(self, end: int) -> None:
        ring, started = self._ring, time.monotonic()
        while end - int(ring.read.min()) > ring.size:
            self._check()
            if time.monotonic() - started > FULL_SECONDS:
                raise IntegrityError("a rank does not read what it is told any more")
            time.sleep(0.001)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class RingReceiver:
    """A reader of a ring.

    Args:
        ring: a descriptor of the shared memory, which is closed.
        place: which of the ``followers`` this is.
        wakes: set by the thread that hears that there is something to read.
        spin_seconds: for how long to look again and again before it sleeps.
        sleep: waits for ``wakes``; what it raises ends the wait. None waits as long as it takes.

    Raises:
        IntegrityError: it is no memory of this user's alone, or not of a size that rings have.
    """

    def __init__(
        self,
        ring: int,
        place: int,
        followers: int,
        wakes: threading.Event,
        spin_seconds: float,
        sleep: Callable[[], object] | None = None,
    ) -> None:
        try:
            found = os.fstat(ring)
            is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            fewest, most = (_bytes_of_ring(size, followers) for size in (HEAD.size, RING_BYTES))
            has_room = fewest < found.st_size <= most
            if not is_own or stat.S_IMODE(found.st_mode) != MODE or not has_room:
                raise IntegrityError("this is no ring of rank 0 that this user alone may open")
            self._ring = _Ring(mmap.mmap(ring, found.st_size), followers)
        finally:
            os.close(ring)
        self._place = place
        self._at = 0
        self._wakes = wakes
        self._sleep = sleep or wakes.wait
        self._spin_seconds = spin_seconds

    def receive(self) -> bytes:
        ring = self._ring
        self._wait()
        (length,) = HEAD.unpack(ring.copy_out(self._at, HEAD.size))
        if length > int(ring.written[0]) - self._at - HEAD.size or length > ring.size:
            raise IntegrityError(f"a message of {length} bytes is not in the ring as a whole")
        data = ring.copy_out(self._at + HEAD.size, length)
        self._at += HEAD.size + length
        ring.fence()
        ring.read[self._place] = self._at
        return data

    def _wait(self) -> None:
        ring, deadline = self._ring, time.monotonic() + self._spin_seconds
        while int(ring.written[0]) == self._at:
            if time.monotonic() < deadline:
                time.sleep(0)
                continue
            self._wakes.clear()
            ring.asleep[self._place] = 1
            ring.fence()
            if int(ring.written[0]) == self._at:
                self._sleep()
        ring.asleep[self._place] = 0
        ring.fence()

    def close(self) -> None:
        pass


def _bytes_of_ring(size: int, followers: int) -> int:
    return size + 8 * (1 + 2 * followers)


def _new_memory(size: int) -> tuple[int, mmap.mmap]:
    """Memory that nobody but this user may open, filled with zeros: the descriptor of a file in
    memory that never has a name, so that it goes with the last process that has it. The standard
    library's shared memory would be removed by whichever process ends first, and stays when all are
    killed.

    Raises:
        ConfigError: there is no room for it, or no descriptor.
    """
    descriptor = -1
    try:
        descriptor = _nameless_file()
        os.fchmod(descriptor, MODE)
        os.posix_fallocate(descriptor, 0, size)
        return descriptor, mmap.mmap(descriptor, size)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigError(
            f"there is no room for the {size >> 20} MiB that ranks share: {error.strerror}"
        ) from None


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("megatron-async-ranks", os.MFD_CLOEXEC)
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    return descriptor


class ConnectionSender:
    """Sends over hosts: through the connections, one after the other."""

    def __init__(self, sends: Sequence[Callable[[bytes], None]]) -> None:
        self._sends = sends

    def send(self, data: bytes) -> None:
        for send in self._sends:
            send(data)

    def close(self) -> None:
        pass
