"""All requests by state, and which request holds which slot and blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.cache.prefix_cache import PrefixCache
from megatron_async.cache.retire_queue import RetireQueue
from megatron_async.cache.state_snapshots import StateSnapshots
from megatron_async.errors import IntegrityError
from megatron_async.request.request import FinishReason
from megatron_async.scheduler.events import Change, Event
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.queue import WaitingQueue
from megatron_async.scheduler.request_state import EVICTABLE, HOLDING, Sequence, State
from megatron_async.scheduler.slots import SlotTable
from megatron_async.step.extras import SlotAutomaton
from megatron_async.step.plan import BlockAssignment, RowMap, SlotUpdate, StateCopy
from megatron_async.step.slot_fields import Values

if TYPE_CHECKING:
    from megatron_async.cache.automaton_space import AutomatonSpace

NEVER_REGISTER = 1 << 62
"""More blocks than any sequence has: those of this one stay out of the prefix cache."""


class Holding(NamedTuple):
    """What a sequence gave up, to be freed when its last ticket has retired."""

    sequence: Sequence
    slot: int
    blocks: list[int]


class RequestTable:
    """Requests between arrival and retirement. Each is in the collection of its state, and in no
    other; only this class moves them.

    Attributes:
        decoding: by micro-batch the sequences that have a row in each of its steps, by key.
        control: what the next launch brings to S, by slot.
        unfinished: requests that have not reached their end.
        held: those of them that the user has paused.
        extended: sequences with extras that hold a slot.
        guided: those of them whose S needs all tokens before, on the host.
        automata: states of the pool of token automata; None before the first.
        has_news: :meth:`take_events` or :meth:`take_retired` have something to give.
        row_maps: by micro-batch and window the rows of its decoding sequences, in their order,
            while they are the same.
    """

    def __init__(self, limits: Limits) -> None:
        self.allocator = BlockAllocator(limits.block_count)
        snapshots = None
        if limits.state_snapshots is not None:
            snapshots = StateSnapshots(limits.state_snapshots)
        self.prefixes = PrefixCache(
            self.allocator,
            limits.block_size,
            enabled=limits.enable_prefix_caching,
            snapshots=snapshots,
        )
        self.slots = SlotTable(limits.slot_count)
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue(limits.long_prompt_tokens)
        self.prefilling: deque[Sequence] = deque()
        self.decoding: list[dict[int, Sequence]] = [{} for _ in range(limits.micro_batches)]
        self.stalled: dict[int, Sequence] = {}
        self.retiring: RetireQueue[Holding] = RetireQueue()
        self.control: dict[int, SlotUpdate] = {}
        self.unfinished = 0
        self.held = 0
        self.extended = 0
        self.guided = 0
        self.automata: AutomatonSpace | None = None
        self.has_news = False
        self.retired_ticket = -1
        self._block_size = limits.block_size
        self.row_maps: dict[tuple[int, int], RowMap] = {}
        self._events: list[Event] = []
        self._retired_keys: list[int] = []
        self._freed_blocks: list[int] = []
        self._freed_slots: list[int] = []

    # --- arrivals and ends --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.sequences[sequence.key] = sequence
        self.waiting.add(sequence)
        self.unfinished += 1

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request; rows of it that are in flight are dead from now on."""
        sequence.reason = reason
        self.unfinished -= 1
        self.held -= sequence.held
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            del self.sequences[sequence.key]
            self._retired_keys.append(sequence.key)
            self.has_news = True
        else:
            self.slots.end_epoch(sequence.slot)
        if sequence.state in HOLDING:
            self.leave(sequence, State.FINISHED)
            self._give_up(sequence)
        sequence.state = State.FINISHED

    def finish_by_host(
        self, sequence: Sequence, reason: FinishReason, committed: int | None = None
    ) -> None:
        """:meth:`finish` for a reason that the device cannot see: control brings it.

        Args:
            committed: the ticket that is being taken; None for the last retired.
        """
        committed = self.retired_ticket if committed is None else committed
        sequence.ended_by_host = True
        if sequence.slot >= 0 and sequence.last_ticket > committed:
            self.control[sequence.slot] = SlotUpdate(sequence.slot, True, None)
        self.finish(sequence, reason)
        self.retire(self.retired_ticket)

    def update_values(self, sequence: Sequence, values: Values, window: int) -> None:
        """New values of the REQUEST slot fields, and another window, from the next launch on."""
        sequence.take_window(window)
        self.row_maps.clear()
        sequence.values = values
        if sequence.slot >= 0:  # one that is evicted may have rows in flight
            self.control[sequence.slot] = SlotUpdate(sequence.slot, False, values)

    def evict(self, sequence: Sequence) -> None:
        """Give up slot and blocks; it is computed again when it is admitted anew."""
        self.leave(sequence, State.EVICTING)
        sequence.evictions += 1
        self.record(Event(sequence.key, Change.EVICT))
        self._give_up(sequence)
        self.retire(self.retired_ticket)

    def _give_up(self, sequence: Sequence) -> None:
        if sequence.snapshot is not None:
            self._give_snapshot_back(sequence)
        blocks, sequence.blocks, sequence.freed = sequence.held_blocks, [], 0
        self.retiring.push(sequence.last_ticket, Holding(sequence, sequence.slot, blocks))

    def retire(self, ticket: int) -> None:
        """Give back what no forward after ``ticket`` can touch any more."""
        self.retired_ticket = ticket
        if not self.retiring.heap:
            return
        self.has_news = True
        for sequence, slot, blocks in self.retiring.retire(ticket):
            # Deeper blocks first: of a kept prefix the end is to be reused before the beginning.
            self._freed_blocks += self.allocator.release(reversed(blocks))
            self.slots.end_epoch(slot)
            self.slots.release(slot)
            self._freed_slots.append(slot)
            if sequence.extras is not None:
                self._leave_extras(sequence)
            if sequence.state is State.EVICTING:
                sequence.forget_launches()
                self.waiting.add(sequence)
            else:
                del self.sequences[sequence.key]
                self._retired_keys.append(sequence.key)

    def enter_extras(self, sequence: Sequence) -> None:
        """A sequence with extras has taken a slot: an automaton guides it where its grammar has one
        and the pool has room."""
        self.extended += 1
        grammar, space = sequence.grammar, self.automata
        if grammar is not None and space is not None:
            place = space.take(grammar.number, grammar.states)
            if place is not None:
                stop_ids = tuple(sorted(sequence.stop_ids))
                sequence.automaton = SlotAutomaton(grammar, *place, stop_ids)
        self.guided += sequence.waits

    def _leave_extras(self, sequence: Sequence) -> None:
        """The last ticket that names the slot of a sequence with extras has retired."""
        self.extended -= 1
        self.guided -= sequence.waits
        if sequence.automaton is not None:
            assert self.automata is not None
            self.automata.give_back(sequence.automaton.table.number)
            sequence.automaton = None

    # --- states -------------------------------------------------------------------------------

    def hold(self, sequence: Sequence) -> None:
        """The user pauses an unfinished request."""
        sequence.held = True
        self.held += 1

    def let_go_on(self, sequence: Sequence) -> None:
        """The user lets a paused request go on."""
        sequence.held = False
        self.held -= 1

    def enter_prefilling(self, sequence: Sequence) -> None:
        """Run its prompt, from where it stands."""
        self.leave(sequence, State.PREFILLING)
        self.prefilling.append(sequence)

    def enter_decoding(self, sequence: Sequence) -> None:
        """Decode from the next step on, or wait for the end when all rows are launched."""
        self.leave(sequence, State.ENDING)
        if sequence.launched < sequence.max_new:
            sequence.state = State.DECODING
            self.decoding[sequence.micro_batch][sequence.key] = sequence
            self.row_maps.clear()

    def stall(self, sequence: Sequence) -> None:
        """Leave it out of the row map until there are a row and a block for it."""
        self.leave(sequence, State.STALLED)
        self.stalled[sequence.key] = sequence

    def leave(self, sequence: Sequence, state: State) -> None:
        """Take the sequence out of the collection of its state, and enter ``state``."""
        if sequence.state is State.DECODING:
            del self.decoding[sequence.micro_batch][sequence.key]
            self.row_maps.clear()
        elif sequence.state is State.STALLED:
            del self.stalled[sequence.key]
        elif sequence.state is State.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = state

    def move(self, sequence: Sequence, micro_batch: int) -> None:
        """Have a decoding sequence decode in another micro-batch."""
        del self.decoding[sequence.micro_batch][sequence.key]
        self.decoding[micro_batch][sequence.key] = sequence
        sequence.micro_batch = micro_batch
        self.row_maps.clear()

    @property
    def running(self) -> int:
        """Sequences that prefill or decode."""
        return sum(map(len, self.decoding)) + len(self.prefilling)

    # --- blocks -------------------------------------------------------------------------------

    def assign_block(self, sequence: Sequence) -> BlockAssignment:
        """Take a free block for the sequence."""
        block = self.allocator.allocate()
        sequence.blocks.append(block)
        return BlockAssignment(sequence.slot, len(sequence.blocks) - 1, block)

    def register_blocks(self, sequence: Sequence, written: int) -> None:
        """Make the full blocks among the first ``written`` tokens known to the prefix cache."""
        if not self.prefixes.enabled or not sequence.blocks:
            return
        size = self._block_size
        while (sequence.registered + 1) * size <= written:
            start = sequence.registered * size
            sequence.node = self.prefixes.insert(
                sequence.node,
                tuple(sequence.tokens[start : start + size]),
                sequence.blocks[sequence.registered],
            )
            sequence.registered += 1
            if sequence.snapshot is not None and sequence.snapshot[1] == start + size:
                self._attach_snapshot(sequence, sequence.snapshot[0])

    def reserve_snapshot(self, sequence: Sequence) -> StateCopy | None:
        """The copy of the state that a decode row just planned will leave at the end of a block, if
        there is room. It replaces the request's last one, if nobody has used that; its node is
        known when the row is committed, and till then there is no other."""
        snapshots = self.prefixes.snapshots
        if snapshots is None or sequence.snapshot or sequence.registered >= NEVER_REGISTER:
            return None
        snapshots.drop_spare(sequence.snapshot_node)
        place = snapshots.reserve()
        if place is None:
            return None
        sequence.snapshot = place, sequence.kv_bound
        return StateCopy(sequence.slot, place, sequence.kv_bound)

    def _attach_snapshot(self, sequence: Sequence, place: int) -> None:
        assert self.prefixes.snapshots is not None
        self.prefixes.snapshots.attach(place, sequence.node)
        sequence.snapshot, sequence.snapshot_node = None, sequence.node

    def _give_snapshot_back(self, sequence: Sequence) -> None:
        if sequence.snapshot is not None:
            assert self.prefixes.snapshots is not None
            self.prefixes.snapshots.give_back(sequence.snapshot[0])
            sequence.snapshot = None

    def free_behind(self, sequence: Sequence, first: int) -> None:
        """Give back the blocks of tokens before ``first``, which no forward that is in flight or to
        come reads."""
        count = min(first // self._block_size, len(sequence.blocks))
        if self.prefixes.enabled:
            count = min(count, sequence.registered)
        if count > sequence.freed:
            blocks = sequence.blocks[sequence.freed : count]
            sequence.freed = count
            self._freed_blocks += self.allocator.release(reversed(blocks))
            self.has_news = True

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes; requests that keep their blocks register none of them."""
        self.prefixes.clear()
        for sequence in self.sequences.values():
            if sequence.blocks:
                sequence.registered = NEVER_REGISTER
                self._give_snapshot_back(sequence)

    # --- what is reported ---------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Something happened to a request."""
        self._events.append(event)
        self.has_news = True

    def take_events(self) -> list[Event]:
        """What happened to requests since the last call, in order; :attr:`has_news` is over."""
        events, self._events = self._events, []
        self.has_news = False
        return events

    def take_retired(self) -> tuple[list[int], list[int], list[int]]:
        """Keys of the requests that no forward can touch any more, and the blocks and slots that
        became free with others, since the last call."""
        keys, self._retired_keys = self._retired_keys, []
        blocks, self._freed_blocks = self._freed_blocks, []
        slots, self._freed_slots = self._freed_slots, []
        return keys, blocks, slots

    def check(self) -> None:
        """Check that every block and slot is held by exactly those that say so.

        Raises:
            IntegrityError: one is lost, or held twice.
        """
        unfinished = [s for s in self.sequences.values() if s.state is not State.FINISHED]
        counted = len(unfinished), sum([s.held for s in unfinished])
        if counted != (self.unfinished, self.held):
            raise IntegrityError(
                f"{counted} requests are unfinished and held, counted {self.unfinished, self.held}"
            )
        holders = [s for s in unfinished if s.state in HOLDING]
        retiring = [holding for _, _, holding in self.retiring.heap]
        self.allocator.check([s.held_blocks for s in holders] + [h.blocks for h in retiring])
        self.slots.check([s.slot for s in holders] + [h.slot for h in retiring])
        self.prefixes.check()
        if self.automata is not None:
            held = [s.automaton for s in [*holders, *(h.sequence for h in retiring)]]
            self.automata.check(Counter(each.table.number for each in held if each is not None))

    def check_idle(self) -> None:
        """Check that all has come back, with nothing in flight and no request left.

        Raises:
            IntegrityError: a block, a slot or a request is lost.
        """
        if self.sequences or self.retiring.heap:
            raise IntegrityError(
                f"idle with requests {list(self.sequences)}, {len(self.retiring.heap)} retiring"
            )
        self.check()
        if self.prefixes.snapshots is not None:
            self.prefixes.snapshots.check_idle()

    @property
    def keeps_anything(self) -> bool:
        """A request that goes on has keys and values, or a recurrent state."""
        return any(sequence.state in EVICTABLE for sequence in self.sequences.values())

    def evictable(self) -> list[Sequence]:
        """Requests that may be evicted."""
        return [s for s in self.sequences.values() if s.state in EVICTABLE]


def row_map(sequences: Iterable[Sequence], window: int = 1) -> RowMap:
    """Rows for ``sequences``, in their order, in a step of this window."""
    listed = list(sequences)
    return RowMap(
        tuple([s.slot for s in listed]),
        tuple([s.epoch for s in listed]),
        tuple([s.key for s in listed]),
        tuple([min(window, s.window) for s in listed]) if window > 1 else (),
    )
