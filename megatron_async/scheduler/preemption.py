"""Who gives way when KV blocks run short. Pure functions of the sequences' states and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_async.scheduler.request_state import Sequence, State

EVICTABLE = frozenset({State.PREFILLING, State.DECODING, State.STALLED, State.HELD})


def choose_victims(
    admitted: Iterable[Sequence],
    deficit: int,
    beneficiary: tuple[int, int],
    private_blocks: Callable[[Sequence], int],
) -> list[Sequence]:
    """Sequences to evict so that ``deficit`` blocks come free for the sequence of rank
    ``beneficiary``.

    Those that the user has paused go first, then the highest ranks: lowest priority, youngest.
    Nobody of a lower rank than the beneficiary gives way unless paused, so the lowest rank of all
    always gets what it needs. May return too few; the ones ahead will end and free theirs.
    """
    candidates = [s for s in admitted if s.state in EVICTABLE and (s.held or s.rank > beneficiary)]
    candidates.sort(key=lambda s: (s.held, s.rank), reverse=True)
    victims = []
    for sequence in candidates:
        if deficit <= 0:
            break
        blocks = private_blocks(sequence)
        if blocks:
            victims.append(sequence)
            deficit -= blocks
    return victims
