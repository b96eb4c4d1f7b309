"""Whether a table says what the library does: texts that lead to each state are tried."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.grammar.automata.trie import byte_classes
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
    firsts, _ = byte_classes(table.transitions)
    tree = _shortest(table.transitions, firsts)
    bits = table.transitions >= 0
    bytes_allowed = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    edges = _all_edges(table.transitions, firsts)
    found = _first_difference(over_bytes, tree, edges, bytes_allowed, table.accepting)
    if found is None:
        others = _other_ways(table.transitions, tree)
        found = _first_difference(start, tree, others, table.text, table.accepting)
    if found is not None:
        logger.debug("a table differs from the library's masks behind %r", found)
    return found


def _shortest(transitions: Transitions, firsts: list[int]) -> _Tree:
    """Args: ``firsts``: of bytes that no state tells apart the first."""
    tree, todo, seen = _Tree(defaultdict(list), {}), deque([0]), {0}
    rows = transitions[:, firsts].tolist()
    while todo:
        state = todo.popleft()
        for byte, to in zip(firsts, rows[state], strict=True):
            if to >= 0 and to not in seen:
                seen.add(to)
                tree.children[state].append((byte, to))
                tree.parents[to] = state, byte
                todo.append(to)
    return tree


def _other_ways(transitions: Transitions, tree: _Tree) -> Edges:
    """An edge into each state that is not that of its shortest text: the last of another state, or
    else of the same."""
    states, bytes_ = np.nonzero(transitions >= 0)
    to = transitions[states, bytes_]
    before = [tree.parents.get(state, (-1, -1)) for state in range(len(transitions))]
    parent, byte = np.array(before).T
    is_same = states == parent[to]
    is_other = is_same & (bytes_ != byte[to])
    chosen = np.full(len(transitions), -1)
    for kind in (is_other, ~is_same):
        chosen[to[kind]] = np.flatnonzero(kind)  # of several the last stays
    edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for at in chosen[chosen >= 0].tolist():
        edges[int(states[at])].append((int(bytes_[at]), int(to[at])))
    return edges


def _all_edges(transitions: Transitions, firsts: list[int]) -> Edges:
    rows = transitions[:, firsts].tolist()
    return {
        state: [(byte, to) for byte, to in zip(firsts, row, strict=True) if to >= 0]
        for state, row in enumerate(rows)
    }


def _first_difference(
    start: Matcher,
    tree: _Tree,
    edges: Edges,
    text: npt.NDArray[np.int32],
    accepting: npt.NDArray[np.bool_],
) -> bytes | None:
    """Compare the masks behind the shortest texts, and behind edges from there."""
    ends = accepting.tolist()

    def is_other(matcher: Matcher, state: int) -> bool:
        return matcher.is_complete != ends[state] or bool((matcher.text_mask != text[state]).any())

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
