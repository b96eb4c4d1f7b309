"""Requests between arrival and retirement: their states, and who holds which slot and blocks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.cache.prefix_cache import PrefixCache
from megatron_async.cache.retire_queue import RetireQueue
from megatron_async.errors import IntegrityError
from megatron_async.request import FinishReason
from megatron_async.scheduler.events import Change, Event
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.preemption import EVICTABLE
from megatron_async.scheduler.queue import WaitingQueue
from megatron_async.scheduler.request_state import Sequence, State
from megatron_async.scheduler.slots import SlotTable
from megatron_async.step.plan import RowMap

NEVER_REGISTER = 1 << 62
"""More blocks than any sequence has: those of this one stay out of the prefix cache."""


class Holding(NamedTuple):
    """What a sequence gave up, to be freed when its last ticket has retired."""

    sequence: Sequence
    slot: int
    blocks: list[int]


class Lifecycle:
    """All requests by state. A request is in the collection of its state, and in no other.

    Plans and commits, which move requests on, are the :class:`Scheduler`'s.
    """

    def __init__(self, limits: Limits, *, debug: bool = False) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(limits.block_count)
        self.prefixes = PrefixCache(
            self.allocator, limits.block_size, enabled=limits.enable_prefix_caching
        )
        self.slots = SlotTable(limits.slot_count)
        self._debug = debug
        self._next_ticket = 0
        self._retired_ticket = -1
        self._unfinished = 0
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: dict[int, Sequence] = {}
        self._stalled: dict[int, Sequence] = {}
        self._decode_rows: RowMap | None = None
        self._failed_attempt: tuple[int, int, int, int] | None = None
        self._retiring: RetireQueue[Holding] = RetireQueue()
        self._retired_keys: list[int] = []
        self._freed_blocks: list[int] = []
        self._events: list[Event] = []

    # --- what users do, applied between two plans ---------------------------------------------

    def add(self, sequence: Sequence, priority: int = 0) -> None:
        """Queue a request; the caller has checked that it can fit an empty cache.

        A lower ``priority`` goes first. One step of it is worth ``priority_step`` tickets of
        waiting, so what overtakes a request is bounded.
        """
        sequence.rank = (
            self._next_ticket + priority * self.limits.priority_step,
            sequence.key,
        )
        self._sequences[sequence.key] = sequence
        self._waiting.add(sequence)
        self._unfinished += 1

    def abort(self, key: int) -> bool:
        """End a request at once; rows of it in flight will be discarded."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state is State.FINISHED:
            return False
        self._finish(sequence, FinishReason.ABORT)
        self._retire()
        return True

    def pause(self, key: int) -> bool:
        """Leave the request out of all row maps to come; what is in flight is committed."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state is State.FINISHED or sequence.held:
            return False
        sequence.held = True
        if sequence.state in EVICTABLE:
            self._leave(sequence, State.HELD)
        self._events.append(Event(key, Change.PAUSE))
        return True

    def resume(self, key: int) -> bool:
        """Let a paused request go on."""
        sequence = self._sequences.get(key)
        if sequence is None or not sequence.held or sequence.state is State.FINISHED:
            return False
        sequence.held = False
        if sequence.state is State.HELD:
            # Its row may have been given to another: it waits for one like those short of a block.
            self._leave(sequence, State.STALLED)
            self._stalled[key] = sequence
        self._events.append(Event(key, Change.RESUME))
        return True

    def evict(self, key: int) -> bool:
        """Give up the request's slot and blocks; it is computed again when it is admitted anew."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state not in EVICTABLE:
            return False
        self._evict(sequence)
        return True

    def evict_all(self) -> None:
        """Evict whatever can be: what it holds was computed by weights that are gone."""
        for sequence in list(self._sequences.values()):
            if sequence.state in EVICTABLE:
                self._evict(sequence)

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes; requests that keep their blocks register none of them."""
        self.prefixes.clear()
        for sequence in self._sequences.values():
            if sequence.blocks:
                sequence.registered = NEVER_REGISTER

    @property
    def has_unfinished(self) -> bool:
        """Some request has not reached its end."""
        return self._unfinished > 0

    @property
    def waiting_count(self) -> int:
        """Requests without slot and blocks, evicted ones included."""
        return len(self._waiting)

    @property
    def stalled_count(self) -> int:
        """Requests that wait for a block."""
        return len(self._stalled)

    # --- ends -------

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.reason = reason
        self._unfinished -= 1
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            del self._sequences[sequence.key]
            self._retired_keys.append(sequence.key)
        else:
            self.slots.end_epoch(sequence.slot)
        if sequence.state in EVICTABLE or sequence.state is State.ENDING:
            self._leave(sequence, State.FINISHED)
            self._give_up(sequence)
        sequence.state = State.FINISHED

    def _evict(self, sequence: Sequence) -> None:
        self._leave(sequence, State.EVICTING)
        sequence.evictions += 1
        self._events.append(Event(sequence.key, Change.EVICT))
        self._give_up(sequence)
        self._retire()

    def _give_up(self, sequence: Sequence) -> None:
        blocks, sequence.blocks = sequence.blocks, []
        self._retiring.push(sequence.last_ticket, Holding(sequence, sequence.slot, blocks))

    def _retire(self) -> None:
        """Give back what no forward in flight can touch any more."""
        for sequence, slot, blocks in self._retiring.retire(self._retired_ticket):
            # Deeper blocks first: of a kept prefix the end is to be reused before the beginning.
            self._freed_blocks += self.allocator.release(reversed(blocks))
            self.slots.end_epoch(slot)
            self.slots.release(slot)
            if sequence.state is State.EVICTING:
                sequence.forget_launches()
                self._waiting.add(sequence)
            else:
                del self._sequences[sequence.key]
                self._retired_keys.append(sequence.key)

    # --- states -------------------------------------------------------------------------------

    def _enter_decoding(self, sequence: Sequence) -> None:
        """Decode from the next step on, or wait for the end when all rows are launched."""
        self._leave(sequence, State.ENDING)
        if sequence.launched < sequence.max_new:
            sequence.state = State.DECODING
            self._decoding[sequence.key] = sequence
            self._decode_rows = None

    def _leave(self, sequence: Sequence, state: State) -> None:
        """Take the sequence out of the collection of its state, and enter ``state``."""
        if sequence.state is State.DECODING:
            del self._decoding[sequence.key]
            self._decode_rows = None
        elif sequence.state is State.STALLED:
            del self._stalled[sequence.key]
        elif sequence.state is State.PREFILLING:
            self._prefilling.remove(sequence)
        sequence.state = state

    # --- what the engine asks -----------------------------------------------------------------

    def take_retired(self) -> tuple[list[int], list[int]]:
        """Keys of the requests no forward can touch any more, and the blocks that became free
        with others, since the last call."""
        keys, self._retired_keys = self._retired_keys, []
        blocks, self._freed_blocks = self._freed_blocks, []
        return keys, blocks

    def take_events(self) -> list[Event]:
        """What happened to requests since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- checks -------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """With nothing in flight and no request left, everything must have come back.

        Raises:
            IntegrityError: a block, a slot or a request is lost.
        """
        if self._sequences or len(self._retiring):
            raise IntegrityError(
                f"idle with requests {list(self._sequences)}, {len(self._retiring)} retiring"
            )
        self.check()

    def check(self) -> None:
        """Every block and slot is held by exactly those who say so."""
        holders = [s for s in self._sequences.values() if s.state in EVICTABLE | {State.ENDING}]
        blocks = [s.blocks for s in holders] + [h.blocks for h in self._retiring]
        self.allocator.check(blocks)
        self.slots.check([s.slot for s in holders] + [h.slot for h in self._retiring])
