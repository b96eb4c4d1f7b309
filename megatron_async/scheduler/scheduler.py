"""Decides each step and takes its results. Pure Python: no torch, no clock.

Every decision depends on ticket numbers and request data only, so that all ranks of a parallel
group decide alike and a run can be replayed.
"""

from __future__ import annotations

from collections import deque

from megatron_async.errors import IntegrityError
from megatron_async.request import FinishReason
from megatron_async.scheduler.events import Change, Commit, Event
from megatron_async.scheduler.preemption import choose_victims
from megatron_async.scheduler.request_state import Sequence, State
from megatron_async.scheduler.request_table import Lifecycle
from megatron_async.step.plan import Admission, BlockGrant, Plan, PrefillChunk, RowMap, StepResult


class Scheduler(Lifecycle):
    """Continuous batching by rank: priority first, then first come first served.

    A request is admitted when a row, a slot and the blocks of its prompt are free. A block for a
    generated token is taken when the step that writes it is planned. When there is none, the
    request leaves the row map (it stalls) until one comes free; when too few will, the highest
    ranks are evicted and computed again later.
    """

    # --- plan ---------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Decide the next step; None when no row can be launched."""
        number = self._next_ticket
        grants: list[BlockGrant] = []
        rows = self._plan_decode(number, grants)
        decode_rows = len(rows)
        prefills: list[PrefillChunk] = []
        admissions: list[Admission] = []
        if self._prefilling or self._waiting:
            rows = self._plan_prefill(number, rows, grants, prefills, admissions)
        if not len(rows):
            return None
        self._next_ticket = number + 1
        return Plan(number, rows, decode_rows, tuple(grants), tuple(prefills), tuple(admissions))

    def _plan_decode(self, number: int, grants: list[BlockGrant]) -> RowMap:
        """Advance every decoding sequence by one token; rows whose end is known stay out."""
        stalled_before = set(self._stalled)
        if self._stalled:
            self._unstall()
        block_size = self.limits.block_size
        needy = [s for s in self._decoding.values() if s.kv_bound == len(s.blocks) * block_size]
        if len(needy) > self.allocator.free_count:
            needy.sort(key=lambda s: s.rank)
            short = needy[self.allocator.free_count :]
            del needy[self.allocator.free_count :]
            for sequence in short:
                self._leave(sequence, State.STALLED)
                self._stalled[sequence.key] = sequence
                if sequence.key not in stalled_before:
                    self._events.append(Event(sequence.key, Change.STALL))
            self._relieve(len(short), short[0].rank)
        for sequence in needy:
            if sequence.state is State.DECODING:
                grants.append(self._grant(sequence))
        rows = self._decode_rows
        if rows is None:
            rows = self._decode_rows = _row_map(list(self._decoding.values()))
        complete = []
        for sequence in self._decoding.values():
            sequence.kv_bound += 1
            sequence.launched += 1
            sequence.last_ticket = number
            if sequence.launched == sequence.max_new:
                complete.append(sequence)
        for sequence in complete:
            self._leave(sequence, State.ENDING)
        return rows

    def _unstall(self) -> None:
        """Let those that were left out compete for rows and blocks again, lowest rank first."""
        room = self.limits.max_requests - len(self._decoding) - len(self._prefilling)
        for sequence in sorted(self._stalled.values(), key=lambda s: s.rank)[: max(room, 0)]:
            if sequence.prefilled < sequence.prefill_end:
                self._leave(sequence, State.PREFILLING)
                self._prefilling.append(sequence)
            else:
                self._enter_decoding(sequence)

    def _relieve(self, need: int, beneficiary: tuple[int, int]) -> None:
        """Evict until the blocks that are coming back suffice."""
        coming = sum(self._private_blocks(h.blocks) for h in self._retiring)
        coming += sum(
            self._private_blocks(s.blocks)
            for s in self._sequences.values()
            if s.state is State.ENDING
        )
        victims = choose_victims(
            self._sequences.values(),
            need - coming,
            beneficiary,
            lambda s: self._private_blocks(s.blocks),
        )
        for victim in victims:
            self._evict(victim)

    def _private_blocks(self, blocks: list[int]) -> int:
        return sum(self.allocator.references(block) == 1 for block in blocks)

    def _plan_prefill(
        self,
        number: int,
        decode_rows: RowMap,
        grants: list[BlockGrant],
        prefills: list[PrefillChunk],
        admissions: list[Admission],
    ) -> RowMap:
        """Fill the token budget with whole chunks, prompts under way first; admit what fits."""
        limits = self.limits
        budget = limits.max_tokens - len(decode_rows)
        row = len(decode_rows)
        launched: list[Sequence] = []
        under_way = deque(self._prefilling)
        while row < limits.max_requests:
            if under_way:
                sequence = under_way.popleft()
            else:
                admitted = self._admit_next(len(grants), budget, grants, admissions)
                if admitted is None:
                    break
                sequence = admitted
            start = sequence.prefilled
            length = min(limits.prefill_chunk_tokens, sequence.prefill_end - start)
            if length > budget:
                break
            end = start + length
            last = end == sequence.prefill_end
            prefills.append(
                PrefillChunk(row, sequence.slot, start, tuple(sequence.tokens[start:end]), last)
            )
            sequence.prefilled = sequence.kv_bound = end
            sequence.last_ticket = number
            launched.append(sequence)
            if last:
                sequence.launched += 1
                self._enter_decoding(sequence)
            budget -= length
            row += 1
        # Known from here on: a block written by this step may be shared from the next one.
        for sequence in launched:
            self._register_blocks(sequence, sequence.prefilled)
        return RowMap(
            decode_rows.slots + tuple(s.slot for s in launched),
            decode_rows.epochs + tuple(s.epoch for s in launched),
            decode_rows.keys + tuple(s.key for s in launched),
        )

    def _admit_next(
        self, granted: int, budget: int, grants: list[BlockGrant], admissions: list[Admission]
    ) -> Sequence | None:
        """Admit the head of the queue if everything it needs is there."""
        limits = self.limits
        sequence = self._waiting.head()
        running = len(self._decoding) + len(self._prefilling)
        if sequence is None or self._stalled or running >= limits.max_requests:
            return None
        # Looking a long prompt up in the prefix cache costs time: not again while nothing changes.
        attempt = (sequence.key, self.allocator.free_count, self.slots.free_count, running)
        if running and attempt == self._failed_attempt:
            return None
        self._failed_attempt = attempt
        # The last token is always computed: its logits are what is sampled next.
        shared, node = self.prefixes.match(sequence.tokens, len(sequence.tokens) - 1)
        total = -(-len(sequence.tokens) // limits.block_size)
        need = total - len(shared) + sum(not self.allocator.references(b) for b in shared)
        # Beside running requests, leave each of them its next block.
        if not self.slots.free_count or self.allocator.free_count < need + running:
            if not running:
                self._relieve_idle(need, sequence.rank)
            return None
        cached = len(shared) * limits.block_size
        length = min(limits.prefill_chunk_tokens, len(sequence.tokens) - cached)
        if length > budget or granted + total > limits.max_grants:
            self._failed_attempt = None  # what is short is this step's, not the cache's
            return None
        self._failed_attempt = None
        self._waiting.remove(sequence)
        for block in shared:
            self.allocator.share(block)
        sequence.slot = slot = self.slots.take()
        sequence.epoch = self.slots.epochs[slot]
        sequence.blocks = list(shared)
        sequence.node, sequence.registered = node, len(shared)
        sequence.prefilled = sequence.kv_bound = cached
        sequence.prefill_end = len(sequence.tokens)
        sequence.state = State.PREFILLING
        self._prefilling.append(sequence)
        grants.extend(BlockGrant(slot, column, block) for column, block in enumerate(shared))
        while len(sequence.blocks) < total:
            grants.append(self._grant(sequence))
        replayed = len(sequence.tokens) - cached if sequence.evictions else 0
        self._events.append(Event(sequence.key, Change.ADMIT, cached, replayed))
        admissions.append(
            Admission(
                slot,
                *sequence.sampling,
                sequence.max_total,
                cached,
                tuple(sorted(sequence.stop_ids)),
            )
        )
        return sequence

    def _relieve_idle(self, need: int, beneficiary: tuple[int, int]) -> None:
        """Nothing runs and the head of the queue does not fit: paused requests are in its way."""
        if not len(self._retiring):
            self._relieve(max(need - self.allocator.free_count, 1), beneficiary)

    def _grant(self, sequence: Sequence) -> BlockGrant:
        block = self.allocator.allocate()
        sequence.blocks.append(block)
        return BlockGrant(sequence.slot, len(sequence.blocks) - 1, block)

    def _register_blocks(self, sequence: Sequence, written: int) -> None:
        """Make the full blocks among the first ``written`` tokens known to the prefix cache."""
        if not self.prefixes.enabled or not sequence.blocks:
            return
        size = self.limits.block_size
        while (sequence.registered + 1) * size <= written:
            start = sequence.registered * size
            sequence.node = self.prefixes.insert(
                sequence.node,
                tuple(sequence.tokens[start : start + size]),
                sequence.blocks[sequence.registered],
            )
            sequence.registered += 1

    # --- commit -------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> Commit:
        """Take the tokens of a launched plan, end requests, and retire the plan's ticket."""
        reasons: dict[int, FinishReason] = {}
        discarded: set[int] = set()
        epochs, sequences = self.slots.epochs, self._sequences
        debug, is_caching = self._debug, self.prefixes.enabled
        block_size = self.limits.block_size
        of = plan.rows
        rows = zip(of.keys, of.slots, of.epochs, *result, strict=True)
        for key, slot, epoch, token, live, ended in plan.sampled(rows):
            if epoch != epochs[slot]:
                if debug and live:
                    self._check_was_aborted(key)
                discarded.add(key)
                continue
            sequence = sequences[key]
            tokens = sequence.tokens
            tokens.append(token)
            reason = None
            if token in sequence.stop_ids:
                reason = FinishReason.STOP
            elif len(tokens) == sequence.max_total:
                reason = FinishReason.LENGTH
            if debug:
                self._check_device_agrees(key, reason, live, ended)
            # The forward that wrote all tokens but the newest is over.
            if is_caching and len(tokens) > (sequence.registered + 1) * block_size:
                self._register_blocks(sequence, len(tokens) - 1)
            if reason is not None:
                reasons[key] = reason
                self._finish(sequence, reason)
        self._retired_ticket = plan.number
        self._retire()
        return Commit(
            tuple(plan.sampled(of.keys)), tuple(plan.sampled(result.tokens)), reasons, discarded
        )

    def _check_was_aborted(self, key: int) -> None:
        """A dead row that the device took for live: it cannot know of an abort, but of an end."""
        reason = self._sequences[key].reason
        if reason is not FinishReason.ABORT:
            raise IntegrityError(
                f"request {key} ended by {reason}, and the device sampled it again"
            )

    @staticmethod
    def _check_device_agrees(key: int, reason: FinishReason | None, live: int, ended: int) -> None:
        if not live or bool(ended) != (reason is not None):
            raise IntegrityError(
                f"request {key}: the host says {reason}, the device live={live} ended={ended}"
            )


def _row_map(sequences: list[Sequence]) -> RowMap:
    return RowMap(
        tuple(s.slot for s in sequences),
        tuple(s.epoch for s in sequences),
        tuple(s.key for s in sequences),
    )
