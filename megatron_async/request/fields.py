"""What the fields of a request hold: its state, events and costs, and what is said of tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, overload

from megatron_async.sampling_params import SamplingParams


class Status(Enum):
    """Where a request stands."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """No token could be sampled: the model gave NaN, or the request's parameters left nothing. Its
    events say more."""


DEVICE_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR})
"""Ends that the device finds by itself, in the step that brings the last token."""


class DynamicInferenceEventType(Enum):
    """Lifecycle events of a request."""

    ADD = auto()
    PAUSE = auto()
    EVICT = auto()
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()


@dataclass(frozen=True, slots=True)
class DynamicInferenceEvent:
    """One lifecycle event; ``timestamp`` in seconds since the epoch, for people to read only."""

    type: DynamicInferenceEventType
    timestamp: float = field(default_factory=time.time)
    payload: Any = None


@dataclass(slots=True)
class RequestCounters:
    """What one request cost.

    ``launched`` counts rows launched to sample a token, and ``accepted`` the tokens that rows
    brought beyond one; when the request is over their sum is ``committed`` + ``discarded``.
    ``drafted`` has the drafts that were verified in rows whose tokens were taken, and
    ``accepted_by_position`` those that were accepted, by their place. ``cached`` counts prompt
    tokens found in the prefix cache, ``replayed`` tokens computed again after evictions,
    ``stalls`` the times it waited for a block, ``restarts`` the times it began again over new
    weights: what it had generated until then counts as discarded.
    """

    launched: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    committed: int = 0
    discarded: int = 0
    cached: int = 0
    replayed: int = 0
    stalls: int = 0
    evictions: int = 0
    restarts: int = 0


class TokenLogProbs(NamedTuple):
    """Log-probability of a token, and of the most likely tokens at its position, by token id, the
    most likely first."""

    log_prob: float
    top: dict[int, float]


class WeightSpan(NamedTuple):
    """Generated tokens from ``start`` on were sampled with weights ``version``."""

    start: int
    version: int


class DraftedRow(NamedTuple):
    """A row that had drafts, and that brought generated tokens from index ``start`` on.

    ``drafted`` drafts were verified in it; the first ``accepted`` of them are the tokens behind
    ``start``. The draft of place j, from 0, was for the token ``start`` + j.
    """

    start: int
    drafted: int
    accepted: int


class DraftCounts(NamedTuple):
    """How many drafts of each place in the window were verified, and how many were accepted; both
    are of one length, and the first place is that of the first draft."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class SamplingSpan(NamedTuple):
    """Tokens of steps from ``ticket`` on were sampled with ``params``."""

    ticket: int
    params: SamplingParams


class StepReport(NamedTuple):
    """How one step was committed.

    ``effective_depth`` is the number of later steps that were in flight when the host took its
    tokens; with none the step did not overlap, and ``reason`` says why. ``committed`` and
    ``discarded`` count its tokens, ``drafted`` the drafts that came with the rows whose tokens were
    taken, and ``accepted`` those of them that were right.
    """

    ticket: int
    effective_depth: int
    overlapped: bool
    reason: str | None
    committed: int
    discarded: int
    drafted: int = 0
    accepted: int = 0


def step_summary(reports: Iterable[StepReport]) -> dict[str, Any]:
    """Committed steps in short, plain JSON types: ``tickets`` as [first, last] of each run without
    a gap, how many had which ``effective_depth``, how many ``overlapped``, and why others did not.
    A report that comes again, with the next token of the same step, counts once.
    """
    tickets: list[list[int]] = []
    depths: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    overlapped = 0
    for report in reports:
        if tickets and report.ticket == tickets[-1][1]:
            continue
        if tickets and report.ticket == tickets[-1][1] + 1:
            tickets[-1][1] = report.ticket
        else:
            tickets.append([report.ticket, report.ticket])
        depths[report.effective_depth] += 1
        overlapped += report.overlapped
        if report.reason is not None:
            reasons[report.reason] += 1
    return {
        "tickets": tickets,
        "effective_depth": {str(depth): depths[depth] for depth in sorted(depths)},
        "overlapped": overlapped,
        "not_overlapped": dict(reasons),
    }


class TokenIds(list[int]):
    """A list of token ids that can be used where megatron-core has a tensor of them."""

    def tolist(self) -> list[int]:
        """A list of its own."""
        return list(self)

    def numel(self) -> int:
        """Number of tokens."""
        return len(self)

    @property
    def shape(self) -> tuple[int]:
        """The shape of a tensor of one dimension."""
        return (len(self),)

    @overload
    def size(self, dim: None = None) -> tuple[int]: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> tuple[int] | int:
        """:attr:`shape`, or the number of tokens of dimension 0 or -1."""
        return self.shape if dim is None else self.shape[dim]
