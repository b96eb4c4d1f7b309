"""What the scheduler reports of its decisions and commits."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from megatron_async.request.request import FinishReason
from megatron_async.step.records import LogProbs


class Commit(NamedTuple):
    """What the host took of a step, by rows that were sampled.

    ``tokens[i]`` were sampled for request ``keys[i]``. ``reasons`` has the requests that end with
    their last token, ``discarded`` those that had ended before the row was sampled: its tokens are
    dropped. By rows, not an object for each: a row costs the host its time at every token.

    ``log_probs`` [rows, window, LOG_PROB_WORDS] is None but after an extended S.
    ``prompt_log_probs`` is None unless this step brought some: by request, the position of a prompt
    token, counted from 0, and words [positions, PROMPT_LOG_PROB_WORDS] of it and of those that
    follow. The first prompt token has none.
    """

    keys: Sequence[int]
    tokens: Sequence[tuple[int, ...]]
    reasons: dict[int, FinishReason]
    discarded: set[int]
    log_probs: LogProbs | None = None
    prompt_log_probs: dict[int, tuple[int, LogProbs]] | None = None


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
