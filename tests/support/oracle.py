"""What a request must produce, decoded alone: a few lines of Python, no cache and no scheduler."""

from __future__ import annotations

import codecs
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import regex
import torch

from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference
from tests.support.hash_model import VOCAB_SIZE, hash_history, hash_logits
from tests.support.hash_tokenizer import hash_tokenizer


@dataclass(frozen=True)
class Ask:
    """One request of a random workload."""

    prompt: tuple[int, ...]
    max_new: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_words: tuple[str, ...] = ()
    regex: str | None = None
    bans_the_next: bool = False
    """A logits processor: never the id behind the last one."""


def text_of(tokens: list[int]) -> str:
    """Text of the tokens, but for characters that are not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    special = hash_tokenizer().special_ids
    return "".join(
        decoder.decode(hash_tokenizer().token_bytes(token))
        for token in tokens
        if token not in special
    )


@functools.lru_cache(maxsize=4096)
def regex_allows(pattern: str, text: str, stop_ids: tuple[int, ...]) -> frozenset[int]:
    """Ids that may come after ``text``: text that can still match, and ends of one that does."""
    ends = regex.fullmatch(pattern, text) is not None
    allowed = set(stop_ids) if ends else set()
    for token in range(VOCAB_SIZE):
        piece = hash_tokenizer().token_bytes(token)
        if token in stop_ids or token in hash_tokenizer().special_ids or not piece.isascii():
            continue
        if regex.fullmatch(pattern, text + piece.decode(), partial=True):
            allowed.add(token)
    return frozenset(allowed)


def process_row(row: list[float], ask: Ask, tokens: list[int]) -> list[float]:
    """The logits that are sampled after ``tokens``, prompt included: float32, operation by
    operation."""
    x = np.array(row, dtype=np.float32)
    generated = tokens[len(ask.prompt) :]
    dropped: set[int] = {(tokens[-1] + 1) % VOCAB_SIZE} if ask.bans_the_next else set()
    if ask.regex is not None:
        may = regex_allows(ask.regex, text_of(generated), ask.stop_ids)
        dropped |= set(range(VOCAB_SIZE)) - may
    if ask.allowed is not None:
        dropped |= set(range(len(row))) - set(ask.allowed)
    for *before, last in ask.bad_words:
        if tokens[len(tokens) - len(before) :] == before:
            dropped.add(last)
    if len(generated) < ask.min_tokens:
        dropped |= set(ask.stop_ids)
    x[sorted(dropped)] = -np.inf
    for token, bias in ask.logit_bias:
        x[token] += np.float32(bias)
    for token in set(tokens):
        penalty = np.float32(ask.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in Counter(generated).items():
        x[token] -= np.float32(ask.frequency_penalty) * np.float32(count)
        x[token] -= np.float32(ask.presence_penalty)
    if ask.min_p and ask.temperature:
        by = np.float32(1.0 / ask.temperature)
        least = x.max() * by + np.float32(math.log(ask.min_p))
        x[x * by < least] = -np.inf
    return [float(value) for value in x]


@functools.lru_cache(maxsize=1 << 16)
def sampled_token(
    row: tuple[float, ...],
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    """What ``row`` of logits becomes. It is asked again for each draft of a token, and at its
    check."""
    return int(
        sample_tokens_reference(
            torch.tensor([row]),
            SampleInputs(
                torch.tensor([inverse_temperature]),
                torch.tensor([top_k], dtype=torch.int32),
                torch.tensor([top_p]),
                torch.tensor([seed]),
                torch.tensor([position]),
            ),
        )
    )


def decode_alone(
    ask: Ask,
    logits_of: Callable[[list[int]], list[float]] | None = None,
    changes: Sequence[tuple[int, Ask]] = (),
) -> tuple[list[int], str]:
    """Tokens and finish reason of one request. From generated token ``start`` on it is sampled as
    ``changed`` says, for each ``(start, changed)`` of ``changes`` in order."""
    tokens = list(ask.prompt)
    generated: list[int] = []
    while True:
        row = logits_of(tokens) if logits_of else hash_logits(hash_history(tokens))
        by = next((a for start, a in reversed(changes) if start <= len(generated)), ask)
        row = process_row(row, by, tokens)
        if max(row) == -math.inf:
            return generated, "error"
        if by.temperature == 0 or by.top_k == 1:
            token = max(range(len(row)), key=lambda v: (row[v], -v))
        else:
            token = sampled_token(
                tuple(row), 1.0 / by.temperature, by.top_k, by.top_p, by.seed, len(tokens)
            )
        tokens.append(token)
        generated.append(token)
        if token in ask.stop_ids or _ends_by_text(ask, generated):
            return generated, "stop"
        if len(generated) == ask.max_new:
            return generated, "length"


def _ends_by_text(ask: Ask, generated: list[int]) -> bool:
    if ask.regex is not None and not ask.stop_ids:
        text = text_of(generated)
        if regex.fullmatch(ask.regex, text) and not regex_allows(ask.regex, text, ()):
            return True
    if len(generated) <= ask.min_tokens or not ask.stop_words:
        return False
    before, text = text_of(generated[:-1]), text_of(generated)
    ends = (text[: len(before) + new + 1] for new in range(len(text) - len(before)))
    return any(end.endswith(ask.stop_words) for end in ends)


def decode_with_salts(
    ask: Ask,
    salts: list[tuple[int, int]],
    changes: Sequence[tuple[int, Ask]] = (),
    history: Callable[[list[int], int], int] = hash_history,
) -> tuple[list[int], str]:
    """As :func:`decode_alone`, with weights that change: from generated token ``start`` on the
    whole history is hashed with ``salt``, for each ``(start, salt)`` in order."""

    def logits_of(tokens: list[int]) -> list[float]:
        generated = len(tokens) - len(ask.prompt)
        salt = next((s for start, s in reversed(salts) if start <= generated), 0)
        return hash_logits(history(tokens, salt))

    return decode_alone(ask, logits_of, changes)
