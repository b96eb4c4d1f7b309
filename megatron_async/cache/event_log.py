"""Records which blocks the prefix cache learns and forgets, for the clients that follow it."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from megatron_async.cache.block_hash import block_hash
from megatron_async.cache.cache_salt import hash_of_root


class Stored(NamedTuple):
    """A block is known from now on; ``parent`` is the hash of the block before it."""

    block: int
    parent: int | None
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """A block is not known any more."""

    block: int


class Cleared(NamedTuple):
    """No block is known any more."""


CacheEvent = Stored | Removed | Cleared


class EventLog:
    """Gathers the events of one ``PrefixCache``, under hashes that other processes can compute
    (:func:`~megatron_async.cache.block_hash.block_hash`).

    The cache adds events in the thread that steps; another thread may take them. Blocks below the
    roots of long requests are left out: the same tokens have other keys and values there. The first
    block of a sequence with a salt has the salt's hash for its parent.

    Args:
        root: the cache's node before the first block of a sequence.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._hashes: dict[int, int] = {}
        """The hashes of the nodes that are known."""
        self._nodes_with: Counter[int] = Counter()
        """Two nodes can stand for the same tokens: one whose parent was forgotten before it."""
        self._events: deque[CacheEvent] = deque([Cleared()])

    def stored(self, parent: int, node: int, tokens: tuple[int, ...]) -> None:
        """``node`` is known, ``tokens`` after those of ``parent``."""
        before = self._hashes.get(parent)
        if before is None and parent != self._root:
            before = hash_of_root(parent)
            if before is None:
                return
        block = self._hashes[node] = block_hash(before, tokens)
        self._nodes_with[block] += 1
        if self._nodes_with[block] == 1:
            self._events.append(Stored(block, before, tokens))

    def removed(self, node: int) -> None:
        """``node`` is not known any more."""
        block = self._hashes.pop(node, None)
        if block is None:
            return
        self._nodes_with[block] -= 1
        if not self._nodes_with[block]:
            del self._nodes_with[block]
            self._events.append(Removed(block))

    def cleared(self) -> None:
        """Record that no node is known any more."""
        self._hashes.clear()
        self._nodes_with.clear()
        self._events.append(Cleared())

    def blocks(self) -> set[int]:
        """Hashes of the blocks that are known."""
        return set(self._nodes_with)

    def take(self) -> list[CacheEvent]:
        """All events since the last call, in order; from any one thread."""
        taken: list[CacheEvent] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken
