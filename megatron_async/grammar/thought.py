"""A model's thought ahead of the text that must conform to something: the text begins behind it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

MOST_TAG_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """How a model writes its thought, in token ids.

    Args:
        closing: the tokens that end it.
        opening: the token that begins it; None where the text begins inside of it.
        budget: the most tokens of it, tags not counted; None is any number.
        forced: what ends it then, with ``closing`` at its end; () is ``closing`` alone.
        may_end: an end token may come in the midst of it, and ``closing`` is a header, of which the
            last token follows the others at once.
    """

    closing: tuple[int, ...]
    opening: int | None = None
    budget: int | None = None
    forced: tuple[int, ...] = ()
    may_end: bool = False

    @classmethod
    def from_json(cls, text: str) -> Thought:
        """The inverse of :meth:`to_json`; raises ValueError for anything else."""
        values: Any = json.loads(text)
        try:
            closing, forced = (tuple(values.pop(name, ())) for name in ("closing", "forced"))
            made = cls(closing=closing, forced=forced, **values)
        except (TypeError, AttributeError):
            raise ValueError("a thought is of another form") from None
        if not made.closing:
            raise ValueError("closing: give the tokens that end a thought")
        if max(len(made.closing), len(made.forced)) > MOST_TAG_TOKENS:
            raise ValueError(f"a tag has at most {MOST_TAG_TOKENS} tokens")
        given = [*made.closing, *made.forced]
        given += [each for each in (made.opening, made.budget) if each is not None]
        if any(type(each) is not int or each < 0 for each in given):
            raise ValueError("token ids and the budget are integers of 0 or more")
        if made.forced and made.forced[-len(made.closing) :] != made.closing:
            raise ValueError("forced: it ends with closing")
        if type(made.may_end) is not bool:
            raise ValueError("may_end is true or false")
        return made

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(asdict(self))

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that it names."""
        return (*self.closing, *self.forced, *(() if self.opening is None else (self.opening,)))


def check_fits(thought: Thought, vocab_size: int) -> None:
    """Raise ValueError for tokens that the model does not have."""
    wrong = [each for each in thought.ids if each >= vocab_size]
    if wrong:
        raise ValueError(f"token id {wrong[0]} is none of the model's {vocab_size}")
