"""Which tickets' S, F and T the spans of a device's timeline hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_async.device.protocol import Span
from megatron_async.engine.stepping.loop import NO_TICKET


class DeviceStep(NamedTuple):
    """A span of the device; which tickets' S, F and T are in it, :data:`NO_TICKET` for none. T is
    the S of a pipeline stage that takes what the last one has sampled."""

    span: Span
    sampled: int
    forwarded: int
    taken: int

    @property
    def title(self) -> str:
        """The span's name with ticket numbers in it: ``S4 H2D F5``; ``S4+`` for an extended S."""
        numbers = {"S": self.sampled, "T": self.taken, "F": self.forwarded}
        words = []
        for word in self.span.name.split():
            plain = word.removesuffix("+")
            number = numbers.get(plain, "")
            words.append(word.replace(plain, f"{plain}{number}"))
        return " ".join(words)

    @property
    def handed_out(self) -> int:
        """The ticket whose tokens the host gets from it."""
        return max(self.sampled, self.taken)


def device_steps(spans: Sequence[Span]) -> list[DeviceStep]:
    """Tell S, T and F of tickets apart."""
    steps = []
    for span in spans:
        words = {word.removesuffix("+") for word in span.name.split()}
        sampled = span.sampled if "S" in words else NO_TICKET
        taken = span.sampled if "T" in words else NO_TICKET
        forwarded = span.ticket if "F" in words else NO_TICKET
        steps.append(DeviceStep(span, sampled, forwarded, taken))
    return steps
