"""Progress bars on stderr, shown on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tqdm import tqdm


def show_capture(steps: Iterable[int], count: int) -> Iterable[int]:
    """Wraps the capture of the engine's graphs, where it takes long enough to be seen."""
    bar: Iterable[int] = tqdm(
        steps, total=count, desc="capturing graphs", file=sys.stderr, disable=None, leave=False
    )
    return bar


def request_bar(count: int) -> tqdm[None]:
    """A bar that counts finished requests; nothing for a single one."""
    return tqdm(
        total=count,
        desc="requests",
        unit="request",
        file=sys.stderr,
        disable=True if count < 2 else None,
        leave=False,
    )
