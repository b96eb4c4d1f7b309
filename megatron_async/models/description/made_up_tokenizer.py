"""A tokenizer of any size for models with random weights, to measure what needs one."""

from __future__ import annotations

import random
import string

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_async.tokenizer.tokenizer import Tokenizer

LONGEST = 8
END = "<end>"


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer: all bytes, random words of up to eight characters, and an end token.

    Args:
        vocab_size: at least 257.
    """
    source = random.Random(0)
    characters = string.ascii_letters + string.digits + string.punctuation + "Ġ" * 20
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    # As randint(2, LONGEST) and choices() draw them, without their calls: a large vocabulary is
    # drawn at each start.
    draw, bits, count = source.random, source.getrandbits, len(characters)
    while len(words) < vocab_size - 1:
        further = bits(3)
        while further > LONGEST - 2:
            further = bits(3)
        words["".join([characters[int(draw() * count)] for _ in range(2 + further)])] = None
    vocabulary = {word: number for number, word in enumerate([*words, END])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.add_special_tokens([END])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made, eos_token=END)
