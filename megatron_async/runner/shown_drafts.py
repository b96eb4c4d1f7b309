"""Drafts on their way to the host, which makes the masks of guided rows along them."""

from __future__ import annotations

import numpy as np

from megatron_async.device.protocol import Device, Ints
from megatron_async.runner.memory.slot_state import SlotState

NO_TICKET = -1


class ShownDrafts:
    """Shows the host which drafts a forward runs over, ahead of it in stream order: behind the S
    that has made them. The host takes them while the forward runs.

    Invariant: a ticket's drafts are taken or left before its tokens are, so that no more are on
    their way than tickets are in flight.

    Args:
        entries: most tickets in flight, and one more.
    """

    def __init__(self, device: Device, slots: SlotState, entries: int) -> None:
        self._device = device
        self._slots = slots
        self._shape = slots.drafts.shape
        self._ring = device.result_ring(entries, slots.drafts.numel(), of_steps=False)
        self._numbers: dict[int, int] = {}
        """By ticket what the ring calls its drafts, in the order of tickets."""
        self._next = 0
        self._last, self._drafts = NO_TICKET, np.zeros(self._shape, np.int32)

    def show(self, ticket: int) -> None:
        """Queue what the next forward, that of ``ticket``, runs over."""
        self._numbers[ticket] = self._next
        self._next += 1
        self._device.enqueue(self._publish, "drafts")

    def _publish(self) -> None:
        self._ring.publish(self._slots.drafts.int().flatten())

    def take(self, ticket: int) -> Ints | None:
        """The drafts of all slots that the forward of ``ticket`` runs over, int32
        ``[slots + 1, drafts]``; waits for them. None if they are not shown. What interrupts the
        wait loses nothing."""
        if ticket == self._last:
            return self._drafts
        number = self._numbers.get(ticket)
        if number is None:
            return None
        try:
            drafts = self._ring.wait(number, self._shape.numel())
            self._drafts, self._last = drafts.reshape(self._shape), ticket
        except BaseException:
            self._ring.put_back(number)
            raise
        return self._drafts

    def leave(self, ticket: int) -> None:
        """Nobody asks any more for the drafts of tickets up to this one."""
        for each in [each for each in self._numbers if each <= ticket]:
            number = self._numbers.pop(each)
            if each > self._last:
                self._ring.skip(number)

    def restart(self) -> None:
        """Begin again with ticket 0; nothing is on its way."""
        self._numbers.clear()
        self._next, self._last = 0, NO_TICKET
        self._ring.restart()
