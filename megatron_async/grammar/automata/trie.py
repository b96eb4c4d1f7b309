"""The bytes of a vocabulary as a trie, and which of its tokens the states of a table allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_LEVELS = 256
"""Longer tokens are walked by themselves."""
_CHUNK = 32
"""States that are walked at once."""

Ints = npt.NDArray[np.int32]


class _Level(NamedTuple):
    """Nodes that are as deep.

    Args:
        symbols: int32, of the edge to each node: its byte, or the class of its byte.
        parents: int32, where it is in the level above.
        children: int32 ``[nodes + 1]``: from where on its children are in the level below.
        texts: int32, the number of the text that ends at each node; -1 where none does.
    """

    symbols: Ints
    parents: Ints
    children: Ints
    texts: Ints


class Trie:
    """What tokens add to a text, byte by byte.

    Args:
        token_bytes: by id.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        numbers: dict[bytes, int] = {}
        self._text_of = np.array([numbers.setdefault(d, len(numbers)) for d in token_bytes], int)
        """By token the number of its text: some have the same."""
        self._count = len(numbers)
        self._long = [(data, n) for data, n in numbers.items() if len(data) > MOST_LEVELS]
        self._levels = _levels_of({d: n for d, n in numbers.items() if len(d) <= MOST_LEVELS})

    def allowed(self, transitions: npt.NDArray[np.int16], counted: Ints) -> Ints:
        """Which tokens may come in each state.

        Args:
            transitions: int16 ``[states, 256]``, -1 where no text goes on.
            counted: int32 ``[W]``, bits of the tokens that count.

        Returns:
            int32 ``[states, W]``; bit id % 32 of word id // 32.
        """
        firsts, class_of = byte_classes(transitions)
        table = transitions[:, firsts]
        levels, text_of, count = self._collapsed(class_of)
        masks = np.zeros((len(transitions), len(counted)), np.int32)
        bits = np.zeros((_CHUNK, 32 * len(counted)), np.bool_)
        for first in range(0, len(transitions), _CHUNK):
            origins = np.arange(first, min(first + _CHUNK, len(transitions)), dtype=np.int32)
            here = bits[: len(origins)]
            texts = _texts(levels, count, table, origins)
            np.take(texts, text_of, axis=1, out=here[:, : len(text_of)], mode="clip")
            for data, number in self._long:
                ends = [walked(transitions, origin, data) >= 0 for origin in origins.tolist()]
                here[:, np.flatnonzero(self._text_of == number)] = np.array(ends)[:, None]
            packed = np.packbits(here, axis=1, bitorder="little").view("<i4")
            masks[origins] = packed & counted
        return masks

    def _collapsed(self, class_of: Ints) -> tuple[list[_Level], npt.NDArray[np.int64], int]:
        """Texts that are the same to a table are one: levels over classes of bytes, the number of
        each token's text, and how many there are."""
        levels: list[_Level] = []
        number_of = np.zeros(self._count, np.int64)  # 0: the empty text, and long ones
        count, above = 1, np.zeros(1, np.int64)
        for level in self._levels:
            keys = above[level.parents] << 8 | class_of[level.symbols]
            found, at = np.unique(keys, return_inverse=True)
            texts = np.full(len(found), -1, np.int32)
            ends = level.texts >= 0
            ending = np.unique(at[ends])
            texts[ending] = np.arange(count, count + len(ending))
            number_of[level.texts[ends]] = texts[at[ends]]
            _append(levels, found, texts)
            count, above = count + len(ending), at
        return levels, number_of[self._text_of], count


def _levels_of(numbers: dict[bytes, int]) -> list[_Level]:
    datas = sorted(numbers)
    number = np.array([numbers[data] for data in datas], np.int32)
    lengths = np.array([len(data) for data in datas], np.int64)
    joined = np.frombuffer(b"".join(datas), np.uint8)
    begins = np.cumsum(lengths) - lengths
    node = np.zeros(len(datas), np.int64)
    left = np.flatnonzero(lengths > 0)
    levels: list[_Level] = []
    while len(left):
        found, at = np.unique(node[left] << 8 | joined[begins[left]], return_inverse=True)
        node[left] = at
        begins[left] += 1
        lengths[left] -= 1
        ends = lengths[left] == 0
        texts = np.full(len(found), -1, np.int32)
        texts[at[ends]] = number[left[ends]]
        _append(levels, found, texts)
        left = left[~ends]
    return levels


def _append(levels: list[_Level], keys: npt.NDArray[np.int64], texts: Ints) -> None:
    """Add a level, whose nodes are parent * 256 + symbol, in order."""
    parents = (keys >> 8).astype(np.int32)
    if levels:
        cuts = np.searchsorted(parents, np.arange(len(levels[-1].symbols) + 1))
        levels[-1] = levels[-1]._replace(children=cuts.astype(np.int32))
    none = np.zeros(len(keys) + 1, np.int32)
    levels.append(_Level((keys & 255).astype(np.int32), parents, none, texts))


def _texts(
    levels: list[_Level], count: int, table: npt.NDArray[np.int16], origins: Ints
) -> npt.NDArray[np.bool_]:
    """The texts that may come, bool ``[origins, texts]``.

    Args:
        table: int16 ``[states, classes]``.
    """
    found = np.zeros((len(origins), count), np.bool_)
    if not levels:
        return found
    nodes = np.tile(np.arange(len(levels[0].symbols), dtype=np.int32), len(origins))
    rows = np.repeat(np.arange(len(origins), dtype=np.int32), len(levels[0].symbols))
    before: npt.NDArray[np.signedinteger] = origins[rows]
    for level in levels:
        states = table[before, level.symbols[nodes]]
        live = states >= 0
        nodes, rows, states = nodes[live], rows[live], states[live]
        texts = level.texts[nodes]
        ends = texts >= 0
        found[rows[ends], texts[ends]] = True
        counts = level.children[nodes + 1] - level.children[nodes]
        firsts = np.repeat(level.children[nodes] - (np.cumsum(counts) - counts), counts)
        nodes = (firsts + np.arange(len(firsts))).astype(np.int32)
        rows, before = np.repeat(rows, counts), np.repeat(states, counts)
    return found


def byte_classes(transitions: npt.NDArray[np.signedinteger]) -> tuple[list[int], Ints]:
    """Bytes that no state tells apart.

    Args:
        transitions: ``[states, 256]``.

    Returns:
        the first byte of each class, in order, and int32 ``[256]`` the class of each byte.
    """
    classes: dict[bytes, int] = {}
    columns = [column.tobytes() for column in np.ascontiguousarray(transitions.T)]
    class_of = [classes.setdefault(column, len(classes)) for column in columns]
    return [class_of.index(number) for number in range(len(classes))], np.array(class_of, np.int32)


def walked(transitions: npt.NDArray[np.int16], state: int, data: bytes) -> int:
    """The state behind ``data``; -1 if there is none."""
    for byte in data:
        if state < 0:
            break
        state = int(transitions[state, byte])
    return state
