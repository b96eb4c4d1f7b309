"""Counts of what was launched, committed and discarded, and why a step did not overlap."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_async.scheduler.events import Change, Event
from megatron_async.step.plan import Plan


class NotOverlapped(str, Enum):
    """Why no later step was in flight when the host took a step's tokens."""

    SERIAL = "serial: depth 0"
    DRAINED = "drained: every running request had its last token in flight"
    NO_CAPACITY = "drained: no row could be launched and no waiting request fitted"
    PAUSED = "drained: the requests that are left are paused"
    LOGGED = "barrier: a logged step"
    SUSPENDED = "barrier: the engine was suspended"
    WEIGHTS = "barrier: new weights"


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine was built or reset.

    A step overlapped when a later one was in flight while the host took its tokens and did its
    bookkeeping. ``step_ns`` is the time spent in steps, ``wait_ns`` the part of it blocked on the
    device; both are for people and steer nothing.
    """

    steps_launched: int = 0
    steps_committed: int = 0
    steps_overlapped: int = 0
    steps_with_prefill: int = 0
    steps_with_waiting: int = 0
    not_overlapped: Counter[str] = field(default_factory=Counter)
    rows_launched: int = 0
    tokens_committed: int = 0
    tokens_discarded: int = 0
    tokens_cached: int = 0
    tokens_replayed: int = 0
    pauses: int = 0
    resumes: int = 0
    stalls: int = 0
    evictions: int = 0
    barriers: int = 0
    prefill_chunks: int = 0
    blocks_granted: int = 0
    step_ns: int = 0
    wait_ns: int = 0

    def launched(self, plan: Plan, waiting: int) -> None:
        """A step was launched while ``waiting`` requests had not been admitted."""
        self.steps_launched += 1
        self.steps_with_prefill += not plan.is_decode_only
        self.steps_with_waiting += waiting > 0
        self.rows_launched += len(plan.rows)
        self.prefill_chunks += len(plan.prefills)
        self.blocks_granted += len(plan.grants)

    def committed(self, tokens: int, discarded: int, reason: NotOverlapped | None) -> None:
        """A step was committed; ``reason`` is None when a later one was in flight."""
        self.steps_committed += 1
        self.tokens_committed += tokens
        self.tokens_discarded += discarded
        if reason is None:
            self.steps_overlapped += 1
        else:
            self.not_overlapped[reason.value] += 1

    def happened(self, events: list[Event]) -> None:
        """Count what the scheduler did to requests."""
        for event in events:
            self.tokens_cached += event.cached
            self.tokens_replayed += event.replayed
            self.pauses += event.change is Change.PAUSE
            self.resumes += event.change is Change.RESUME
            self.stalls += event.change is Change.STALL
            self.evictions += event.change is Change.EVICT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        values = dataclasses.asdict(self)
        values["not_overlapped"] = dict(self.not_overlapped)
        return values
