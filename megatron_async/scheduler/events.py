"""What the scheduler reports of its decisions and commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from megatron_async.request import FinishReason


class Commit(NamedTuple):
    """What the host took of a step, by rows that were sampled.

    ``tokens[i]`` were sampled for request ``keys[i]``. ``reasons`` has the requests that end with
    their last token, ``discarded`` those that had ended before the row was sampled: its tokens are
    dropped. By rows, not an object for each: a row costs the host its time at every token.

    ``log_probs`` is None unless somebody asked; then it has, for each row, None or the words of its
    window: a numpy array, int32 or float32, [at least len(tokens[i]), LOG_PROB_WORDS], read before
    the next commit. ``prompt_log_probs`` is None unless this step brought some: by request, the
    position of a prompt token, counted from 0, and words [positions, LOG_PROB_WORDS] of it and of
    those that follow. The first prompt token has none.
    """

    keys: Sequence[int]
    tokens: Sequence[tuple[int, ...]]
    reasons: dict[int, FinishReason]
    discarded: set[int]
    log_probs: Sequence[Any | None] | None = None
    prompt_log_probs: Mapping[int, tuple[int, Any]] | None = None


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
