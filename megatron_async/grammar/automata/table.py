"""A grammar as a table over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_async.grammar.automata.trie import walked
from megatron_async.step.extras import MOST_FORCED


@dataclass(frozen=True)
class TokenAutomaton:
    """A grammar as a table over bytes. State 0 is the start; there is no dead state in the tables.

    Args:
        transitions: int16 ``[states, 256]``, the state behind each byte; -1 where no text goes on.
        accepting: bool ``[states]``: the text may end here.
        text: int32 ``[states, W]``: masks of the tokens of text that may come; bit id % 32 of word
            id // 32. Tokens that end a text are not in it.
        forced: int32 ``[states, MOST_FORCED]``: where there is one way to go on, its first tokens
            as the tokenizer writes them, and the token that ends the text if one alone does; -1
            behind.
    """

    transitions: npt.NDArray[np.int16]
    accepting: npt.NDArray[np.bool_]
    text: npt.NDArray[np.int32]
    forced: npt.NDArray[np.int32]

    def after(self, state: int, data: bytes) -> int:
        """The state behind bytes; -1 if there is none."""
        return walked(self.transitions, state, data)

    @property
    def byte_size(self) -> int:
        """Bytes of all tables."""
        tables = (self.transitions, self.accepting, self.text, self.forced)
        return sum(table.nbytes for table in tables)


def byte_size_of(states: int, words: int) -> int:
    """What the tables of ``states`` take, with masks of ``words``."""
    return states * (2 * 256 + 1 + 4 * words + 4 * MOST_FORCED)
