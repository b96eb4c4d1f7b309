"""Drafts of a request's rows, by where they stood and by the weights that verified them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

from megatron_async.request.fields import DraftCounts, DraftedRow


class DraftedRows(Sequence[DraftedRow]):
    """The rows with drafts of one request, in the order of their tokens; twelve bytes each."""

    __slots__ = ("_words",)

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self._words = array("I")
        for row in rows:
            self.add(*DraftedRow(*row))

    def add(self, start: int, drafted: int, accepted: int) -> None:
        """Keep one row more; see :class:`DraftedRow`."""
        append = self._words.append
        append(start)
        append(drafted)
        append(accepted)

    def counts(self, start: int, end: int) -> DraftCounts:
        """Drafts by place of the rows that began with generated tokens ``start`` to ``end`` - 1."""
        import numpy as np

        words = np.frombuffer(self._words, np.uintc).reshape(-1, 3)
        return counts_of(words[(words[:, 0] >= start) & (words[:, 0] < end)])

    def __len__(self) -> int:
        return len(self._words) // 3

    @overload
    def __getitem__(self, index: int) -> DraftedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[DraftedRow]: ...
    def __getitem__(self, index: int | slice) -> DraftedRow | list[DraftedRow]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        at = 3 * range(len(self))[index]
        return DraftedRow(*self._words[at : at + 3])


def counts_by_version(
    rows: Iterable[DraftedRow], versions: Sequence[int]
) -> dict[int, DraftCounts]:
    """Drafts of ``rows`` by place, by the version of the weights that verified them, the first one
    first. ``versions`` has the version of each generated token; those of one row have the same."""
    by_version: dict[int, list[DraftedRow]] = {}
    for row in rows:
        by_version.setdefault(versions[row.start], []).append(row)
    return {version: counts_of(of_version) for version, of_version in by_version.items()}


def counts_of(rows: Any) -> DraftCounts:
    """Drafts by place of ``rows``, integers [rows, 3] or several :class:`DraftedRow`."""
    import numpy as np

    words = np.asarray(rows).reshape(-1, 3)
    drafted, accepted = words[:, 1], words[:, 2]
    places = range(int(drafted.max(initial=0)))
    return DraftCounts(
        tuple(int((drafted > place).sum()) for place in places),
        tuple(int((accepted > place).sum()) for place in places),
    )
