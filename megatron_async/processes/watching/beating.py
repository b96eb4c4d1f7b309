"""Signs of life of a process that starts.

``python -m megatron_async.processes.watching.beating FD MODULE`` gives them over ``FD`` from before
``MODULE`` is imported until it serves, and says what it does.

They come from a thread, so that one that imports, loads or compiles for minutes is told from one
that stands still. Once it serves, signs of life are those of the loop that serves.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading

from megatron_async.codec import encode
from megatron_async.processes.call import Call
from megatron_async.processes.messages import Beat

BEAT_SECONDS = 0.5


class Beats:
    """Signs of life over a connection to the parent.

    Attributes:
        doing: what the process does, for people.
    """

    def __init__(self, call: Call) -> None:
        self.doing = "imports its modules"
        self._call = call
        self._over = threading.Event()
        self._over.set()

    def beat(self) -> None:
        """One now, unless the parent does not read."""
        self._call.say_at_once(encode(Beat()))

    def begin(self) -> None:
        """One now and then until :meth:`end`."""
        if self._over.is_set():
            self._over.clear()
            threading.Thread(target=self._run, name="signs of life", daemon=True).start()

    def end(self) -> None:
        """Somebody else gives them."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._call.say_at_once(encode(Beat(self.doing)))
            self._over.wait(BEAT_SECONDS)


_begun: dict[int, tuple[Call, Beats]] = {}
"""By descriptor."""


def beats_of(descriptor: int) -> tuple[Call, Beats]:
    """The connection at a descriptor, and its signs of life, begun or not."""
    if descriptor not in _begun:
        os.set_inheritable(descriptor, False)  # compilers that a kernel needs must not keep it open
        call = Call(descriptor)
        _begun[descriptor] = call, Beats(call)
    return _begun[descriptor]


def main() -> None:
    """Begin, and run the module that the arguments name, with what else they are."""
    beats_of(int(sys.argv[1]))[1].begin()
    sys.argv[:] = [sys.argv[2], sys.argv[1], *sys.argv[3:]]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from megatron_async.processes.watching import (
        beating,  # the module that others import, not this one
    )

    beating.main()
