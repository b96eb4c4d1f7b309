"""Regular expressions as trees, which :mod:`~megatron_async.grammar.automata.nfa` makes automata
of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]
"""Characters, by first and last, in order, none next to another, without surrogates."""


class NotCoveredError(Exception):
    """No automaton is made; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Text:
    """These bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``high`` None: any number."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Quoted:
    """What ``item`` matches, written inside of a JSON string: control characters, quotes and
    backslashes by their escapes, short ones or ``\\u00XX``, and all else as it is."""

    item: Node


@dataclass(frozen=True, slots=True)
class Both:
    """What both match."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Ordered:
    """Some of these items in their order, with ``between`` between two: all that are required.

    Args:
        items: each with whether it is required.
    """

    items: tuple[tuple[Node, bool], ...]
    between: Node


Node = Characters | Text | Sequence | Choice | Repeat | Quoted | Both | Ordered

EMPTY = Text(b"")


def sequence(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Sequence(items)


def choice(items: Iterable[Node]) -> Node:
    """Raises NotCoveredError: there are none."""
    found = tuple(items)
    if not found:
        raise NotCoveredError("nothing can come")
    return found[0] if len(found) == 1 else Choice(found)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, joined where they meet, without surrogates."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    cut = [part for first, last in found for part in _without_surrogates(first, last)]
    return tuple(cut)


def _without_surrogates(first: int, last: int) -> list[tuple[int, int]]:
    low, high = _SURROGATES
    parts = [(first, min(last, low - 1)), (max(first, high + 1), last)]
    return [(a, b) for a, b in parts if a <= b]


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, at = [], 0
    for first, last in ranges:
        found.append((at, first - 1))
        at = last + 1
    found.append((at, MOST_CHARACTER))
    return union((first, last) for first, last in found if first <= last)


ANY = complement(())
ANY_BUT_NEWLINE = complement(((10, 10),))
