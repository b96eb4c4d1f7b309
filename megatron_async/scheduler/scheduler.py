"""Decides each step and takes its results. Pure Python: no torch, no clock.

Every decision depends on ticket numbers and request data only, so that all ranks of a parallel
group decide alike and a run can be replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.errors import IntegrityError
from megatron_async.request.request import DEVICE_ENDS, FinishReason
from megatron_async.scheduler.admission import PromptPlanner, PromptWork
from megatron_async.scheduler.draft_control import (
    NOTHING_DRAFTED,
    DraftControl,
    StepCosts,
    WindowReason,
)
from megatron_async.scheduler.events import Change, Commit, Event
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.micro_batches import MicroBatches
from megatron_async.scheduler.preemption import Preemption
from megatron_async.scheduler.request_state import (
    EVICTABLE,
    NO_PROMPT_LOG_PROBS,
    Sequence,
    State,
)
from megatron_async.scheduler.request_table import RequestTable, row_map
from megatron_async.step.plan import BlockAssignment, Plan, RowMap, StateCopy
from megatron_async.step.records import ENDED, FAILED, LogProbs, StepResult
from megatron_async.step.slot_fields import Values


class HostEnds(Protocol):
    """Ends of requests that the device cannot see, such as stop words."""

    def keep(self, key: int, tokens: tuple[int, ...]) -> int | None:
        """How many of the new tokens of a watched request count, if it ends with the last of them;
        None if it goes on."""


class Scheduler:
    """Continuous batching by priority key: priority first, then first come first served.

    A block for a generated token is taken when the step that writes it is planned. When there is
    none, the request leaves the row map (it stalls) until one comes free; when too few will, the
    highest keys are evicted and computed again later.

    Args:
        ends: asked about the tokens of watched requests; None if there are none.
        costs: what decode steps cost, to leave out drafts that do not pay; None drafts all.

    Attributes:
        left_out: guided rows that the last plan went without, since it would wait for their tokens.
        guided_after: the last ticket whose tokens the guided rows of the last launched plan need,
            if they sit launches out.
        others: micro-batches that have rows to launch, less the one whose turn it is: as many steps
            of others are in flight when one is planned.
    """

    def __init__(
        self,
        limits: Limits,
        ends: HostEnds | None = None,
        *,
        costs: StepCosts | None = None,
        debug: bool = False,
    ) -> None:
        self.limits = limits
        self.table = RequestTable(limits)
        self.next_ticket = 0
        self._preemption = Preemption(self.table, limits)
        self._micro_batches = MicroBatches(self.table, limits)
        self._are_several = limits.micro_batches > 1
        self._turns: Iterable[int] = self._micro_batches if self._are_several else (0,)
        self._prompts = PromptPlanner(self.table, self._preemption, limits, self._micro_batches)
        self.others = 0
        self.left_out = 0
        self.guided_after = self._needed = -1
        self._ends = ends
        self._most_drafts = limits.window - 1
        self._drafts = DraftControl(limits.windows, costs)
        self._choices = [NOTHING_DRAFTED] * limits.micro_batches
        """By micro-batch the window of its next step: the S before it must draft for it."""
        self._foreseen: dict[int, int] = {}
        """See :meth:`foresee`, by request."""
        self._takes_snapshots = bool(limits.state_snapshots) and limits.window == 1
        """Decode rows leave snapshots of recurrent state; with drafts nobody knows where they
        are."""
        self._debug = debug

    # --- what commands do, between two plans --------------------------------------------------

    def add(self, sequence: Sequence, priority: int = 0, drafts: int | None = None) -> None:
        """Queue a request; the caller has checked that it can fit an empty cache.

        A lower ``priority`` goes first. One step of it is worth ``priority_step`` tickets of
        waiting, so what overtakes a request is bounded. A row of it has at most ``drafts`` drafts;
        None for the engine's.
        """
        limits = self.limits
        sequence.awaits_guesses = limits.needs_guesses
        sequence.take_window(limits.window if drafts is None else limits.window_of(drafts))
        at = self.next_ticket + priority * self.limits.priority_step
        sequence.priority_key = (at, sequence.key)
        self.table.add(sequence)

    def abort(self, key: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at once; rows of it in flight will be discarded."""
        sequence = self._unfinished(key)
        if sequence is None:
            return False
        self.table.finish_by_host(sequence, reason)
        return True

    def pause(self, key: int) -> bool:
        """Leave the request out of all row maps to come; what is in flight is committed."""
        sequence = self._unfinished(key)
        if sequence is None or sequence.held:
            return False
        self.table.hold(sequence)
        if sequence.state in EVICTABLE:
            self.table.leave(sequence, State.HELD)
        self.table.record(Event(key, Change.PAUSE))
        return True

    def resume(self, key: int) -> bool:
        """Let a paused request go on."""
        sequence = self._unfinished(key)
        if sequence is None or not sequence.held:
            return False
        self.table.let_go_on(sequence)
        if sequence.state is State.HELD:
            # Its row may have been given to another: it waits for one like those short of a block.
            self.table.stall(sequence)
        self.table.record(Event(key, Change.RESUME))
        return True

    def evict(self, key: int) -> bool:
        """Give up the request's slot and blocks; it is computed again when it is admitted anew."""
        sequence = self._unfinished(key)
        if sequence is None or sequence.state not in EVICTABLE:
            return False
        self.table.evict(sequence)
        return True

    def evict_all(self) -> None:
        """Evict whatever can be: what it holds was computed by weights that are gone."""
        for sequence in self.table.evictable():
            self.table.evict(sequence)

    def restart(self, key: int) -> bool:
        """Drop what the request has generated, and evict it: it begins again behind its prompt.
        Nothing may be in flight. False for one that has nothing to drop."""
        sequence = self._unfinished(key)
        if sequence is None or not (sequence.committed or sequence.prompt_log_probs_begun):
            return False
        if sequence.state in EVICTABLE:
            self.table.evict(sequence)
        sequence.restart()
        return True

    def begin_prompts_anew(self) -> list[int]:
        """Have the log-probabilities of a prompt come again, behind :meth:`evict_all`, where its
        request has generated nothing yet: those that have come are of weights that are gone.
        Returns the requests' keys."""
        begun = [
            sequence
            for sequence in self.table.sequences.values()
            if sequence.state is not State.FINISHED
            and sequence.prompt_log_probs_begun
            and not (sequence.committed or sequence.prefilled)
        ]
        for sequence in begun:
            sequence.prompt_log_probs = 0
        return [sequence.key for sequence in begun]

    def update_values(self, key: int, values: Values, drafts: int | None = None) -> bool:
        """Set values of the REQUEST slot fields, for what the next launch samples and after, and at
        most ``drafts`` drafts for a row; None for the engine's."""
        sequence = self._unfinished(key)
        if sequence is None:
            return False
        limits = self.limits
        window = limits.window if drafts is None else limits.window_of(drafts)
        self.table.update_values(sequence, values, window)
        return True

    def foresee(self, drafts: Mapping[int, int]) -> None:
        """The host has guessed as many drafts for the next row of each of these requests. It counts
        where rows have no others."""
        if self.limits.needs_guesses:
            known = self.table.sequences
            before = {key: count for key, count in self._foreseen.items() if key in known}
            self._foreseen = {**before, **drafts}

    def _unfinished(self, key: int) -> Sequence | None:
        sequence = self.table.sequences.get(key)
        return None if sequence is None or sequence.state is State.FINISHED else sequence

    def weights_changed(self) -> None:
        """Drafts to come are those of new weights: how many are right is not known."""
        self._drafts.begin_anew()

    # --- what others may ask ------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Some request has not reached its end."""
        return self.table.unfinished > 0

    @property
    def unfinished_count(self) -> int:
        """Requests that have not reached their end."""
        return self.table.unfinished

    @property
    def can_go_on(self) -> bool:
        """Some request has not reached its end and is not paused. With nothing in flight a plan
        finds rows for it, or evicts others until one does."""
        return self.table.unfinished > self.table.held

    @property
    def waiting_count(self) -> int:
        """Requests without slot and blocks, evicted ones included."""
        return len(self.table.waiting)

    @property
    def stalled_count(self) -> int:
        """Requests that wait for a block."""
        return len(self.table.stalled)

    @property
    def is_short(self) -> bool:
        """A request that nobody has paused waits for a row, a slot or blocks."""
        return bool(self.table.stalled) or self.table.waiting.head() is not None

    @property
    def retired_ticket(self) -> int:
        """The last ticket that was committed; -1 before the first."""
        return self.table.retired_ticket

    @property
    def allocator(self) -> BlockAllocator:
        """The blocks of the KV cache."""
        return self.table.allocator

    def check(self) -> None:
        """Raises :class:`IntegrityError` unless each block and slot is held by what says so."""
        self.table.check()

    def check_idle(self) -> None:
        """Raises :class:`IntegrityError` unless, with no request left, all has come back."""
        self.table.check_idle()

    # --- plan ---------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Decide the next step, of the micro-batch whose turn it is, or of the next that has rows;
        None when no row can be launched."""
        number, table = self.next_ticket, self.table
        for micro_batch in self._turns:
            work = PromptWork([], [], [], [], [])
            guessed = self._open_windows(micro_batch) if self._foreseen else ()
            rows, after = self._plan_decode(micro_batch, number, work.assignments, work.snapshots)
            if guessed:
                self._close_windows(guessed)
            decode_rows = len(rows.slots)
            if table.prefilling or table.waiting.items:
                rows = self._prompts.plan(number, rows, work, micro_batch)
            if rows.slots:
                break
        if self._are_several:
            self.others = self._micro_batches.others()
        if not rows.slots:
            return None
        self.next_ticket = number + 1
        self.guided_after = self._needed
        control = tuple(table.control.values())
        table.control.clear()
        window, drafts, reason = 1, 0, ""
        if self._most_drafts:
            window, drafts, reason = self._choose_drafts(micro_batch, rows)
        return Plan(
            number=number,
            rows=rows,
            decode_rows=decode_rows,
            assignments=tuple(work.assignments),
            prefills=tuple(work.prefills),
            admissions=tuple(work.admissions),
            control=control,
            extended=table.extended > 0,
            window=window,
            drafts=drafts,
            reason=reason,
            restores=tuple(work.restores),
            snapshots=tuple(work.snapshots),
            after=after,
        )

    def _open_windows(self, micro_batch: int) -> list[Sequence]:
        """Have the rows of the next step whose drafts the host has guessed bring them."""
        table, guessed = self.table, []
        decoding: Collection[Sequence] = table.decoding[micro_batch].values()
        if self.limits.guided_lag is not None:
            decoding = self._without_guided(decoding)
        for sequence in decoding:
            window = min(1 + self._foreseen.pop(sequence.key, 0), sequence.asked_window)
            if window > 1:
                sequence.window = window
                guessed.append(sequence)
        if guessed:
            table.row_maps.clear()
            wanted = [sequence.window for sequence in table.decoding[micro_batch].values()]
            self._choices[micro_batch] = self._drafts.choose(self.next_ticket, wanted)
        return guessed

    def _close_windows(self, guessed: list[Sequence]) -> None:
        for sequence in guessed:
            sequence.window = 1
        self.table.row_maps.clear()

    def _choose_drafts(self, micro_batch: int, rows: RowMap) -> tuple[int, int, str]:
        """The window that a planned step needs and why; and the drafts that its S makes, for the
        step behind it, whose window is chosen here."""
        choice = self._choices[micro_batch]
        window, reason = self._drafts.holding(max(rows.windows, default=1)), choice.reason
        if window == 1 < choice.window:
            reason = WindowReason.NO_DRAFTS
        wanted = [sequence.window for sequence in self.table.decoding[micro_batch].values()]
        choice = self._choices[micro_batch] = self._drafts.choose(self.next_ticket, wanted)
        # A window that grows may be any: all drafts are made for it.
        grows = choice.window > window
        return window, self._most_drafts if grows else window - 1, reason.value

    def _plan_decode(
        self,
        micro_batch: int,
        number: int,
        assignments: list[BlockAssignment],
        snapshots: list[StateCopy],
    ) -> tuple[RowMap, int]:
        """Advance every decoding sequence of a micro-batch by one row; those whose end is known
        stay out. Returns the rows, and the last ticket whose tokens they need."""
        table, window = self.table, self._choices[micro_batch].window
        decoding: Collection[Sequence] = table.decoding[micro_batch].values()
        stalled_before = set(table.stalled)
        if stalled_before:
            self._preemption.unstall(micro_batch)
        if self.limits.rotation_limit is not None:
            self._evict_grown(micro_batch, self.limits.rotation_limit)
        if window > 1 and self.limits.draft_limit is not None:
            self._end_drafts(micro_batch, self.limits.draft_limit)
        self.left_out, self._needed = 0, -1
        divides = self.limits.guided_lag is not None and table.guided
        if divides:
            decoding = self._without_guided(decoding)
        size, lookahead = self.limits.block_size, self.limits.lookahead
        needy: dict[Sequence, int] = {}
        for sequence in decoding:
            reach = (min(window, sequence.window) if window > 1 else 1) + lookahead
            if sequence.kv_bound + reach > len(sequence.blocks) * size:
                short = sequence.blocks_short(reach, size)
                if short > 0:
                    needy[sequence] = short
        if needy:
            granted = list(needy)
            if sum(needy.values()) > table.allocator.free_count:
                granted = self._preemption.stall_short(needy, stalled_before)
            for sequence in granted:
                for _ in range(needy[sequence]):
                    assignments.append(table.assign_block(sequence))
        rows = table.row_maps.get((micro_batch, window))
        if divides:
            decoding = [s for s in decoding if s.state is State.DECODING]
            self.left_out = len(table.decoding[micro_batch]) - len(decoding)
            needed = [s.last_ticket for s in decoding if s.waits]
            self._needed = max(needed, default=-1)
        if self.left_out:
            rows = row_map(decoding, window)
        elif rows is None:
            rows = table.row_maps[micro_batch, window] = row_map(decoding, window)
        after = number - 1
        if self._are_several:
            after = max((s.last_ticket for s in decoding), default=-1)
        complete = []
        for sequence in decoding:
            sequence.kv_bound += min(window, sequence.window) if window > 1 else 1
            sequence.launched += 1
            sequence.last_ticket = number
            if sequence.launched >= sequence.max_new:
                complete.append(sequence)
        if self._takes_snapshots:
            at_end = [s for s in decoding if s.kv_bound % size == 0]
            snapshots += filter(None, map(table.reserve_snapshot, at_end))
        for sequence in complete:
            table.leave(sequence, State.ENDING)
        return rows, after

    def _without_guided(self, decoding: Collection[Sequence]) -> list[Sequence]:
        """Those whose next row makes no launch wait; all where that would be none."""
        return [s for s in decoding if not self._sits_out(s)] or list(decoding)

    def _sits_out(self, sequence: Sequence) -> bool:
        """The launch behind that of its next row would wait for a token of it."""
        newest, lag = sequence.last_ticket, self.limits.guided_lag or 0
        is_near = newest > self.next_ticket - lag and newest > self.table.retired_ticket
        return is_near and sequence.waits

    def _evict_grown(self, micro_batch: int, limit: int) -> None:
        """Evict those whose next token is the first that needs the rotations of long requests."""
        grown = [s for s in self.table.decoding[micro_batch].values() if s.kv_bound >= limit]
        for sequence in grown:
            if not sequence.long_rotation:
                self.table.evict(sequence)

    def _end_drafts(self, micro_batch: int, limit: int) -> None:
        """Let those go on without drafts whose next token may be behind what drafts."""
        for sequence in self.table.decoding[micro_batch].values():
            if sequence.window > 1 and sequence.kv_bound >= limit:
                sequence.end_drafts()
                self.table.row_maps.clear()

    # --- commit -------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> Commit:
        """Take the tokens of a launched plan, end requests, and retire the plan's ticket."""
        table, debug = self.table, self._debug
        reasons: dict[int, FinishReason] = {}
        discarded: set[int] = set()
        kept: list[tuple[int, ...]] = []
        epochs, sequences = table.slots.epochs, table.sequences
        is_caching, block_size = table.prefixes.enabled, self.limits.block_size
        behind = self.limits.attention_window
        keys, slots, row_epochs = plan.rows.keys, plan.rows.slots, plan.rows.epochs
        prompt_log_probs = None
        if result.prompt_log_probs is not None:
            prompt_log_probs = self._take_prompt_log_probs(plan, result.prompt_log_probs)
        counts, statuses, windows = result.counts, result.statuses, result.tokens
        reserved = plan.rows.windows or (1,) * len(keys)
        rows = zip(keys, slots, row_epochs, counts, statuses, windows, reserved, strict=True)
        for key, slot, epoch, count, status, window, bound in (
            plan.sampled(rows) if plan.prefills else rows
        ):
            if epoch != epochs[slot]:
                if debug and count:
                    self._check_host_ended(key)
                discarded.add(key)
                kept.append(())
                continue
            sequence = sequences[key]
            tokens = sequence.tokens
            if count != 1 or len(window) != 1:
                window = self._cut(sequence, window[:count], bound)
            ends_here = False
            if sequence.watched and window and self._ends is not None:
                keep = self._ends.keep(key, window)
                if keep is not None:
                    ends_here = True
                    window = window[:keep]
            tokens += window
            reason = None
            if ends_here or (window and tokens[-1] in sequence.stop_ids):
                reason = FinishReason.STOP
            elif status == FAILED:
                reason = FinishReason.ERROR
            elif len(tokens) == sequence.max_total:
                reason = FinishReason.LENGTH
            by_host = reason is FinishReason.STOP and tokens[-1] not in sequence.device_stop_ids
            if debug and not by_host:
                self._check_device_agrees(key, reason, window, count, status)
            # The forward that wrote all tokens but the newest is over.
            if is_caching and len(tokens) > (sequence.registered + 1) * block_size:
                table.register_blocks(sequence, len(tokens) - 1)
            kept.append(window)
            # Rows in flight and to come hold its newest token or later ones.
            if reason is None and behind is not None and len(tokens) > behind:
                table.free_behind(sequence, len(tokens) - behind)
            if reason is not None:
                reasons[key] = reason
                if by_host:
                    table.finish_by_host(sequence, reason, plan.number)
                else:
                    table.finish(sequence, reason)
        table.retire(plan.number)
        if plan.window > 1:
            self._drafts.committed(plan, result)
        log_probs = result.log_probs
        if plan.prefills:
            keys = tuple(plan.sampled(keys))
            if log_probs is not None:
                log_probs = log_probs[list(plan.sampled(range(len(slots))))]
        return Commit(keys, kept, reasons, discarded, log_probs, prompt_log_probs)

    def _take_prompt_log_probs(
        self, plan: Plan, words: LogProbs
    ) -> dict[int, tuple[int, LogProbs]]:
        """Return, by request that has not ended, the first prompt token that its chunk brought
        log-probabilities of, and these."""
        taken, at = {}, 0
        for chunk in plan.prefills:
            rows = words[at : at + len(chunk.targets)]
            at += len(chunk.targets)
            key = plan.rows.keys[chunk.row]
            covered = len(chunk.tokens) if chunk.layers else len(rows)
            if not covered or plan.rows.epochs[chunk.row] != self.table.slots.epochs[chunk.slot]:
                continue
            sequence = self.table.sequences[key]
            done = chunk.start + covered
            # The last token has a hidden state, and no token behind it.
            if done >= sequence.prompt_length - (not chunk.layers):
                done = NO_PROMPT_LOG_PROBS
            sequence.prompt_log_probs = max(sequence.prompt_log_probs, done)
            if len(rows):
                taken[key] = (chunk.start + 1, rows)
        return taken

    def _cut(self, sequence: Sequence, window: tuple[int, ...], bound: int) -> tuple[int, ...]:
        """The tokens of a row up to the end of the request; brings the launch-side bounds, which
        took the row for ``bound`` tokens and for one, to what it brought."""
        room = sequence.max_total - len(sequence.tokens)
        for index, token in enumerate(window[:room]):
            if token in sequence.stop_ids:
                room = index + 1
                break
        window = window[:room]
        sequence.launched += len(window) - 1
        sequence.kv_bound -= bound - len(window)
        if sequence.state is State.DECODING and sequence.launched >= sequence.max_new:
            self.table.leave(sequence, State.ENDING)
        return window

    def _check_host_ended(self, key: int) -> None:
        """A dead row that the device took for live: right only if the host alone knew the end."""
        sequence = self.table.sequences[key]
        reason = sequence.reason
        if reason in DEVICE_ENDS and not sequence.ended_by_host:
            raise IntegrityError(
                f"request {key} ended by {reason}, and the device sampled it again"
            )

    @staticmethod
    def _check_device_agrees(
        key: int, reason: FinishReason | None, window: tuple[int, ...], count: int, status: int
    ) -> None:
        """Ends that the device can see are found by both."""
        ended = status in (ENDED, FAILED)
        if len(window) != count or (not count and status != FAILED) or ended != bool(reason):
            raise IntegrityError(
                f"request {key}: the host takes {len(window)} tokens and says {reason}, the device "
                f"brought {count} with status {status}"
            )
