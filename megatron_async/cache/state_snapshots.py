"""Snapshots of recurrent state, by the node of the prefix tree at whose end they were taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from megatron_async.errors import IntegrityError


class StateSnapshots:
    """Places ``0 .. count - 1`` on the device, and which node holds which; a node holds at most
    one.

    Snapshots that somebody has asked for are *wanted*, the others are *spare* until they are used.
    Spare ones give way first, the oldest before the others, and then the wanted one that was used
    least recently. A place may be taken again while a copy to or from it is queued: copies run in
    stream order.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))[::-1]
        self._wanted: OrderedDict[int, int] = OrderedDict()
        self._spare: OrderedDict[int, int] = OrderedDict()
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return len(self._wanted) + len(self._spare)

    def __contains__(self, node: int) -> bool:
        return node in self._wanted or node in self._spare

    def use(self, node: int) -> int:
        """The place of a node's snapshot, which is wanted, and the most recently used, from now
        on."""
        place = self._wanted.pop(node) if node in self._wanted else self._spare.pop(node)
        self._wanted[node] = place
        return place

    def take(self, node: int, *, is_wanted: bool) -> int | None:
        """A place for the snapshot of a node that has none; None if it is to be a spare one and
        all others are wanted."""
        place = self._find()
        if place is None and is_wanted and self._wanted:
            _, place = self._wanted.popitem(last=False)
        if place is not None:
            (self._wanted if is_wanted else self._spare)[node] = place
        return place

    def reserve(self) -> int | None:
        """A place for a spare snapshot whose node is not known yet: it comes by :meth:`attach`, or
        the place by :meth:`give_back`."""
        place = self._find()
        if place is not None:
            self._reserved.add(place)
        return place

    def attach(self, place: int, node: int) -> None:
        """A reserved place is that of ``node``, unless this has one already."""
        self._reserved.remove(place)
        if node in self:
            self._free.append(place)
        else:
            self._spare[node] = place

    def give_back(self, place: int) -> None:
        """A reserved place is not needed any more."""
        self._reserved.remove(place)
        self._free.append(place)

    def drop_spare(self, node: int) -> None:
        """A spare snapshot of ``node``, if it has one, is of no more use."""
        if node in self._spare:
            self._free.append(self._spare.pop(node))

    def forget(self, node: int) -> None:
        """The node is gone, and with it its snapshot if it has one."""
        self.drop_spare(node)
        if node in self._wanted:
            self._free.append(self._wanted.pop(node))

    def clear(self) -> None:
        """All nodes are gone."""
        for node in [*self._wanted, *self._spare]:
            self.forget(node)

    def check(self, nodes: Iterable[int]) -> None:
        """Compare with the nodes of the prefix tree.

        Raises:
            IntegrityError: a snapshot has no node, or a place is lost or held twice.
        """
        if not self._wanted.keys() | self._spare.keys() <= set(nodes):
            raise IntegrityError("a snapshot of recurrent state belongs to no known prefix")
        held = [*self._wanted.values(), *self._spare.values(), *self._reserved]
        if sorted([*self._free, *held]) != list(range(self.count)):
            raise IntegrityError("a place for a snapshot of recurrent state is lost or held twice")

    def check_idle(self) -> None:
        """Raises :class:`IntegrityError` if a place is reserved although no request is left."""
        if self._reserved:
            raise IntegrityError("a place for a snapshot of recurrent state is reserved by nobody")

    def _find(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._spare.popitem(last=False)[1] if self._spare else None
