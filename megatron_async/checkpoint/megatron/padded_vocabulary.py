"""Which rows of an embedding are tokens, where training has padded the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaddedVocabulary:
    """What Megatron-LM's training knew of its vocabulary.

    Attributes:
        tokens: of the tokenizer, as far as the arguments say.
        multiple: to which the number of tokens was rounded up.
    """

    tokens: int | None
    multiple: int

    def token_count(self, rows: int, tokenizer_tokens: int | None) -> int | None:
        """The ids that are tokens, 0 to this; None where all may be.

        Without the training's own number the tokenizer's counts, if padding it gives ``rows``:
        another one may have been given.

        Args:
            rows: of the embedding.
            tokenizer_tokens: of the tokenizer that is used; None without one.
        """
        theirs = tokenizer_tokens or 0
        if self.tokens is None and -(-theirs // self.multiple) * self.multiple != rows:
            return None
        count = max(self.tokens or 0, theirs)
        return count if 0 < count < rows else None
