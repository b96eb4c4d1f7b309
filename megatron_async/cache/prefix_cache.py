"""Full KV blocks found again by their content: requests with a common prefix share them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.cache.event_log import EventLog
from megatron_async.cache.state_snapshots import StateSnapshots

ROOT = 0
"""The node before the first block of every sequence."""
LONG_ROOT = -1
"""The root of sequences computed with the rotations of long requests."""

Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """A tree of full blocks. A node is a block's tokens after its parent's: the key holds the
    tokens themselves, so a match is exact and no hash can collide.

    Keys and values of a token depend on all tokens before it and on nothing behind it, so a block
    may be shared by every sequence that begins with the same tokens. Blocks are shared without a
    copy: only full ones are in the tree, and nobody writes to a full block again.

    The state of recurrent layers cannot be shared so: of a model that has some, a prefix is of use
    up to a node whose state was kept, one of ``snapshots``.

    Attributes:
        log: is told of blocks that become known and are forgotten; None for nobody.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        enabled: bool,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.enabled = enabled
        self.snapshots = snapshots
        self.log: EventLog | None = None
        self._allocator = allocator
        self._block_size = block_size
        self._nodes: dict[Key, tuple[int, int]] = {}
        self._key_of_block: dict[int, Key] = {}
        self._next_node = ROOT + 1
        allocator.on_reuse = self._forget

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], limit: int, root: int = ROOT) -> tuple[list[int], int]:
        """Blocks that hold the longest known prefix of at most ``limit`` tokens, and its node.

        The blocks are not referenced: the caller shares them before anything else is allocated.
        """
        blocks: list[int] = []
        node = root
        if self.enabled:
            size = self._block_size
            for start in range(0, limit - size + 1, size):
                found = self._nodes.get((node, tuple(tokens[start : start + size])))
                if found is None:
                    break
                node, block = found
                blocks.append(block)
        return blocks, node

    def until_snapshot(self, blocks: list[int], root: int = ROOT) -> tuple[list[int], int]:
        """The longest part of a match that ends at a snapshot, and its node; without one nothing,
        and ``root``."""
        assert self.snapshots is not None
        for count in range(len(blocks), 0, -1):
            node = self._nodes[self._key_of_block[blocks[count - 1]]][0]
            if node in self.snapshots:
                return blocks[:count], node
        return [], root

    def insert(self, parent: int, tokens: tuple[int, ...], block: int) -> int:
        """Make a full, held ``block`` known as what follows ``parent``; returns its node.

        When the same content is known already in another block, that one stays.
        """
        if not self.enabled:
            return ROOT
        key = (parent, tokens)
        found = self._nodes.get(key)
        if found is not None:
            return found[0]
        node = self._next_node
        self._next_node += 1
        self._nodes[key] = (node, block)
        self._key_of_block[block] = key
        self._allocator.keep(block)
        if self.log is not None:
            self.log.stored(parent, node, tokens)
        return node

    def clear(self) -> None:
        """Forget everything, because the weights that computed it are gone."""
        self._nodes.clear()
        self._key_of_block.clear()
        self._allocator.forget_all()
        if self.log is not None:
            self.log.cleared()
        if self.snapshots is not None:
            self.snapshots.clear()

    def check(self) -> None:
        """Raises :class:`IntegrityError` unless each snapshot belongs to a node."""
        if self.snapshots is not None:
            self.snapshots.check(node for node, _ in self._nodes.values())

    def _forget(self, block: int) -> None:
        node, _ = self._nodes.pop(self._key_of_block.pop(block))
        if self.snapshots is not None:
            self.snapshots.forget(node)
        if self.log is not None:
            self.log.removed(node)
