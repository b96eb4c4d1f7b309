"""Checks that each address in an engine's captured graphs is that of a tensor which the engine has
now, and that what is made from other tensors follows them.

    captured graphs --hold--> places --are those of--> names <--find-- the engine's objects

A name that moved is an error, though its old memory may be alive: the graphs go on with that.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_async.errors import IntegrityError
from megatron_async.graph_audit.derived import Derived
from megatron_async.graph_audit.graph_memory import GraphMemory, Held, Place
from megatron_async.graph_audit.live_tensors import OUTGROWN, LiveTensors

MOST_SHOWN = 5
WEIGHTS, CACHES = "weights", "kv_cache"
"""Tags of memory that can be given back. That of weights is the root of its name."""


class GraphAudit:
    """The audit of one engine on one rank; nothing may be in flight while it looks.

    Args:
        memory: what the graphs hold.
        roots: by name, objects from which all tensors of the engine are found.
    """

    def __init__(self, memory: GraphMemory, roots: Mapping[str, object]) -> None:
        self._memory = memory
        self._roots: dict[str, Callable[[], object | None]] = {
            name: weakref.ref(root) for name, root in roots.items()
        }
        self._names = _places(self._live().tensors)
        self._digests: dict[str, int] = {}
        self.checks = 0
        """How many have found nothing."""

    @property
    def graphs(self) -> int:
        """Graphs whose addresses are known."""
        return self._memory.graphs

    def check(
        self,
        event: str,
        *,
        asleep: Collection[str] | None = None,
        caches_woke: bool = False,
    ) -> None:
        """
        Args:
            event: behind which it is, for the error.
            asleep: tags of memory that has been given back; None says nothing.
            caches_woke: KV cache and recurrent states have just come back, as zeros.

        Raises:
            IntegrityError: an address is stale, or a tensor's contents are; it names the tensor,
                what was expected and what was found.
        """
        live = self._live()
        problems = [
            *self._moved(live), *self._unnamed(live), *self._undeclared(live),
            *_not_as_derived(live),
        ]  # fmt: skip
        if caches_woke:
            problems += [f"{name} came back with contents" for name in _filled_caches(live)]
        if asleep is not None:
            problems += [
                f"{name} was not given back its memory" for name in _released(live)
                if (WEIGHTS if name == WEIGHTS else CACHES) not in asleep
            ]  # fmt: skip
            if WEIGHTS not in asleep:
                problems += self._lost_contents(live)
        if problems:
            shown = "; ".join(problems[:MOST_SHOWN])
            more = len(problems) - MOST_SHOWN
            further = f"; and {more} more" if more > 0 else ""
            raise IntegrityError(f"graphs do not fit the engine after {event}: {shown}{further}")
        self._names = _places(live.tensors)
        self.checks += 1

    def keep_digests(self) -> None:
        """Remember what the weights are, whose memory goes and shall come back with them."""
        self._digests = {name: _digest(tensor) for name, tensor in _weights(self._live())}

    def forget_digests(self) -> None:
        """The weights will be others."""
        self._digests = {}

    def _live(self) -> LiveTensors:
        roots = {name: root() for name, root in self._roots.items()}
        return LiveTensors.of({name: root for name, root in roots.items() if root is not None})

    def _moved(self, live: LiveTensors) -> Iterator[str]:
        """Names of what graphs hold that stand for other memory now."""
        held = _Union(self._memory.held)
        now = _places(live.tensors)
        outgrown = {place for name, place in now.items() if _is_outgrown(name)}
        for name, place in self._names.items():
            # A name that is gone says nothing: another way to the tensor may be shorter now.
            found = now.get(name, place)
            if found == place or place in outgrown or not held.meets(place):
                continue
            graph = self._memory.held[held.first(place)].graph
            yield (
                f"{name} is at {_shown(found)} now, and {graph} holds {_shown(place)}, where it was"
            )

    def _unnamed(self, live: LiveTensors) -> Iterator[str]:
        """What graphs hold that is no part of a live tensor."""
        covered = _Cover(_places(live.tensors).values())
        for place, held in self._memory.held.items():
            if held.is_freed:
                yield f"{held.graph} holds {self._described(place, held)}, which was freed"
            elif not covered.has(place):
                yield f"{held.graph} holds {self._described(place, held)}, which nobody has"

    def _undeclared(self, live: LiveTensors) -> Iterator[str]:
        """What an object of a model has made, and nobody says whether it follows new weights."""
        if not live.made:
            return
        held, places = _Union(self._memory.held), _places(live.tensors)
        stored = {name: place for name, place in places.items() if name not in live.made}
        stored |= _places({n: each.tensor for n, each in _derived(live).items()})
        declared = _Union(stored.values(), joins=True)  # such as of all rows of a stack
        for name in live.made & places.keys():
            if held.meets(places[name]) and not declared.has(places[name]):
                graph = self._memory.held[held.first(places[name])].graph
                yield (
                    f"{name}, which {graph} holds, is neither a parameter nor scratch, and no "
                    "derived_tensors() says what it is made from"
                )

    def _described(self, place: Place, held: Held) -> str:
        names = (n for n, p in self._names.items() if p.begin <= place.begin < p.end)
        name = next(names, None)
        known = "" if name is None else f" of {name}"
        return f"{_shown(place)} ({held.what}{known})"

    def _lost_contents(self, live: LiveTensors) -> Iterator[str]:
        """Weights that are other ones than before a sleep."""
        before, self._digests = self._digests, {}
        for name, tensor in _weights(live) if before else ():
            if before.get(name) != _digest(tensor):
                yield f"{name} has other contents than before the sleep"


class _Union:
    """The union of places, as disjoint ones in order.

    Args:
        joins: those that follow each other without a gap become one.
    """

    def __init__(self, places: Iterable[Place], *, joins: bool = False) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._firsts: list[Place] = []
        for place in sorted(places):
            if self._ends and place.begin < self._ends[-1] + joins:
                self._ends[-1] = max(self._ends[-1], place.end)
            else:
                self._begins.append(place.begin)
                self._ends.append(place.end)
                self._firsts.append(place)

    def _at(self, place: Place) -> int:
        """Which of them is the last that begins before the end of ``place``."""
        return bisect.bisect_left(self._begins, place.end) - 1

    def meets(self, place: Place) -> bool:
        """Whether they have a byte in common."""
        at = self._at(place)
        return at >= 0 and self._ends[at] > place.begin

    def has(self, place: Place) -> bool:
        """Whether one of them has all of ``place``."""
        at = self._at(place)
        return at >= 0 and self._begins[at] <= place.begin and place.end <= self._ends[at]

    def first(self, place: Place) -> Place:
        """A place of the union's part that meets ``place``."""
        return self._firsts[self._at(place)]


