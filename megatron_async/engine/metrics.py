"""Counts of what was launched, committed and discarded, and why a step did not overlap."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from megatron_async.request.request import DraftCounts, StepReport
from megatron_async.scheduler.events import Change, Event
from megatron_async.step.extras import TABLE_FAILED, TABLE_LATER, TABLE_TOO_LARGE
from megatron_async.step.plan import Plan

Result = TypeVar("Result")

KEPT_VERSIONS = 4
"""The last weight versions that have counts of drafts of their own."""


class NotOverlapped(str, Enum):
    """Why no later step was in flight when the host took a step's tokens."""

    SERIAL = "serial: depth 0"
    DRAINED = "drained: every running request had its last token in flight"
    NO_CAPACITY = "drained: no row could be launched and no waiting request fitted"
    PAUSED = "drained: the requests that are left are paused"
    LOGGED = "barrier: a logged step"
    LOGITS_PROCESSOR = "barrier: a Python logits processor"
    SUSPENDED = "barrier: the engine was suspended"
    WEIGHTS = "barrier: new weights"
    RESET = "barrier: the engine was reset"


class GuidedRow(str, Enum):
    """How a row of a guided request got what its S needed, or that it sat a launch out."""

    WINDOW = "masks along the drafts of its window"
    TOKEN = "the mask of one token: it had no drafts"
    PROCESSOR = "a Python logits processor, behind a barrier"
    AUTOMATON = "a token automaton on the device"
    SAT_OUT = "left out of a launch that would wait for a token of it"


class HostMasks(str, Enum):
    """Why the host made the masks of a guided row; a grammar may have further reasons to have no
    automaton."""

    OFF = "guided_automata_bytes is 0"
    DEVICE = "this engine has no automata: ranks, or a sampler without kernels"
    PROCESSOR = "a Python logits processor comes first"
    POOL = TABLE_TOO_LARGE
    LATER = TABLE_LATER
    FAILED = TABLE_FAILED
    MANY = "requests that have not ended have too many tables of other grammars"
    OTHER = "the grammar has no table, for one of many reasons"
    FULL = "the pool was full of the grammars of other requests"


class Idle(str, Enum):
    """Why an engine can do nothing until somebody asks for something. The list is closed: beside a
    request for which none of these holds an engine never waits."""

    NO_REQUEST = "no request is unfinished"
    PAUSED = "all unfinished requests are paused"
    SUSPENDED = "the engine is suspended"


