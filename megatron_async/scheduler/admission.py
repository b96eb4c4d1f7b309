"""Admits prompts, and chooses which chunks run next to the rows that decode."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatron_async.cache.cache_salt import salted_root
from megatron_async.cache.prefix_cache import LONG_ROOT, ROOT
from megatron_async.scheduler.events import Change, Event
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.micro_batches import MicroBatches
from megatron_async.scheduler.preemption import Preemption
from megatron_async.scheduler.request_state import Sequence, State
from megatron_async.scheduler.request_table import RequestTable, row_map
from megatron_async.step.extras import SlotExtras
from megatron_async.step.plan import Admission, BlockAssignment, PrefillChunk, RowMap, StateCopy


class PromptWork(NamedTuple):
    """What prompts add to a step: see :class:`~megatron_async.step.plan.Plan`."""

    assignments: list[BlockAssignment]
    prefills: list[PrefillChunk]
    admissions: list[Admission]
    restores: list[StateCopy]
    snapshots: list[StateCopy]


class PromptPlanner:
    """Fills a step with prefill chunks. A request is admitted when a row, a slot and the blocks of
    its prompt are free, with spare blocks for each running request; the head of the queue is never
    overtaken, unless it is a long prompt that waits for the end of others (``Limits``).

    Of a model with recurrent layers chunks also end where a snapshot of their state is wanted: at
    the last full block that an equal prompt can share, and at the last block of a prefix that was
    computed before and has no snapshot, since it is asked for a second time. Snapshots where other
    chunks end are taken while there is room."""

    def __init__(
        self,
        table: RequestTable,
        preemption: Preemption,
        limits: Limits,
        micro_batches: MicroBatches,
    ) -> None:
        self._table = table
        self._micro_batches = micro_batches
        self._preemption = preemption
        self._limits = limits
        self._failed_attempt: tuple[int, int, int, int] | None = None

    def plan(
        self,
        number: int,
        decode_rows: RowMap,
        work: PromptWork,
        micro_batch: int = 0,
    ) -> RowMap:
        """Fill the token budget of step ``number`` with whole chunks, prompts under way first, of
        its micro-batch and of requests that join it. Appends to the lists of ``work``, and returns
        the rows with those of the chunks."""
        limits, table = self._limits, self._table
        budget = limits.max_tokens - (sum(decode_rows.windows) or len(decode_rows.slots))
        row, long = len(decode_rows.slots), 0
        has_classes = limits.long_prompt_tokens is not None
        launched: list[Sequence] = []
        under_way: deque[Sequence] = deque()
        for sequence in table.prefilling:
            if sequence.micro_batch == micro_batch:
                under_way.append(sequence)
        while row < limits.max_requests:
            if under_way:
                sequence = under_way.popleft()
                if has_classes and long >= limits.long_prompts and self._is_long(sequence):
                    continue
            else:
                if limits.micro_batches > 1 and not self._micro_batches.admits(micro_batch):
                    break
                admitted = self._admit_next(number, budget, work, long >= limits.long_prompts)
                if admitted is None:
                    break
                sequence = admitted
                sequence.micro_batch = micro_batch
            start = sequence.prefilled
            end = self._chunk_end(sequence)
            length = end - start
            if length > budget:
                break
            if has_classes:
                long += self._is_long(sequence)
            last = end == sequence.prefill_end
            targets: tuple[int, ...] = ()
            layers: tuple[int, ...] = ()
            if end > sequence.prompt_log_probs:
                targets = tuple(sequence.tokens[start + 1 : min(end + 1, sequence.prompt_length)])
                layers = sequence.hidden_layers
            tokens = tuple(sequence.tokens[start:end])
            chunk = PrefillChunk(row, sequence.slot, start, tokens, last, targets, layers)
            work.prefills.append(chunk)
            sequence.prefilled = sequence.kv_bound = end
            sequence.last_ticket = number
            launched.append(sequence)
            if last:
                sequence.launched += 1
                table.enter_decoding(sequence)
            budget -= length
            row += 1
        # Known from here on: a block written by this step may be shared from the next one.
        for sequence in launched:
            table.register_blocks(sequence, sequence.prefilled)
            if limits.state_snapshots:
                self._take_snapshot(sequence, work.snapshots)
        added = row_map(launched)
        windows = decode_rows.windows
        return RowMap(
            decode_rows.slots + added.slots,
            decode_rows.epochs + added.epochs,
            decode_rows.keys + added.keys,
            windows + (1,) * len(launched) if windows else (),
        )

    def _is_long(self, sequence: Sequence) -> bool:
        """Whether much of a prompt under way is left."""
        most = self._limits.long_prompt_tokens
        return most is not None and sequence.prefill_end - sequence.prefilled > most

    def _chunk_end(self, sequence: Sequence) -> int:
        """Where the next chunk of a prompt ends."""
        start = sequence.prefilled
        end = min(start + self._limits.prefill_chunk_tokens, sequence.prefill_end)
        if self._limits.state_snapshots:
            wanted = (p for p in self._snapshots_wanted(sequence) if start < p < end)
            return min(wanted, default=end)
        return end

    def _snapshots_wanted(self, sequence: Sequence) -> tuple[int, int]:
        """Lengths of the prompt, whole blocks, at which snapshots are wanted: see the class."""
        size = self._limits.block_size
        return sequence.branch, (sequence.prefill_end - 1) // size * size

    def _take_snapshot(self, sequence: Sequence, copies: list[StateCopy]) -> None:
        """Keep the state behind the chunk just planned where whole blocks end, if there is none
        yet: where it is wanted, or while there is room."""
        snapshots, end = self._table.prefixes.snapshots, sequence.prefilled
        is_registered = sequence.registered * self._limits.block_size == end
        if snapshots is None or not is_registered or sequence.node in snapshots:
            return
        is_wanted = end == sequence.prefill_end or end in self._snapshots_wanted(sequence)
        place = snapshots.take(sequence.node, is_wanted=is_wanted)
        if place is not None:
            copies.append(StateCopy(sequence.slot, place, end))

    def _admit_next(
        self, number: int, budget: int, work: PromptWork, passes_long: bool
    ) -> Sequence | None:
        """Admit the head of the queue if everything it needs is there; ``passes_long``: the first
        that is not long, if the head is."""
        limits, table = self._limits, self._table
        allocator = table.allocator
        sequence = table.waiting.head()
        if passes_long and sequence is not None and table.waiting.is_long(sequence):
            sequence = table.waiting.head(long=False)
        running = table.running
        if sequence is None or table.stalled or running >= limits.max_requests:
            return None
        if sequence.fork_of is not None and self._is_being_prefilled(sequence.fork_of, number):
            return None
        # Looking a long prompt up in the prefix cache costs time: not again while nothing changes.
        attempt = (sequence.key, allocator.free_count, table.slots.free_count, running)
        if running and attempt == self._failed_attempt:
            return None
        self._failed_attempt = attempt
        # The last token is always computed: its logits are what is sampled next. So are those whose
        # logits give wanted log-probabilities.
        limit = min(len(sequence.tokens) - 1, sequence.prompt_log_probs)
        is_long = len(sequence.tokens) > (limits.rotation_limit or len(sequence.tokens))
        root = LONG_ROOT if is_long else ROOT
        if sequence.cache_salt is not None:
            root = salted_root(sequence.cache_salt, is_long=is_long)
        shared, node = table.prefixes.match(sequence.tokens, limit, root)
        if limits.state_snapshots is not None:
            sequence.branch = len(shared) * limits.block_size
            shared, node = table.prefixes.until_snapshot(shared, root)
        total = -(-len(sequence.tokens) // limits.block_size)
        need = total - len(shared)
        for block in shared:
            need += not allocator.references(block)
        # Leave each running request the blocks of its next row.
        spare = running * limits.blocks_per_row
        if not table.slots.free_count or allocator.free_count < need + spare:
            if not running and not table.retiring.heap:
                # Nothing runs and the head does not fit: paused requests are in its way.
                short = max(need - allocator.free_count, 1)
                self._preemption.relieve(short, sequence.priority_key)
            return None
        cached = len(shared) * limits.block_size
        length = min(limits.prefill_chunk_tokens, len(sequence.tokens) - cached)
        if length > budget or len(work.assignments) + total > limits.max_assignments:
            self._failed_attempt = None  # what is short is this step's, not the cache's
            return None
        self._failed_attempt = None
        self._enter(sequence, shared, node)
        sequence.long_rotation = is_long
        slot = sequence.slot
        assigned = work.assignments
        for index, block in enumerate(shared):
            assigned.append(BlockAssignment(slot, index, block))
        if shared and table.prefixes.snapshots is not None:
            work.restores.append(StateCopy(slot, table.prefixes.snapshots.use(node), cached))
        while len(sequence.blocks) < total:
            assigned.append(table.assign_block(sequence))
        replayed = len(sequence.tokens) - cached if sequence.evictions else 0
        table.record(Event(sequence.key, Change.ADMIT, cached, replayed))
        values = (
            cached, sequence.max_total, int(is_long), sequence.device_stop_ids, *sequence.values,
        )  # fmt: skip
        extras = None
        if sequence.extras is not None:
            extras = SlotExtras(
                sequence.extras, sequence.prompt_length, tuple(sequence.tokens), sequence.automaton
            )
        tokens = tuple(sequence.tokens) if limits.admit_tokens else ()
        work.admissions.append(Admission(slot, values, extras, tokens))
        return sequence

    def _is_being_prefilled(self, key: int, number: int) -> bool:
        """The prompt of a request is under way, or its last chunk is in step ``number``, whose
        blocks are not known to the prefix cache yet."""
        sequence = self._table.sequences.get(key)
        if sequence is None:
            return False
        just_launched = sequence.last_ticket == number and sequence.launched == 1
        return sequence.state is State.PREFILLING or just_launched

    def _enter(self, sequence: Sequence, shared: list[int], node: int) -> None:
        """Take a slot and the shared blocks."""
        table = self._table
        for block in shared:
            table.allocator.share(block)
        sequence.slot = table.slots.take()
        sequence.epoch = table.slots.epochs[sequence.slot]
        sequence.blocks = list(shared)
        sequence.node, sequence.registered = node, len(shared)
        sequence.prefilled = sequence.kv_bound = len(shared) * self._limits.block_size
        sequence.prefill_end = len(sequence.tokens)
        if sequence.extras is not None:
            table.enter_extras(sequence)
            if self._limits.needs_guesses:
                sequence.await_guesses()
        table.enter_prefilling(sequence)
