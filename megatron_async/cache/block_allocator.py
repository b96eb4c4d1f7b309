"""Host-side owner of the KV-cache blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from megatron_async.errors import ConfigError, IntegrityError

NULL_BLOCK = 0
"""Never given to a request: padding rows and dead rows write their keys and values here."""


class BlockAllocator:
    """Reference-counted blocks ``1 .. block_count``; block 0 is the null block.

    A block without references is *free*, or *idle* when its content is kept for reuse. Idle blocks
    are given out again, least recently released first, when no free one is left.

    A block that a forward in flight may still touch must not come back here before that forward's
    ticket has retired: the scheduler's retire queue sees to that.
    """

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ConfigError(f"block_count={block_count} must be at least 1")
        self.block_count = block_count
        self.on_reuse: Callable[[int], None] = lambda block: None
        """Called with an idle block whose kept content is about to be lost."""
        self._free: deque[int] = deque(range(1, block_count + 1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._references = [0] * (block_count + 1)

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    def references(self, block: int) -> int:
        """How many requests hold ``block``."""
        return self._references[block]

    def allocate(self) -> int:
        """Take a block with one reference.

        Raises:
            IntegrityError: none is left; running short is the scheduler's decision, made earlier.
        """
        if self._free:
            block = self._free.popleft()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._kept.remove(block)
            self.on_reuse(block)
        else:
            raise IntegrityError("KV block allocated although none is free")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is held or idle."""
        if self._references[block] == 0:
            if block not in self._idle:
                raise IntegrityError(f"KV block {block} is shared although it is free")
            del self._idle[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference of each block; returns those that became free (not idle)."""
        freed = []
        for block in blocks:
            if block == NULL_BLOCK or self._references[block] < 1:
                raise IntegrityError(f"KV block {block} is released although nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)
                    freed.append(block)
        return freed

    def keep(self, block: int) -> None:
        """The content of this held block is worth keeping when nobody holds it any more."""
        self._kept.add(block)

    def forget_all(self) -> None:
        """Forget all contents: none is worth keeping any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._kept.clear()

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
        available = [*self._free, *self._idle]
        if len(set(available)) != len(available) or set(available) & set(held):
            raise IntegrityError("a KV block is free twice, or free and held")
        if len(available) + len(held) != self.block_count:
            raise IntegrityError("a KV block is neither free nor held")
        if not set(self._idle) <= self._kept or self._kept & set(self._free):
            raise IntegrityError("an idle KV block is not kept, or a free one is")