class WeightStart(NamedTuple):
    """Drafts by place that had been verified and accepted when weights of ``version`` came."""

    version: int
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine was built or reset.

    A step overlapped when a later one was in flight while the host took its tokens and did its
    bookkeeping. Without drafts ``rows_launched`` is, when nothing is in flight, the rows of
    chunks that were not sampled and ``tokens_committed`` + ``tokens_discarded``;
    ``tokens_accepted`` counts what rows brought beyond one token, ``tokens_drafted`` the drafts
    that were verified in rows whose tokens were taken; ``accepted_by_position`` and
    ``drafted_by_position`` have the same by the place of the draft, and :attr:`drafts_by_version`
    for each of the last weights by itself, whose beginnings are ``weight_starts``;
    ``steps_by_window`` and ``window_reasons`` say how many tokens a row of a launched step could
    bring, and why that many.
    ``guided_rows`` counts the sampled rows of guided requests by :class:`GuidedRow`, and those that
    launches went without; ``host_masks`` those that a grammar guides on the host, by why it does.
    ``step_ns`` is the time spent in steps, ``wait_ns`` the part of it blocked on the device; both
    are for people and steer nothing.
    """

    steps_launched: int = 0
    steps_committed: int = 0
    steps_overlapped: int = 0
    steps_with_prefill: int = 0
    steps_with_waiting: int = 0
    steps_with_control: int = 0
    steps_with_extras: int = 0
    not_overlapped: Counter[str] = field(default_factory=Counter)
    steps_by_window: Counter[int] = field(default_factory=Counter)
    window_reasons: Counter[str] = field(default_factory=Counter)
    guided_rows: Counter[str] = field(default_factory=Counter)
    host_masks: Counter[str] = field(default_factory=Counter)
    rows_launched: int = 0
    tokens_committed: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    weight_starts: list[WeightStart] = field(default_factory=lambda: [WeightStart(0)])
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
    states_restored: int = 0
    state_snapshots_taken: int = 0
    step_ns: int = 0
    wait_ns: int = 0

    def launched(self, plan: Plan, waiting: int) -> None:
        """A step was launched while ``waiting`` requests had not been admitted."""
        self.steps_launched += 1
        self.steps_with_prefill += bool(plan.prefills)
        self.steps_with_waiting += waiting > 0
        self.steps_with_control += bool(plan.control)
        self.steps_with_extras += plan.extended
        if plan.reason:
            self.steps_by_window[plan.window] += 1
            self.window_reasons[plan.reason] += 1
        self.rows_launched += len(plan.rows.slots)
        self.prefill_chunks += len(plan.prefills)
        self.blocks_granted += len(plan.assignments)
        self.states_restored += len(plan.restores)
        self.state_snapshots_taken += len(plan.snapshots)

    def committed(self, report: StepReport) -> None:
        """A step was committed."""
        self.steps_committed += 1
        self.tokens_committed += report.committed
        self.tokens_drafted += report.drafted
        self.tokens_accepted += report.accepted
        self.tokens_discarded += report.discarded
        if report.reason is None:
            self.steps_overlapped += 1
        else:
            self.not_overlapped[report.reason] += 1

    def verified(self, rows: Sequence[tuple[int, ...]], windows: Sequence[int]) -> int:
        """Count the drafts of decode rows whose tokens were taken, each with its window; returns
        their number."""
        taken = [(len(t) - 1, w - 1) for t, w in zip(rows, windows, strict=False) if t]
        count_drafts(self.drafted_by_position, (drafts for _, drafts in taken))
        count_drafts(self.accepted_by_position, (accepted for accepted, _ in taken))
        places = len(self.drafted_by_position)
        self.accepted_by_position += [0] * (places - len(self.accepted_by_position))
        return sum(drafts for _, drafts in taken)

    def weights_changed(self, version: int) -> None:
        """Drafts that are verified from here on are verified by weights of ``version``."""
        counts = tuple(self.drafted_by_position), tuple(self.accepted_by_position)
        # The counts of one update replace those of another between which nothing was drafted.
        if self.weight_starts[-1][1:] == counts:
            self.weight_starts.pop()
        self.weight_starts.append(WeightStart(version, *counts))
        del self.weight_starts[:-KEPT_VERSIONS]

    @property
    def drafts_by_version(self) -> dict[int, DraftCounts]:
        """Drafts by place that the last weights have verified, by their version: the oldest first,
        and none that has verified no draft."""
        ends = [*(start[1:] for start in self.weight_starts[1:]),
                (self.drafted_by_position, self.accepted_by_position)]  # fmt: skip
        return {
            start.version: DraftCounts(beyond(drafted, start.drafted),
                                       beyond(accepted, start.accepted))
            for start, (drafted, accepted) in zip(self.weight_starts, ends, strict=True)
            if sum(drafted) > sum(start.drafted)
        }  # fmt: skip

    @property
    def acceptance(self) -> list[float]:
        """The share of the drafts of each place that were accepted."""
        return acceptance(self.accepted_by_position, self.drafted_by_position)

    @property
    def tokens_per_row(self) -> float:
        """Tokens that a decode row with drafts brought in the mean; 1 without drafts."""
        rows = next(iter(self.drafted_by_position), 0)
        return 1 + sum(self.accepted_by_position) / rows if rows else 1.0

    def record_events(self, events: list[Event]) -> None:
        """Count what the scheduler did to requests."""
        for event in events:
            self.tokens_cached += event.cached
            self.tokens_replayed += event.replayed
            self.pauses += event.change is Change.PAUSE
            self.resumes += event.change is Change.RESUME
            self.stalls += event.change is Change.STALL
            self.evictions += event.change is Change.EVICT

    def to_dict(self, first_version: int = 0) -> dict[str, Any]:
        """Plain JSON types; weight versions are counted from ``first_version``."""
        values = dataclasses.asdict(self)
        values["not_overlapped"] = dict(self.not_overlapped)
        values["steps_by_window"] = {str(k): v for k, v in self.steps_by_window.items()}
        values["window_reasons"] = dict(self.window_reasons)
        values["guided_rows"] = dict(self.guided_rows)
        values["host_masks"] = dict(self.host_masks)
        del values["weight_starts"]
        values["drafts_by_version"] = {
            str(first_version + version): {
                name: list(counts) for name, counts in of._asdict().items()
            }
            for version, of in self.drafts_by_version.items()
        }
        return values


def count_drafts(counts: list[int], of_rows: Iterable[int]) -> None:
    """Add 1 to the first n of ``counts`` for each row of n drafts."""
    for drafts in of_rows:
        counts += [0] * (drafts - len(counts))
        for place in range(drafts):
            counts[place] += 1


def beyond(counts: Sequence[int], earlier: Sequence[int]) -> tuple[int, ...]:
    """What has been added to ``earlier`` counts by place."""
    before = [*earlier, *[0] * (len(counts) - len(earlier))]
    return tuple(now - then for now, then in zip(counts, before, strict=True))


def acceptance(accepted: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """The share that was accepted of the drafts of each place."""
    accepted = [*accepted, *[0] * (len(drafted) - len(accepted))]
    return [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]


class Observers(NamedTuple):
    """The methods of an engine's observers, by name."""

    on_span: tuple[Callable[[str, int, int, int], None], ...] = ()
    on_launch: tuple[Callable[[Plan], None], ...] = ()
    on_commit: tuple[Callable[[StepReport], None], ...] = ()

    @classmethod
    def of(cls, observers: list[Any]) -> Observers:
        """The methods of ``observers``, each of which has some of them."""
        return cls(
            *(
                tuple(getattr(observer, name) for observer in observers if hasattr(observer, name))
                for name in cls._fields
            )
        )

    def span(self, name: str, ticket: int, start_ns: int, end_ns: int) -> None:
        """Report a piece of the host's work."""
        for on_span in self.on_span:
            on_span(name, ticket, start_ns, end_ns)

    def timed(
        self, name: str, call: Callable[..., Result], ticket: Callable[[tuple[Any, ...], Any], int]
    ) -> Callable[..., Result]:
        """``call`` with clocks around it, if anybody wants to know; ``ticket`` gets its
        arguments and its result."""
        if not self.on_span:
            return call

        def with_clocks(*args: Any) -> Result:
            start = time.perf_counter_ns()
            result = call(*args)
            end = time.perf_counter_ns()
            self.span(name, ticket(args, result), start, end)
            return result

        return with_clocks
