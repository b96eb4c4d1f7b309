"""Deterministic automata over bytes: made of others, cut down to what is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_async.grammar.automata.expressions import NotCoveredError
from megatron_async.grammar.automata.trie import byte_classes

MOST_STATES = 4096
"""A table has no more."""
MOST_RAW_STATES = 2 * MOST_STATES
"""Before equal ones are joined."""
MOST_WORK = 1_000_000
"""Edges that are looked at to make one automaton deterministic: about a second."""

Edges = list[tuple[int, int, int]]


class Source(Protocol):
    """Begins in state 0, ends in state 1."""

    edges: list[Edges]
    empty: list[list[int]]


class Dfa(NamedTuple):
    """State 0 is the start. Edges of a state are in order and do not overlap."""

    edges: list[Edges]
    accepting: list[bool]


class _Work:
    def __init__(self) -> None:
        self.left = MOST_WORK

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise NotCoveredError("work")


def determinised(source: Source) -> Dfa:
    """The subset construction.

    Raises:
        NotCoveredError: it has too many states, or is too much work.
    """
    work = _Work()
    starts = sorted({cut for edges in source.edges for a, b, _ in edges for cut in (a, b + 1)})
    part_of = {start: number for number, start in enumerate(starts)}
    moves = [[(part_of[a], part_of[b + 1], to) for a, b, to in edges] for edges in source.edges]
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        found = closures.get(state)
        if found is None:
            seen, todo = {state}, [state]
            while todo:
                for following in source.empty[todo.pop()]:
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
            work.spend(len(seen))
            # States without edges only matter where the text may end.
            found = frozenset(s for s in seen if moves[s] or s == 1)
            closures[state] = found
        return found

    first = closure(0)
    numbers, todo = {first: 0}, deque([first])
    made: list[Edges] = []
    while todo:
        subset = todo.popleft()
        targets: dict[int, set[int]] = {}
        for state in subset:
            for a, b, to in moves[state]:
                work.spend(b - a)
                for part in range(a, b):
                    targets.setdefault(part, set()).add(to)
        edges: Edges = []
        joined: dict[frozenset[int], frozenset[int]] = {}
        for part in sorted(targets):
            key = frozenset(targets[part])
            if key not in joined:
                work.spend(len(key))
                joined[key] = frozenset().union(*map(closure, key))
                work.spend(len(joined[key]))
            following = joined[key]
            if following not in numbers:
                if len(numbers) >= MOST_RAW_STATES:
                    raise NotCoveredError("size")
                numbers[following] = len(numbers)
                todo.append(following)
            _append(edges, starts[part], starts[part + 1] - 1, numbers[following])
        made.append(edges)
    return Dfa(made, [1 in subset for subset in numbers])


def _append(edges: Edges, first: int, last: int, to: int) -> None:
    if edges and edges[-1][1] == first - 1 and edges[-1][2] == to:
        edges[-1] = (edges[-1][0], last, to)
    else:
        edges.append((first, last, to))


def intersection(left: Dfa, right: Dfa) -> Dfa:
    """What both take."""
    work = _Work()
    numbers, todo = {(0, 0): 0}, deque([(0, 0)])
    made: list[Edges] = []
    while todo:
        here = todo.popleft()
        edges: Edges = []
        for first, last, to in _overlaps(left.edges[here[0]], right.edges[here[1]]):
            work.spend(1)
            if to not in numbers:
                if len(numbers) >= MOST_RAW_STATES:
                    raise NotCoveredError("size")
                numbers[to] = len(numbers)
                todo.append(to)
            edges.append((first, last, numbers[to]))
        made.append(edges)
    return Dfa(made, [left.accepting[a] and right.accepting[b] for a, b in numbers])


def _overlaps(left: Edges, right: Edges) -> Iterator[tuple[int, int, tuple[int, int]]]:
    for first, last, to in left:
        for other_first, other_last, other_to in right:
            if max(first, other_first) <= min(last, other_last):
                yield max(first, other_first), min(last, other_last), (to, other_to)


def minimal(found: Dfa) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]:
    """The smallest table that takes the same texts, without states from which none can end.

    Returns:
        transitions, int16 ``[states, 256]``, -1 where no text goes on, and whether texts may end,
        bool ``[states]``. State 0 is the start, and the others are in the order in which a walk in
        the order of bytes comes to them.

    Raises:
        NotCoveredError: it takes no text, or has more than :data:`MOST_STATES`.
    """
    table = np.full((len(found.edges) + 1, 256), -1, np.int32)  # the last row: no state
    for state, edges in enumerate(found.edges):
        for first, last, to in edges:
            table[state, first : last + 1] = to
    accepting = np.array([*found.accepting, False])
    distance = _distances(table, accepting)
    if distance[0] < 0:
        raise NotCoveredError("nothing can come")
    dead = np.flatnonzero(distance < 0)
    table[np.isin(table, dead)] = -1
    firsts, class_of = byte_classes(table[:-1])
    distinct = table[:-1, firsts]
    found_transitions, found_accepting = _numbered(
        distinct, accepting[:-1], _blocks(distinct, distance)
    )
    return np.ascontiguousarray(found_transitions[:, class_of]), found_accepting


def _distances(
    table: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """How many bytes it takes to an end at least; -1 where there is none. A row of no state is
    last."""
    sources: list[list[int]] = [[] for _ in table]
    for state, row in enumerate(table[:-1]):
        for to in set(row.tolist()) - {-1}:
            sources[to].append(state)
    distance = np.full(len(table), -1, np.int64)
    todo = deque(np.flatnonzero(accepting).tolist())
    distance[list(todo)] = 0
    while todo:
        here = todo.popleft()
        for state in sources[here]:
            if distance[state] < 0:
                distance[state] = distance[here] + 1
                todo.append(state)
    return distance


def _blocks(table: npt.NDArray[np.int32], distance: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Moore's partition: states are in one block if the same texts end behind them.

    Rounds compare sums of odd factors in place of rows; in the end rows themselves are compared.
    """
    factors = np.random.default_rng(0).integers(1, 1 << 62, table.shape[1] + 1) | 1
    _, block = np.unique(distance, return_inverse=True)
    count = 0
    while count < (count := int(block.max()) + 1):
        rows = block[:-1] * factors[-1] + block[table] @ factors[:-1]
        _, block[:-1] = np.unique(rows, return_inverse=True)
        block[-1] = block[:-1].max() + 1
    _, one = np.unique(block, return_index=True)
    if not np.array_equal(block[table], block[table[one[block[:-1]]]]):
        raise NotCoveredError("size")
    return block[:-1]


def _numbered(
    table: npt.NDArray[np.int32],
    accepting: npt.NDArray[np.bool_],
    block: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]:
    _, one = np.unique(block, return_index=True)
    following = np.where(table[one] < 0, -1, block[table[one]])
    order, todo = {int(block[0]): 0}, deque([int(block[0])])
    while todo:
        for to in dict.fromkeys(following[todo.popleft()].tolist()):
            if to >= 0 and to not in order:
                order[to] = len(order)
                todo.append(to)
    if len(order) > MOST_STATES:
        raise NotCoveredError("size")
    number = np.full(len(one) + 1, -1, np.int16)
    number[list(order)] = np.arange(len(order))
    kept = list(order)
    return number[following[kept]], accepting[one[kept]]
