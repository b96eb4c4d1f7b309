"""Snapshots of recurrent state, by the node of the prefix tree at whose end they were taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from megatron_async.errors import IntegrityError


class StateSnapshots:
    """Places ``0 .. count - 1`` on the device; who holds which. A node holds at most one, and the
    node whose snapshot was used least recently gives it up for the next.

    A place may be taken again while a copy to or from it is queued: copies run in stream order.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))[::-1]
        self._place_of_node: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._place_of_node)

    def __contains__(self, node: int) -> bool:
        return node in self._place_of_node

    def use(self, node: int) -> int:
        """The place of a node's snapshot, which is the most recently used from now on."""
        self._place_of_node.move_to_end(node)
        return self._place_of_node[node]

    def take(self, node: int, *, is_wanted: bool) -> int | None:
        """A place for the snapshot of a node that has none. One that nobody is known to want gets
        a free place or None, and gives it up before the others."""
        if self._free:
            place = self._free.pop()
        elif is_wanted:
            _, place = self._place_of_node.popitem(last=False)
        else:
            return None
        self._place_of_node[node] = place
        self._place_of_node.move_to_end(node, last=is_wanted)
        return place

    def forget(self, node: int) -> None:
        """The node is gone, and with it its snapshot if it has one."""
        place = self._place_of_node.pop(node, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        """All nodes are gone."""
        for node in list(self._place_of_node):
            self.forget(node)

    def check(self, nodes: Iterable[int]) -> None:
        """Compare with the nodes of the prefix tree.

        Raises:
            IntegrityError: a snapshot has no node, or a place is lost or held twice.
        """
        if not set(self._place_of_node) <= set(nodes):
            raise IntegrityError("a snapshot of recurrent state belongs to no known prefix")
        places = sorted([*self._free, *self._place_of_node.values()])
        if places != list(range(self.count)):
            raise IntegrityError("a place for a snapshot of recurrent state is lost or held twice")
