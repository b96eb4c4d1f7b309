"""What the step program and a source of drafts have to do with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class SampledRows(NamedTuple):
    """What S has sampled in R rows, of which each may bring a window of w tokens.

    Args:
        slots: int64 [R]; the null slot for rows that bring nothing or have ended.
        tokens: int64 [R, w]; token i is about position ``first + i``. 0 where no token could be
            sampled.
        last: int64 [R], the index of the last token that counts.
        first: int64 [R].
    """

    slots: Tensor
    tokens: Tensor
    last: Tensor
    first: Tensor


class MixedTokens(NamedTuple):
    """The T tokens of a forward with prefill chunks.

    Args:
        ids, positions, slots: int64 [T].
        decodes: bool [T]: tokens of decode rows, and padding.
        chunks: int32 [N, 4], see ``AttentionMetadata``.
        last_token_index: int64 [R * w], the tokens that have pending logits.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: Tensor
    chunks: Tensor
    last_token_index: Tensor


class Drafter(Protocol):
    """Guesses what follows the token that a row has sampled last. It runs on the device's stream,
    inside the captured graphs; its shapes depend on nothing that the device knows.

    Attributes:
        wants_tokens: :meth:`admit` is to be called.
    """

    wants_tokens: bool

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        """A request takes ``slot`` with these tokens, ahead of the launch that names it."""

    def hidden_states(self, count: int) -> Tensor | None:
        """Where a decode forward is to leave the hidden states ``[count, hidden]`` of its tokens,
        which are those of the pending logits; None if nobody needs them."""

    def prefill(self, tokens: MixedTokens, hidden_states: Tensor | None) -> None:
        """Take what the tokens of a forward with prefill chunks tell about their requests.

        Args:
            hidden_states: ``[T, hidden]``; None if nobody needs them.
        """

    def draft(self, rows: SampledRows, count: int) -> Tensor | None:
        """Drafts int64 [R, count] of what follows the last token that counts of each row; behind
        S, whose state has been updated. With ``count`` 0 it only takes what the rows tell, so that
        it can draft later. None where it has put them into the slots' state itself."""
