"""Which tokens may come in a thought, and in the text behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from megatron_async.grammar.matcher import Masks, Matcher, along
from megatron_async.grammar.thought import Thought

BREAKS = (b"\n", b"\n\n")
"""What tokens may be between a thought and a text, twice at most."""


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()
    """Between a thought and the text."""
    TEXT = auto()


@dataclass(slots=True)
class _At:
    """Where it stands.

    Args:
        count: tokens of the thought.
        last: its last tokens, as many as end it.
        due: what of the tokens that are forced is to come; None before the first of them.
        breaks: how many tokens of line breaks have come before it, or behind it.
    """

    place: _Place
    ended: bool = False
    count: int = 0
    last: tuple[int, ...] = ()
    due: tuple[int, ...] | None = None
    breaks: int = 0


class ThoughtMatcher:
    """Follows a thought and then a text, as a :class:`Matcher` follows a text.

    Args:
        text: what follows the thought; None for any text.
        first: the same at the beginning, for a model that does not think.
        at: where it stands; None for the beginning.
    """

    def __init__(
        self,
        thought: Thought,
        text: Matcher | None,
        first: Matcher | None,
        masks: Masks,
        at: _At | None = None,
    ) -> None:
        self._thought = thought
        self._text = text
        self._first = first
        self._masks = masks
        begin = _Place.INSIDE if thought.opening is None else _Place.BEFORE
        self._at = at or _At(begin)

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if it is not allowed, and then nothing has changed."""
        if self._at.ended:
            return False
        if self._at.place is _Place.BEFORE:
            if token_id == self._thought.opening:
                self._at.place = _Place.INSIDE
                return True
            if self._first is None and self._is_break(token_id):
                self._at.breaks += 1
                return True
            if not self._accept_text(self._first, token_id):
                return False
            self._at.place, self._text = _Place.TEXT, self._first
            return True
        if self._at.place is _Place.INSIDE:
            return self._think(token_id)
        if self._at.place is _Place.BEHIND:
            if self._is_break(token_id):
                self._at.breaks += 1
                return True
            if self._accept_text(self._text, token_id):
                self._at.place = _Place.TEXT
                return True
            return False
        return self._accept_text(self._text, token_id)

    def _think(self, token_id: int) -> bool:
        thought, only = self._thought, self._only
        if only is not None and token_id != only:
            return False
        if self._is_spent:
            due = self._due
            self._at.due = due[1:]
            if len(due) == 1:
                self._at.place, self._at.breaks = _Place.BEHIND, 0
            return True
        if token_id in self._masks.stop_ids:
            self._at.ended = self._may_end
            return self._at.ended
        self._at.count += 1
        self._at.last = (*self._at.last, token_id)[-len(thought.closing) :]
        if self._at.last == thought.closing:
            self._at.place, self._at.breaks = _Place.BEHIND, 0
        return True

    def _accept_text(self, text: Matcher | None, token_id: int) -> bool:
        if text is not None:
            return text.accept(token_id)
        if token_id in self._masks.stop_ids:
            self._at.ended = True
        return True

    @property
    def _is_spent(self) -> bool:
        """The thought must end."""
        budget = self._thought.budget
        return budget is not None and self._at.count >= budget

    @property
    def _due(self) -> tuple[int, ...]:
        """What is still to come of a thought that must end: where it has begun to end, or has not
        begun, the rest of ``closing``."""
        if self._at.due is not None:
            return self._at.due
        closing = self._thought.closing
        begun = next(n for n in range(len(closing), -1, -1) if self._ends_with(closing[:n]))
        if begun or not self._at.count or not self._thought.forced:
            return closing[begun:]
        return self._thought.forced

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return not tokens or self._at.last[-len(tokens) :] == tokens

    @property
    def _only(self) -> int | None:
        """The one token that may come in a thought; None for many. In a header that closes it
        nothing may come between its first tokens and its last."""
        if self._is_spent:
            return self._due[0]
        *begin, end = self._thought.closing
        return end if self._thought.may_end and begin and self._ends_with(tuple(begin)) else None

    @property
    def _may_end(self) -> bool:
        return self._thought.may_end or self._text is None

    def _is_break(self, token_id: int) -> bool:
        later = self._masks.later_bytes
        return self._at.breaks < 2 and token_id < len(later) and later[token_id] in BREAKS

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write the tokens that may come next; see :meth:`Matcher.fill_mask`."""
        if self._at.ended:
            row.fill(0)
        elif self._at.place is _Place.INSIDE:
            only = self._only
            if only is not None:
                row.fill(0)
                _set(row, only)
                return
            row.fill(-1)
            if not self._may_end:
                row &= ~self._masks.stops
        elif self._at.place is _Place.BEFORE:
            _fill(self._first, row)
            assert self._thought.opening is not None
            _set(row, self._thought.opening)
        else:
            _fill(self._text, row)
            if self._at.place is _Place.BEHIND and self._at.breaks < 2:
                row |= self._masks.breaks

    def along(self, drafts: Sequence[int]) -> Iterator[ThoughtMatcher]:
        """See :meth:`Matcher.along`."""
        return along(self, drafts)

    def forced_tokens(self) -> tuple[int, ...]:
        """See :meth:`Matcher.forced_tokens`."""
        if self._at.ended:
            return ()
        if self._at.place is _Place.INSIDE:
            return self._due if self._is_spent else ()
        is_text = self._at.place is _Place.TEXT
        return self._text.forced_tokens() if is_text and self._text is not None else ()

    @property
    def plain(self) -> Matcher | None:
        """See :meth:`Matcher.plain`."""
        is_text = self._at.place is _Place.TEXT and not self._at.ended
        return self._text.plain if is_text and self._text is not None else None

    @property
    def must_end(self) -> bool:
        """Nothing but an end may come."""
        is_text = self._at.place in (_Place.BEHIND, _Place.TEXT)
        return self._at.ended or (is_text and self._text is not None and self._text.must_end)

    @property
    def error(self) -> str | None:
        """Why no token may come though the text is not complete; None if one may, or it is."""
        is_text = self._at.place in (_Place.BEHIND, _Place.TEXT)
        return self._text.error if is_text and self._text is not None else None

    def copy(self) -> ThoughtMatcher:
        """Another one at the same place, for tokens that may be taken back."""
        text, first = (None if each is None else each.copy() for each in (self._text, self._first))
        return ThoughtMatcher(self._thought, text, first, self._masks, replace(self._at))


def _fill(matcher: Matcher | None, row: npt.NDArray[np.int32]) -> None:
    if matcher is None:
        row.fill(-1)
    else:
        matcher.fill_mask(row)


def _set(row: npt.NDArray[np.int32], token_id: int) -> None:
    row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