class _Cover:
    """Whether one of many places has all of another."""

    def __init__(self, places: Iterable[Place]) -> None:
        ordered = sorted(places)
        self._begins = [place.begin for place in ordered]
        self._furthest: list[int] = []
        """The largest end of all up to here: of a place that begins no later."""
        for place in ordered:
            self._furthest.append(max(place.end, self._furthest[-1] if self._furthest else 0))

    def has(self, place: Place) -> bool:
        """Whether one has all of ``place``."""
        at = bisect.bisect_right(self._begins, place.begin) - 1
        return at >= 0 and self._furthest[at] >= place.end


def _is_outgrown(name: str) -> bool:
    return any(part.partition("[")[0] == OUTGROWN for part in name.split("."))


def _places(tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    pairs = ((name, Place.of(tensor)) for name, tensor in tensors.items())
    return {name: place for name, place in pairs if place is not None}


def _released(live: LiveTensors) -> list[str]:
    return [name for name, region in live.regions.items() if region.is_released]


def _weights(live: LiveTensors) -> Iterator[tuple[str, Tensor]]:
    """Parameters that lie in memory which can be given back."""
    region = live.regions.get(WEIGHTS)
    if region is None or region.is_released:
        return
    whole = Place.of(region.bytes)
    assert whole is not None
    for name, tensor in live.tensors.items():
        place = Place.of(tensor)
        is_inside = place is not None and whole.begin <= place.begin < whole.end
        if isinstance(tensor, torch.nn.Parameter) and is_inside:
            yield name, tensor


def _digest(tensor: Tensor) -> int:
    """The sum of all bits as 8-byte integers; nothing of the tensor's size is made for it."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    if flat.data_ptr() % 8:
        flat = flat.clone()
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())


def _filled_caches(live: LiveTensors) -> Iterator[str]:
    for name, region in live.regions.items():
        if name != WEIGHTS and not region.is_released and region.bytes.any():
            yield name


def _not_as_derived(live: LiveTensors) -> Iterator[str]:
    """Tensors that are not what their objects say, one after the other."""
    gone = [Place.of(r.bytes) for r in live.regions.values() if r.is_released]
    for name, derived in _derived(live).items():
        place = Place.of(derived.tensor)
        if place is None or any(r and r.begin <= place.begin < r.end for r in gone):
            continue
        problem = _difference(derived)
        if problem is not None:
            yield f"{name} does not follow what it is made from: {problem}"


def _derived(live: LiveTensors) -> dict[str, Derived]:
    return {
        f"{name}.{derived.name}": derived
        for name, keeper in live.keepers.items()
        for derived in keeper.derived_tensors()
    }


def _difference(derived: Derived) -> str | None:
    """Why a tensor is not what it must equal; None if it is."""
    with torch.inference_mode():
        found, wanted = derived.tensor, derived.value()
        if found.shape != wanted.shape:
            return f"{list(wanted.shape)} was expected, and it is {list(found.shape)}"
        wanted = wanted.to(found.device, found.dtype)
        if torch.equal(found, wanted):
            return None
        differs = ~((found == wanted) | ((found != found) & (wanted != wanted)))
        count = int(differs.sum())
        if not count:
            return None
        at = tuple(differs.nonzero()[0].tolist())
        return (
            f"{count} of {found.numel()} elements differ, the first at {list(at)}, where "
            f"{wanted[at].item()} was expected and {found[at].item()} found"
        )


def _shown(place: Place) -> str:
    return f"{place.bytes} bytes at {place.begin:#x}"
