"""Which release of megatron-core is installed."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass

logger = logging.getLogger(__name__)

TRIED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Releases that the tests run on, from the earliest to the latest."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release of megatron-core, by its version, such as ``"0.19.2"``."""

    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """``(0, 19, 2)``; what stands behind the third number is left out."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.version)
        return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)

    def since(self, minor: int) -> bool:
        """Whether it is 0.``minor`` or later."""
        return self.numbers >= (0, minor)

    @property
    def not_tried(self) -> str | None:
        """What to say of a release outside of those tried; None for all others."""
        first, last = (Release(version).numbers for version in (TRIED[0], TRIED[-1]))
        if first <= self.numbers <= last:
            return None
        place = "later" if self.numbers > last else "earlier"
        return (
            f"megatron-core {self.version} is {place} than the releases that megatron-async was "
            f"tried with, {', '.join(TRIED)}: it may not work"
        )


@functools.cache
def installed() -> Release:
    """The release that this process imports."""
    from megatron.core import package_info

    # A checkout of its repository adds a revision behind a plus sign.
    return Release(package_info.__version__.partition("+")[0])


@functools.cache
def warn_if_not_tried() -> None:
    """Log one warning if the installed release is outside of those tried."""
    if (message := installed().not_tried) is not None:
        logger.warning("%s", message)
