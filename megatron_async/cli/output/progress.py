"""Progress bars on stderr, shown on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(*steps: Iterable[int], shown: bool = True, **options: Any) -> tqdm[Any]:
    """A bar that goes away at its end; ``shown`` False: none, on a terminal either."""
    return tqdm(*steps, file=sys.stderr, disable=None if shown else True, leave=False, **options)


def show_capture(steps: Iterable[int], count: int) -> Iterable[int]:
    """Wraps the capture of the engine's graphs, where it takes long enough to be seen."""
    bar: Iterable[int] = progress_bar(steps, total=count, desc="capturing graphs")
    return bar
