"""Automata over bytes, of trees, by Thompson's construction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async.grammar.automata import dfa
from megatron_async.grammar.automata.expressions import (
    Both,
    Characters,
    Choice,
    Node,
    NotCoveredError,
    Ordered,
    Quoted,
    Ranges,
    Repeat,
    Sequence,
    Text,
)

MOST_NFA_STATES = 4 * dfa.MOST_STATES
"""Counted while they are made, so that nested repetitions end here at once."""
MOST_PARTS = 4 * MOST_NFA_STATES
"""A tree has no more, each counted as often as it is reached: some add no state."""
_LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
_SHORT_ESCAPES = {8: b"b", 9: b"t", 10: b"n", 12: b"f", 13: b"r", 34: b'"', 92: b"\\"}

Edge = tuple[int, int, int]
"""First byte, last byte, state."""


class Nfa:
    """States with edges over bytes and empty ones. It begins in state 0 and ends in state 1.

    Invariant: :meth:`add` leads from a state to another, and adds no edge into the former nor out
    of the latter, so that parts do not run into each other.
    """

    def __init__(self, node: Node) -> None:
        self.edges: list[list[Edge]] = [[], []]
        self.empty: list[list[int]] = [[], []]
        self._parts = 0
        self.add(node, 0, 1)

    def state(self) -> int:
        if len(self.edges) >= MOST_NFA_STATES:
            raise NotCoveredError("size")
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, node: Node, start: int, end: int, *, quoted: bool = False) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise NotCoveredError("size")
        match node:
            case Text(data):
                self._bytes(data, start, end, quoted)
            case Characters(ranges):
                self._characters(ranges, start, end, quoted)
            case Sequence(items):
                for item in items[:-1]:
                    behind = self.state()
                    self.add(item, start, behind, quoted=quoted)
                    start = behind
                self.add(items[-1], start, end, quoted=quoted)
            case Choice(items):
                for item in items:
                    self.add(item, start, end, quoted=quoted)
            case Repeat(item, low, high):
                self._repeat(item, low, high, start, end, quoted)
            case Quoted(item):
                self.add(item, start, end, quoted=True)
            case Both(left, right):
                self._both(left, right, start, end, quoted)
            case Ordered(items, between):
                self._ordered(items, between, start, end)

    def _byte(self, first: int, last: int, start: int, end: int, quoted: bool) -> None:
        if not quoted:
            self.edges[start].append((first, last, end))
            return
        plain = first
        for byte in range(first, min(last, 127) + 1):
            if byte < 32 or byte in (34, 92, 127):
                if plain < byte:
                    self.edges[start].append((plain, byte - 1, end))
                plain = byte + 1
        if plain <= last:
            self.edges[start].append((plain, last, end))

    def _escapes(self, escaped: list[int], start: int, end: int) -> None:
        """These characters inside of a JSON string, written by escapes."""
        if not escaped:
            return
        backslash = self.state()
        self.edges[start].append((92, 92, backslash))
        by_digit: dict[int, set[int]] = {}
        for byte in escaped:
            if byte in _SHORT_ESCAPES:
                (short,) = _SHORT_ESCAPES[byte]
                self.edges[backslash].append((short, short, end))
            if byte not in (34, 92):
                by_digit.setdefault(byte >> 4, set()).update(f"{byte & 15:x}{byte & 15:X}".encode())
        if not by_digit:
            return
        at = backslash
        for byte in b"u00":
            behind = self.state()
            self.edges[at].append((byte, byte, behind))
            at = behind
        for high, digits in by_digit.items():
            behind = self.state()
            self.edges[at].append((48 + high, 48 + high, behind))
            for digit in sorted(digits):
                self.edges[behind].append((digit, digit, end))

    def _bytes(self, data: bytes, start: int, end: int, quoted: bool) -> None:
        if not data:
            self.empty[start].append(end)
        for place, byte in enumerate(data):
            behind = end if place == len(data) - 1 else self.state()
            self._byte(byte, byte, start, behind, quoted)
            if quoted:
                self._escapes([byte] if _is_escaped(byte) else [], start, behind)
            start = behind

    def _characters(self, ranges: Ranges, start: int, end: int, quoted: bool) -> None:
        rest = {0: end}
        """By how many bytes of 0x80 to 0xBF are to come, a state."""

        def behind(count: int) -> int:
            if count not in rest:
                rest[count] = self.state()
                self.edges[rest[count]].append((0x80, 0xBF, behind(count - 1)))
            return rest[count]

        for parts in utf8_ranges(ranges):
            at = start
            free = next((n for n in range(len(parts)) if set(parts[n:]) <= {(0x80, 0xBF)}), None)
            cut = len(parts) if free is None else max(free, 1)
            for place, (first, last) in enumerate(parts[:cut]):
                left = len(parts) - place - 1
                following = behind(left) if place == cut - 1 else self.state()
                self._byte(first, last, at, following, quoted and len(parts) == 1)
                at = following
        if quoted:
            low = [byte for first, last in ranges for byte in range(first, min(last, 127) + 1)]
            self._escapes([byte for byte in low if _is_escaped(byte)], start, end)

    def _repeat(
        self, item: Node, low: int, high: int | None, start: int, end: int, quoted: bool
    ) -> None:
        for _ in range(low):
            behind = self.state()
            self.add(item, start, behind, quoted=quoted)
            start = behind
        if high is None:
            here, behind = self.state(), self.state()
            self.empty[start].append(here)
            self.add(item, here, behind, quoted=quoted)
            self.empty[behind].append(here)
            self.empty[here].append(end)
            return
        for _ in range(high - low):
            self.empty[start].append(end)
            behind = self.state()
            self.add(item, start, behind, quoted=quoted)
            start = behind
        self.empty[start].append(end)

    def _both(self, left: Node, right: Node, start: int, end: int, quoted: bool) -> None:
        found = dfa.intersection(dfa.determinised(Nfa(left)), dfa.determinised(Nfa(right)))
        states = [self.state() for _ in found.edges]
        self.empty[start].append(states[0])
        for number, (edges, accepts) in enumerate(zip(found.edges, found.accepting, strict=True)):
            for first, last, following in edges:
                self._byte(first, last, states[number], states[following], quoted)
                escaped = range(first, min(last, 127) + 1) if quoted else ()
                found_here = [byte for byte in escaped if _is_escaped(byte)]
                self._escapes(found_here, states[number], states[following])
            if accepts:
                self.empty[states[number]].append(end)

    def _ordered(
        self, items: tuple[tuple[Node, bool], ...], between: Node, start: int, end: int
    ) -> None:
        """Two chains: nothing has come yet, and something has."""
        none, some = start, self.state()
        for item, is_required in items:
            here, next_none, next_some = self.state(), self.state(), self.state()
            self.empty[none].append(here)
            self.add(between, some, here)
            self.add(item, here, next_some)
            if not is_required:
                self.empty[none].append(next_none)
                self.empty[some].append(next_some)
            none, some = next_none, next_some
        self.empty[none].append(end)
        self.empty[some].append(end)


def _is_escaped(byte: int) -> bool:
    return byte < 32 or byte in (34, 92, 127)


def utf8_ranges(ranges: Ranges) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges of characters as ranges of the bytes of UTF-8, one behind another."""
    for first, last in ranges:
        for length_end in _LENGTH_ENDS:
            if first <= length_end and first <= last:
                yield from _same_length(first, min(last, length_end))
                first = length_end + 1


def _same_length(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The same for characters whose UTF-8 is as long, split so that lower bytes are all free."""
    low, high = chr(first).encode(), chr(last).encode()
    for count in range(1, len(low)):
        mask = (1 << 6 * count) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                yield from _same_length(first, first | mask)
                yield from _same_length((first | mask) + 1, last)
                return
            if last & mask != mask:
                yield from _same_length(first, (last & ~mask) - 1)
                yield from _same_length(last & ~mask, last)
                return
    yield tuple(zip(low, high, strict=True))
