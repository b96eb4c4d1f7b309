"""What the scheduler tells about its decisions and commits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from megatron_async.requests import FinishReason


class Commit(NamedTuple):
    """One event of a commit: a token that a request keeps, the end of a request, or both.

    ``token`` is None when the request ends without one (an abort); ``discarded`` marks a token
    that was sampled for a request that had ended before.
    """

    key: int
    token: int | None
    reason: FinishReason | None
    discarded: bool = False


new_commit: Callable[[tuple[int, int | None, FinishReason | None, bool]], Commit]
new_commit = functools.partial(tuple.__new__, Commit)
"""A commit from all its fields; in half the time, as every row of every step needs one."""


class Change(str, Enum):
    """A change in a request's life that is not a token."""

    ADMIT = "admit"
    PAUSE = "pause"
    STALL = "stall"
    RESUME = "resume"
    EVICT = "evict"


class Event(NamedTuple):
    """``change`` happened to request ``key``.

    With ADMIT, ``cached`` counts the tokens whose keys and values were found in the prefix cache,
    and ``replayed`` those that have to be computed again because the request was evicted.
    """

    key: int
    change: Change
    cached: int = 0
    replayed: int = 0
