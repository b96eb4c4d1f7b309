"""What a thought is in token ids: the structure that begins behind it, its budget, its length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_async.grammar.thought import Thought
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.chat.answers.reasoning import Tags
from megatron_async.serving.http.errors import ApiError

if TYPE_CHECKING:
    from megatron_async.tokenizer.tokenizer import Tokenizer  # which imports torch


MOST_OF_HEADER = 8
"""Tokens of a header: two markers, and a name between them, maybe in letters."""
MOST_BEFORE = 2
"""Tokens of whitespace in front of a thought."""


class Thinking:
    """The thought of one answer.

    Args:
        tags: what stands around it; None where there is none.
        is_known: the server knows how the model writes it.
    """

    def __init__(self, tokenizer: Tokenizer, tags: Tags | None, *, is_known: bool) -> None:
        self.is_known = is_known
        self._tags = tags
        self._opening: int | None = None
        self._closing: tuple[int, ...] = ()
        self._forced: tuple[int, ...] = ()
        self._is_exact = True
        if tags is None:
            return
        self._closing, self._forced = (
            tuple(tokenizer.tokenize(text)) for text in (tags.closing, tags.forced)
        )
        # Where no token stands for it, other tokens may spell it in a text.
        self._is_exact = len(self._closing) <= (MOST_OF_HEADER if tags.may_end else 1)
        if tags.opening is not None:
            ids = tokenizer.tokenize(tags.opening)
            # Written in several tokens it cannot be told from the beginning of another text.
            self._opening = ids[0] if len(ids) == 1 else None

    @property
    def _can_begin(self) -> bool:
        return self._tags is not None and (self._tags.opening is None or self._opening is not None)

    def guide(self, params: SamplingParams, budget: int | None) -> SamplingParams:
        """``params`` with a structure that begins behind the thought, which a budget of tokens
        ends.

        Raises:
            ApiError: the budget is negative, or nobody knows how the model writes its thought, or
                where that ends.
        """
        if budget is not None and not self.is_known:
            said = "thinking_budget needs a server that was started with --reasoning-parser"
            raise ApiError(400, f"{said}; leave it out", param="thinking_budget")
        if budget is not None and budget < 0:
            said = f"thinking_budget={budget} must be 0 or more"
            raise ApiError(400, said, param="thinking_budget")
        given = params.structured_outputs
        if not self._can_begin or (given is None and budget is None):
            return params
        assert self._tags is not None
        if not self._is_exact:
            what = "structured outputs" if budget is None else "thinking_budget"
            raise ApiError(
                400,
                f"{what}: this model's tokenizer writes {self._tags.closing} in "
                f"{len(self._closing)} tokens, so "
                "nobody knows where its thought ends; leave it out, or start the server without "
                "--reasoning-parser",
                param=None if budget is None else "thinking_budget",
            )
        thought = Thought(
            closing=self._closing,
            opening=self._opening,
            budget=budget,
            forced=self._forced,
            may_end=self._tags.may_end,
        )
        structure = {**(given or {}), "thought": thought.to_json()}
        return dataclasses.replace(params, structured_outputs=structure)

    def counter(self) -> ThoughtLength:
        """Counts the tokens of a thought."""
        is_known = self._can_begin and self._is_exact
        return ThoughtLength(self._opening, self._closing if is_known else ())


class ThoughtLength:
    """How many tokens of an answer are its thought, tags included.

    Args:
        opening: see :class:`~megatron_async.grammar.thought.Thought`.
        closing: the same; () where there is no thought.
    """

    def __init__(self, opening: int | None, closing: tuple[int, ...]) -> None:
        self.count = 0
        self._opening = opening
        self._closing = closing
        self._has_begun = opening is None
        self._is_over = not closing
        self._seen = 0
        self._before = 0
        self._last: tuple[int, ...] = ()

    def add(self, ids: Sequence[int]) -> None:
        """The next tokens."""
        for token in ids:
            if self._is_over:
                return
            self._seen += 1
            if not self._has_begun:
                self._has_begun = token == self._opening
                self._before = self._seen - 1
                self._is_over = not self._has_begun and self._seen > MOST_BEFORE
            if not self._has_begun:
                continue
            self.count = self._seen - self._before
            self._last = (*self._last, token)[-len(self._closing) :]
            self._is_over = self._last == self._closing
