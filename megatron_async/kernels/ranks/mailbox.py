"""Messages from one rank of a group to others, through their memory: how ``mailbox.cu`` is built
and called.

In place of sends and receives of NCCL. A rank that sends there may wait until the message is
received; here it goes on, and a graph ends without waiting for another rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.compile import Int32, Int64, kernel
from megatron_async.kernels.ranks.peers import Peers

SLOTS = 32
"""Messages that may be on their way to a rank."""
CAPACITY = 1 << 15
"""32-bit words of a message."""
_THREADS = 256
WORD_COUNT = SLOTS * CAPACITY
"""int64 of each rank's memory: a word travels with the number of its message."""


class MailboxArguments(NamedTuple):
    """Parameters of ``mailbox.cu``, in order; those of ``peers.py`` follow."""

    message: Int32
    words: int
    received: Int64
    done: Int32


class Mailbox:
    """The messages of one rank, to all of some others or from one: all on one stream.

    Args:
        rank: this one's place in the group.
        memory: int64 ``[WORD_COUNT]`` of each rank, zeros before the first message, as this one
            reaches it.
        to: places of the ranks that get what is posted.
    """

    def __init__(self, rank: int, memory: tuple[Tensor, ...], to: tuple[int, ...]) -> None:
        self._received, self._device = memory[rank], memory[rank].device
        self._to = Peers.of(tuple(memory[place] for place in to))
        self._done = torch.zeros(1, dtype=torch.int32, device=self._device)
        """Messages that were posted, or taken: a rank does one of the two."""
        for takes in (0, 1):  # nothing is compiled while a kernel waits for another rank's
            kernel("mailbox", macros(takes), self._device)

    def holds(self, message: Tensor) -> bool:
        """Whether a message is not too long; the same on all ranks."""
        return message.numel() <= CAPACITY

    def post(self, message: Tensor) -> None:
        """Send int32, contiguous, to the others, which must take each message, in order. There may
        be at most :data:`SLOTS` that one of them has not taken."""
        self._launch(message, self._to, takes=0)

    def take_(self, message: Tensor) -> Tensor:
        """Fill int32, contiguous, of the size that was posted, with the oldest that was not taken;
        the stream waits for it."""
        self._launch(message, Peers(), takes=1)
        return message

    def _launch(self, message: Tensor, to: Peers, takes: int) -> None:
        if not message.numel():
            return
        arguments = MailboxArguments(message, message.numel(), self._received, self._done)
        kernel("mailbox", macros(takes), self._device).launch((1, 1, 1), arguments, to)


def macros(takes: int) -> dict[str, int]:
    """Macros of ``mailbox.cu``."""
    return {"TAKES": takes, "SLOTS": SLOTS, "CAPACITY": CAPACITY, "THREADS": _THREADS}
