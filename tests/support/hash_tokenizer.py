"""A byte-level tokenizer for the hash model: JSON, a few words, parts of characters."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_async.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 61
"""It stands here, so that a process without PyTorch has it too."""
_CHARACTERS = '{}[]":,.-0123456789abcdefghijklnorstuvxyzĠ'
_WORDS = ("true", "fal", "se", "ab", "abc", "null", '":', '",', "Ã", "©", "ðŁ", "ĺ", "Ģ", "}}")
"""Two tokens are the bytes of "é", three those of an emoji."""


@functools.cache
def hash_tokenizer() -> Tokenizer:
    """The last id is the end token."""
    words = [*_CHARACTERS, *_WORDS]
    words += [f"<{number}>" for number in range(VOCAB_SIZE - 1 - len(words))]
    vocabulary = {word: number for number, word in enumerate([*words, "<end>"])}
    assert len(vocabulary) == VOCAB_SIZE
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    made.add_special_tokens(["<end>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made, eos_token="<end>")
