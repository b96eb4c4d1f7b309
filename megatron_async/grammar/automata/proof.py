"""Whether a table says what the library does: texts that lead to each state are tried."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.grammar.matcher import Matcher

logger = logging.getLogger(__name__)

Transitions = npt.NDArray[np.int16]
Edges = Mapping[int, Sequence[tuple[int, int]]]
"""By state some bytes out of it, each with the state behind."""


class _Tree(NamedTuple):
    """The shortest texts to all states.

    Args:
        children: by state the bytes that go on to another, and that one.
        parents: by state the state before, and the byte.
    """

    children: dict[int, list[tuple[int, int]]]
    parents: dict[int, tuple[int, int]]

    def text_to(self, state: int) -> bytes:
        found = bytearray()
        while state in self.parents:
            state, byte = self.parents[state]
            found.append(byte)
        return bytes(reversed(found))


def differs(table: TokenAutomaton, start: Matcher, over_bytes: Matcher) -> bytes | None:
    """A text behind which the table and the library differ; None if none is found.

    Each state is reached by its shortest text, and by another last byte, or from another state,
    where there is one: there all tokens are compared, and whether the text may end. For a
    vocabulary of bytes each edge of each state is followed, once for all bytes that no state tells
    apart, and what may come behind it is compared.

    Args:
        start: the library's matcher, at the start of a text, of the vocabulary of ``table``.
        over_bytes: the same for a vocabulary of the 256 bytes.
    """
    tree = _shortest(table.transitions)
    bits = table.transitions >= 0
    bytes_allowed = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    edges = _all_edges(table.transitions)
    found = _first_difference(over_bytes, tree, edges, bytes_allowed, table.accepting)
    if found is None:
        others = _other_ways(table.transitions, tree)
        found = _first_difference(start, tree, others, table.text, table.accepting)
    if found is not None:
        logger.debug("a table differs from the library's masks behind %r", found)
    return found


def _shortest(transitions: Transitions) -> _Tree:
    tree, todo, seen = _Tree(defaultdict(list), {}), deque([0]), {0}
    while todo:
        state = todo.popleft()
        for byte, to in enumerate(transitions[state].tolist()):
            if to >= 0 and to not in seen:
                seen.add(to)
                tree.children[state].append((byte, to))
                tree.parents[to] = state, byte
                todo.append(to)
    return tree


def _other_ways(transitions: Transitions, tree: _Tree) -> Edges:
    """An edge into each state that is not that of its shortest text: the last of another state, or
    else of the same."""
    chosen: dict[int, tuple[int, int]] = {}
    for state, row in enumerate(transitions.tolist()):
        for byte, to in enumerate(row):
            if to < 0 or tree.parents.get(to) == (state, byte):
                continue
            parent = tree.parents.get(to, (0, 0))[0]
            if to not in chosen or state != parent or chosen[to][0] == parent:
                chosen[to] = state, byte
    edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for to, (state, byte) in chosen.items():
        edges[state].append((byte, to))
    return edges


def _all_edges(transitions: Transitions) -> Edges:
    """Of bytes that no state tells apart the first."""
    _, firsts = np.unique(transitions, axis=1, return_index=True)
    found = {}
    for state, row in enumerate(transitions[:, np.sort(firsts)].tolist()):
        bytes_of = zip(np.sort(firsts).tolist(), row, strict=True)
        found[state] = [(byte, to) for byte, to in bytes_of if to >= 0]
    return found


def _first_difference(
    start: Matcher,
    tree: _Tree,
    edges: Edges,
    text: npt.NDArray[np.int32],
    accepting: npt.NDArray[np.bool_],
) -> bytes | None:
    """Compare the masks behind the shortest texts, and behind edges from there."""
    row = np.empty_like(text[0])

    def is_other(matcher: Matcher, state: int) -> bool:
        matcher.fill_text(row)
        return matcher.is_complete != bool(accepting[state]) or not np.array_equal(row, text[state])

    todo: list[tuple[int, Matcher]] = [(0, start)]
    while todo:
        state, matcher = todo.pop()
        if is_other(matcher, state):
            return tree.text_to(state)
        for byte, to in edges.get(state, ()):
            if is_other(matcher.behind(bytes([byte])), to):
                return tree.text_to(state) + bytes([byte])
        for byte, to in tree.children.get(state, ()):
            todo.append((to, matcher.behind(bytes([byte]))))
    return None
