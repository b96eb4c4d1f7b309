"""Which tickets' S and F the spans of a device's timeline hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_async.device.protocol import Span
from megatron_async.engine.stepping.loop import NO_TICKET


class DeviceStep(NamedTuple):
    """A span of the device; which tickets' S and F are in it, :data:`NO_TICKET` for none."""

    span: Span
    sampled: int
    forwarded: int

    @property
    def title(self) -> str:
        """The span's name with ticket numbers in it: ``S4 H2D F5``."""
        numbers = {"S": self.sampled, "F": self.forwarded}
        return " ".join(f"{word}{numbers.get(word, '')}" for word in self.span.name.split())


def device_steps(spans: Sequence[Span]) -> list[DeviceStep]:
    """Tell S and F of tickets apart. S always samples what the last F before it left pending."""
    steps = []
    pending = NO_TICKET
    for span in spans:
        words = span.name.split()
        has_sample, has_forward = "S" in words, "F" in words
        sampled = NO_TICKET
        if has_sample:
            # The first span of a timeline may sample a forward from before it.
            sampled = span.ticket - has_forward if pending == NO_TICKET else pending
        if has_forward:
            pending = span.ticket
        steps.append(DeviceStep(span, sampled, span.ticket if has_forward else NO_TICKET))
    return steps
