"""Standard error that nobody waits for: a pipe that nobody reads holds up no loop that serves.

All that Python writes to ``sys.stderr`` (logs, warnings, tracebacks) goes into a queue of bounded
size, and a thread of its own writes it. What finds no room is lost, counted, and said as soon as
somebody reads again. What libraries in C write goes straight to the descriptor, as before.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable

DESCRIPTOR = 2
MOST_BYTES = 1 << 20
"""That wait to be written."""
END_SECONDS = 1.0
"""For what waits to be written when the process ends."""


class Spool(io.TextIOBase):
    """A stream of text to a descriptor. Nothing is ever waited for.

    Any thread may write, and a signal's handler in the midst of a write.

    Args:
        said: the line that says how many lines were lost.

    Attributes:
        said: see above.
        lost: lines that found no room.
    """

    def __init__(
        self, descriptor: int, said: Callable[[int], str], most_bytes: int = MOST_BYTES
    ) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self.said = said
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        self._begun = ""
        """A line whose end has not come."""
        self._waiting = 0
        self._told = 0
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._written = threading.Condition()
        threading.Thread(target=self._run, name="standard error", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """It is."""
        return True

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Have ``text`` written, as soon as its line has ended."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self._add("".join(f"{line}\n" for line in lines), len(lines))
        return len(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written; False when ``seconds`` were not enough."""
        with self._lock:
            begun, self._begun = self._begun, ""
            if begun:
                self._add(begun, 1)
        with self._written:
            return self._written.wait_for(lambda: not self._waiting, seconds)

    def _add(self, text: str, lines: int) -> None:
        data = text.encode("utf-8", "backslashreplace")
        if self._waiting + len(data) > self._most_bytes:
            self.lost += lines
            return
        self._waiting += len(data)
        self._lines.put(data)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            data = self._lines.get()
            self._write_all(data)
            if (lost := self.lost - self._told) > 0:
                self._told += lost
                self._write_all(f"{self.said(lost)}\n".encode())
            with self._lock, self._written:
                self._waiting -= len(data)
                self._written.notify_all()

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # somebody has made it so for all processes
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:  # nobody will ever read it, or there is no room on the disk
                with self._lock:
                    self.lost += data.count(b"\n")
                return


def said_as_text(count: int) -> str:
    """The line about lost lines, as the log of a process has it."""
    return f"{count} lines of this log were lost, because nobody read standard error"


def said_as_json(count: int) -> str:
    """The same as a line of JSON."""
    line = {"time": round(time.time(), 3), "level": "warning", "lost_lines": count}
    return json.dumps({**line, "message": said_as_text(count)})


def unblock(said: Callable[[int], str] = said_as_text) -> None:
    """Have this process never wait for the reader of its standard error. What waits at its end is
    written within :data:`END_SECONDS`."""
    if isinstance(sys.stderr, Spool):
        sys.stderr.said = said
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    sys.stderr = Spool(DESCRIPTOR, said)
    atexit.register(drain)


def drain() -> None:
    """Let what was written out before a process ends at once, within :data:`END_SECONDS`."""
    if isinstance(sys.stderr, Spool):
        sys.stderr.drain(END_SECONDS)


def lost_lines() -> int:
    """How many lines have found no room since :func:`unblock`."""
    return sys.stderr.lost if isinstance(sys.stderr, Spool) else 0
