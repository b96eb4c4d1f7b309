"""Chooses what gives way when KV blocks run short: rows that stall, and requests that are
evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_async.scheduler.events import Change, Event
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.request_state import Sequence, State
from megatron_async.scheduler.request_table import RequestTable


class Preemption:
    """Stalls and evictions, by the requests' priority keys alone."""

    def __init__(self, table: RequestTable, limits: Limits) -> None:
        self._table = table
        self._limits = limits

    def unstall(self, micro_batch: int) -> None:
        """Let those of a micro-batch that were left out compete for rows and blocks again, lowest
        key first."""
        table = self._table
        room = self._limits.max_requests - table.running
        own = (s for s in table.stalled.values() if s.micro_batch == micro_batch)
        stalled = sorted(own, key=lambda s: s.priority_key)
        for sequence in stalled[: max(room, 0)]:
            if sequence.prefilled < sequence.prefill_end:
                table.enter_prefilling(sequence)
            else:
                table.enter_decoding(sequence)

    def stall_short(self, needy: dict[Sequence, int], stalled_before: set[int]) -> list[Sequence]:
        """Return those of ``needy``, each with the blocks it needs, that get them. Lowest key
        first; from the first one on that finds too few they stall, and the highest keys may be
        evicted."""
        table = self._table
        ordered = sorted(needy, key=lambda s: s.priority_key)
        free = table.allocator.free_count
        served = 0
        for sequence in ordered:
            free -= needy[sequence]
            if free < 0:
                break
            served += 1
        short = ordered[served:]
        for sequence in short:
            table.stall(sequence)
            if sequence.key not in stalled_before:
                table.record(Event(sequence.key, Change.STALL))
        self.relieve(sum(needy[s] for s in short), short[0].priority_key)
        if self._limits.paused_block_count is not None:
            self._evict_beyond(self._limits.paused_block_count)
        return [s for s in ordered[:served] if s.state is State.DECODING]

    def relieve(self, need: int, beneficiary: tuple[int, int]) -> None:
        """Evict until the blocks that are coming back suffice."""
        table = self._table
        coming = sum(self._private_blocks(h.blocks) for h in table.retiring)
        coming += sum(
            self._private_blocks(s.held_blocks)
            for s in table.sequences.values()
            if s.state is State.ENDING
        )
        for victim in choose_victims(
            table.evictable(),
            need - coming,
            beneficiary,
            lambda s: self._private_blocks(s.held_blocks),
        ):
            table.evict(victim)

    def _evict_beyond(self, budget: int) -> None:
        """Evict the highest keys of those that stall, so that they keep at most ``budget`` blocks;
        the lowest key of all requests never gives way, so it makes progress."""
        table = self._table
        running = [s for s in table.sequences.values() if s.state is not State.FINISHED]
        first = min(s.priority_key for s in running)
        kept = 0
        for sequence in sorted(table.stalled.values(), key=lambda s: s.priority_key):
            kept += len(sequence.held_blocks)
            if kept > budget and sequence.priority_key > first:
                kept -= len(sequence.held_blocks)
                table.evict(sequence)

    def _private_blocks(self, blocks: list[int]) -> int:
        references = self._table.allocator.references
        return sum(references(block) == 1 for block in blocks)


def choose_victims(
    evictable: Iterable[Sequence],
    deficit: int,
    beneficiary: tuple[int, int],
    private_blocks: Callable[[Sequence], int],
) -> list[Sequence]:
    """Sequences to evict so that ``deficit`` blocks come free for the sequence with the priority
    key ``beneficiary``.

    Those that the user has paused go first, then the highest keys: lowest priority, youngest.
    Nobody with a lower key than the beneficiary gives way unless paused, so the lowest key of all
    always gets what it needs. May return too few; the ones ahead will end and free theirs.
    """
    candidates = [s for s in evictable if s.held or s.priority_key > beneficiary]
    candidates.sort(key=lambda s: (s.held, s.priority_key), reverse=True)
    victims = []
    for sequence in candidates:
        if deficit <= 0:
            break
        blocks = private_blocks(sequence)
        if blocks:
            victims.append(sequence)
            deficit -= blocks
    return victims
