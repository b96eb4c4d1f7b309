"""Draws of Hypothesis that are the same in each process, whatever it has imported before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

KEPT_CONSTANTS = 1024
"""Kinds of draws, as many as Hypothesis keeps."""


@contextmanager
def same_draws() -> Iterator[None]:
    """Within it seeded draws follow from the seed alone.

    Hypothesis draws constants too that it finds in the package's modules which are imported by
    then. So the same seed draws something else behind other tests, or after a change of any module.
    Its own constants, such as the ends of 32 bits, are drawn as always.
    """
    with (
        patch.object(providers, "_get_local_constants", Constants),
        patch.object(providers, "CONSTANTS_CACHE", LRUCache(KEPT_CONSTANTS)),
    ):
        yield
