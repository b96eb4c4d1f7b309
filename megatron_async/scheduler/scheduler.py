"""Decides each step and takes its results. Pure Python: no torch, no clock.

Every decision depends on ticket numbers and request data only, so that all ranks of a parallel
group decide alike and a run can be replayed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.cache.retire_queue import RetireQueue
from megatron_async.errors import IntegrityError
from megatron_async.requests import FinishReason
from megatron_async.scheduler.sequence import Sequence
from megatron_async.scheduler.slots import SlotTable
from megatron_async.ticket import Admission, BlockGrant, Plan, PrefillChunk, RowMap, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one step and one cache can hold; tokens and blocks.

    There are more slots than rows: a slot comes back only when its last ticket has retired, and
    until then another one serves the request that takes over the row.
    """

    max_requests: int
    slot_count: int
    max_tokens: int
    prefill_chunk_tokens: int
    block_size: int
    block_count: int


class Commit(NamedTuple):
    """One event of a commit: a token that a request keeps, the end of a request, or both.

    ``token`` is None when the request ends without one (an abort); ``discarded`` marks a token
    that was sampled for a request that had ended before.
    """

    key: int
    token: int | None
    reason: FinishReason | None
    discarded: bool = False


class Scheduler:
    """Continuous batching, first come first served.

    A request is admitted when a row and a slot are free and the cache can hold its worst case
    beside what the admitted ones may still take; a block is taken when the step that writes it is
    planned.
    """

    def __init__(self, limits: Limits, *, debug: bool = False) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(limits.block_count)
        self.slots = SlotTable(limits.slot_count)
        self._debug = debug
        self._next_ticket = 0
        self._retired_ticket = -1
        self._unfinished = 0
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: dict[int, Sequence] = {}
        self._decode_rows: RowMap | None = None
        self._sequences: dict[int, Sequence] = {}
        self._promised = 0
        self._retiring: RetireQueue[Sequence] = RetireQueue()
        self._retired_keys: list[int] = []
        self._freed_blocks: list[int] = []

    # --- arrivals and departures, applied between two plans -----------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a request; the caller has checked that it can fit an empty cache."""
        self._sequences[sequence.key] = sequence
        self._waiting.append(sequence)
        self._unfinished += 1

    def abort(self, key: int) -> Commit | None:
        """End a request at once; rows of it in flight will be discarded."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.reason is not None:
            return None
        if sequence.slot < 0:
            self._waiting.remove(sequence)
            del self._sequences[key]
            sequence.reason = FinishReason.ABORT
            self._unfinished -= 1
            self._retired_keys.append(key)
        else:
            self._finish(sequence, FinishReason.ABORT)
            self._retire()
        return Commit(key, None, FinishReason.ABORT)

    @property
    def has_unfinished(self) -> bool:
        """Some request has not reached its end."""
        return self._unfinished > 0

    @property
    def waiting_count(self) -> int:
        """Requests that have not been admitted yet."""
        return len(self._waiting)

    # --- plan ---------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Decide the next step; None when no row can be launched."""
        number = self._next_ticket
        grants: list[BlockGrant] = []
        decode_rows = self._plan_decode(number, grants)
        if not self._prefilling and not self._waiting:
            prefills: list[PrefillChunk] = []
            admissions: list[Admission] = []
            rows = decode_rows
        else:
            prefills, admissions, rows = self._plan_prefill(number, decode_rows, grants)
        if not len(rows):
            return None
        self._next_ticket = number + 1
        return Plan(
            number, rows, len(decode_rows), tuple(grants), tuple(prefills), tuple(admissions)
        )

    def _plan_decode(self, number: int, grants: list[BlockGrant]) -> RowMap:
        """Advance every decoding sequence by one token; rows whose end is known stay out."""
        block_size = self.limits.block_size
        complete = []
        rows = self._decode_rows
        if rows is None:
            live = self._decoding.values()
            rows = self._decode_rows = RowMap(
                tuple(s.slot for s in live), tuple(s.epoch for s in live), tuple(self._decoding)
            )
        for sequence in self._decoding.values():
            position = sequence.kv_bound
            if position == len(sequence.blocks) * block_size:
                grants.append(self._grant(sequence))
            sequence.kv_bound = position + 1
            sequence.launched += 1
            sequence.last_ticket = number
            if sequence.launched == sequence.max_new:
                complete.append(sequence.key)
        for key in complete:
            del self._decoding[key]
            self._decode_rows = None
        return rows

    def _plan_prefill(
        self, number: int, decode_rows: RowMap, grants: list[BlockGrant]
    ) -> tuple[list[PrefillChunk], list[Admission], RowMap]:
        """Fill the token budget with whole chunks, oldest request first; admit while all fits."""
        limits = self.limits
        budget = limits.max_tokens - len(decode_rows)
        row = len(decode_rows)
        prefills: list[PrefillChunk] = []
        admissions: list[Admission] = []
        rows: list[Sequence] = []
        unfinished: deque[Sequence] = deque()
        running = len(self._decoding) + len(self._prefilling)
        while row < limits.max_requests:
            if self._prefilling:
                sequence = self._prefilling[0]
            elif running < limits.max_requests and self._waiting:
                sequence = self._waiting[0]
                if not self._can_admit(sequence):
                    break
            else:
                break
            start = sequence.prefilled
            length = min(limits.prefill_chunk_tokens, len(sequence.prompt) - start)
            if length > budget:
                break
            if self._prefilling:
                self._prefilling.popleft()
            else:
                admissions.append(self._admit(self._waiting.popleft()))
                running += 1
            end = start + length
            while len(sequence.blocks) * limits.block_size < end:
                grants.append(self._grant(sequence))
            last = end == len(sequence.prompt)
            prefills.append(
                PrefillChunk(row, sequence.slot, start, sequence.prompt[start:end], last)
            )
            sequence.prefilled = sequence.kv_bound = end
            sequence.last_ticket = number
            rows.append(sequence)
            if not last:
                unfinished.append(sequence)
            else:
                sequence.launched = 1
                if sequence.max_new > 1:
                    self._decoding[sequence.key] = sequence
                    self._decode_rows = None
                else:
                    running -= 1
            budget -= length
            row += 1
        unfinished.extend(self._prefilling)
        self._prefilling = unfinished
        if not rows:
            return prefills, admissions, decode_rows
        merged = RowMap(
            decode_rows.slots + tuple(s.slot for s in rows),
            decode_rows.epochs + tuple(s.epoch for s in rows),
            decode_rows.keys + tuple(s.key for s in rows),
        )
        return prefills, admissions, merged

    def _can_admit(self, sequence: Sequence) -> bool:
        need = sequence.worst_case_blocks(self.limits.block_size)
        return self.slots.free_count > 0 and self.allocator.free_count - self._promised >= need

    def _admit(self, sequence: Sequence) -> Admission:
        sequence.slot = slot = self.slots.take()
        sequence.epoch = self.slots.epochs[slot]
        self._promised += sequence.worst_case_blocks(self.limits.block_size)
        inverse_temperature, top_k, top_p, seed = sequence.sampling
        return Admission(
            slot,
            inverse_temperature,
            top_k,
            top_p,
            seed,
            len(sequence.prompt) + sequence.max_new,
            tuple(sorted(sequence.stop_ids)),
        )

    def _grant(self, sequence: Sequence) -> BlockGrant:
        block = self.allocator.allocate()
        self._promised -= 1
        sequence.blocks.append(block)
        return BlockGrant(sequence.slot, len(sequence.blocks) - 1, block)

    # --- commit -------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> list[Commit]:
        """Take the tokens of a launched plan, end requests, and retire the plan's ticket."""
        commits: list[Commit] = []
        epochs = self.slots.epochs
        rows = plan.rows
        first_prefill = plan.decode_rows
        for row, token in enumerate(result.tokens[: len(rows)]):
            if row >= first_prefill and not plan.samples(row):
                continue
            key = rows.keys[row]
            if rows.epochs[row] != epochs[rows.slots[row]]:
                commits.append(Commit(key, token, None, discarded=True))
                continue
            sequence = self._sequences[key]
            sequence.committed += 1
            reason = None
            if token in sequence.stop_ids:
                reason = FinishReason.STOP
            elif sequence.committed == sequence.max_new:
                reason = FinishReason.LENGTH
            if self._debug:
                self._check_device_agrees(key, reason, result.live[row], result.ended[row])
            if reason is not None:
                self._finish(sequence, reason)
            commits.append(Commit(key, token, reason))
        self._retired_ticket = plan.number
        self._retire()
        return commits

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.reason = reason
        self._unfinished -= 1
        self.slots.end_epoch(sequence.slot)
        if self._decoding.pop(sequence.key, None) is not None:
            self._decode_rows = None
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self._retiring.push(sequence.last_ticket, sequence)

    def _retire(self) -> None:
        """Give back what no forward in flight can touch any more."""
        for sequence in self._retiring.retire(self._retired_ticket):
            worst_case = sequence.worst_case_blocks(self.limits.block_size)
            self._promised -= worst_case - len(sequence.blocks)
            self._freed_blocks += self.allocator.release(sequence.blocks)
            self.slots.release(sequence.slot)
            del self._sequences[sequence.key]
            self._retired_keys.append(sequence.key)

    def take_retired(self) -> tuple[list[int], list[int]]:
        """Keys of the requests no forward can touch any more, and the blocks freed with them,
        since the last call."""
        keys, self._retired_keys = self._retired_keys, []
        blocks, self._freed_blocks = self._freed_blocks, []
        return keys, blocks

    # --- checks -------------------------------------------------------------------------------

    @staticmethod
    def _check_device_agrees(key: int, reason: FinishReason | None, live: int, ended: int) -> None:
        if not live or bool(ended) != (reason is not None):
            raise IntegrityError(
                f"request {key}: the host says {reason}, the device live={live} ended={ended}"
            )

    def check_idle(self) -> None:
        """With nothing in flight and no request left, everything must have come back.

        Raises:
            IntegrityError: a block, a slot, a promise or a request is lost.
        """
        if self._sequences or len(self._retiring) or self._promised:
            raise IntegrityError(
                f"idle with requests {list(self._sequences)}, {len(self._retiring)} retiring, "
                f"{self._promised} blocks promised"
            )
        self.allocator.check(())
        self.slots.check([])

    def check(self) -> None:
        """Every block and slot is held by exactly those who say so."""
        holders = [s for s in self._sequences.values() if s.slot >= 0]
        self.allocator.check(s.blocks for s in holders)
        self.slots.check([s.slot for s in holders])
