"""Which replica has probably cached which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Remembers which replicas were given which prefixes, by the hashes of their blocks (see
    :func:`~megatron_async.cache.block_hash.prefix_hashes`).

    A block's hash depends on all blocks before it, so a replica that had a block had those too.
    What was used longest ago is forgotten first, the end of a prefix before its beginning.

    Args:
        most: blocks that are remembered, over all replicas. Each takes some 360 bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many blocks from the beginning each replica had; without those that had none."""
        matched: dict[str, int] = {}
        for count, each in enumerate(hashes, 1):
            holders = self._holders.get(each)
            if not holders:
                break
            found = holders if count == 1 else {n for n in holders if matched.get(n) == count - 1}
            if not found:
                break
            for name in found:
                matched[name] = count
        return matched

    def add(self, name: str, hashes: Sequence[int]) -> None:
        """A replica is given a prefix."""
        holders = self._holders
        for each in reversed(hashes):  # so that its beginning was used last
            found = holders.get(each)
            if found is None:
                holders[each] = {name}
            else:
                found.add(name)
                holders.move_to_end(each)
        while len(holders) > self._most:
            holders.popitem(last=False)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget the replicas that are none of ``names``."""
        kept = set(names)
        for each, holders in list(self._holders.items()):
            holders &= kept
            if not holders:
                del self._holders[each]

    def clear(self) -> None:
        """Forget all: the replicas have lost their caches."""
        self._holders.clear()
