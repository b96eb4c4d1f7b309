"""Host-side owner of the KV-cache blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from megatron_async.errors import ConfigError, IntegrityError

NULL_BLOCK = 0
"""Never given to a request: padding rows and dead rows write their keys and values here."""


class BlockAllocator:
    """Reference-counted blocks ``1 .. block_count``; block 0 is the null block.

    A block that a forward in flight may still touch must not come back here before that forward's
    ticket has retired: the scheduler's retire queue sees to that.
    """

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ConfigError(f"block_count={block_count} must be at least 1")
        self.block_count = block_count
        self._free: deque[int] = deque(range(1, block_count + 1))
        self._references = [0] * (block_count + 1)

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a block with one reference.

        Raises:
            IntegrityError: none is free; running short is the scheduler's decision, made earlier.
        """
        if not self._free:
            raise IntegrityError("KV block allocated although none is free")
        block = self._free.popleft()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to an allocated block."""
        if self._references[block] < 1:
            raise IntegrityError(f"KV block {block} is shared although it is free")
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference of each block; returns those that became free."""
        freed = []
        for block in blocks:
            if block == NULL_BLOCK or self._references[block] < 1:
                raise IntegrityError(f"KV block {block} is released although nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
                freed.append(block)
        return freed

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Compare the reference counts with the blocks that ``holders`` list.

        Raises:
            IntegrityError: a block is lost, held twice or free while held.
        """
        held: Counter[int] = Counter()
        for blocks in holders:
            held.update(blocks)
        for block in range(1, self.block_count + 1):
            if self._references[block] != held[block]:
                raise IntegrityError(
                    f"KV block {block} has {self._references[block]} references, "
                    f"its holders say {held[block]}"
                )
        free = set(self._free)
        if len(free) != len(self._free) or free & set(held):
            raise IntegrityError("a KV block is free twice, or free and held")
        if len(free) + len(held) != self.block_count:
            raise IntegrityError("a KV block is neither free nor held")
