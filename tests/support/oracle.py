"""What a request must produce, decoded alone: a few lines of Python, no cache and no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_async.sampling.sample import sample_tokens_reference
from tests.support.hash_model import hash_history, hash_logits


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
        if by.temperature == 0 or by.top_k == 1:
            token = max(range(len(row)), key=lambda v: (row[v], -v))
        else:
            token = int(
                sample_tokens_reference(
                    torch.tensor([row]),
                    torch.tensor([1.0 / by.temperature]),
                    torch.tensor([by.top_k], dtype=torch.int32),
                    torch.tensor([by.top_p]),
                    torch.tensor([by.seed]),
                    torch.tensor([len(tokens)]),
                )
            )
        tokens.append(token)
        generated.append(token)
        if token in ask.stop_ids:
            return generated, "stop"
        if len(generated) == ask.max_new:
            return generated, "length"


def decode_with_salts(
    ask: Ask, salts: list[tuple[int, int]], changes: Sequence[tuple[int, Ask]] = ()
) -> tuple[list[int], str]:
    """As :func:`decode_alone`, with weights that change: from generated token ``start`` on the
    whole history is hashed with ``salt``, for each ``(start, salt)`` in order."""

    def logits_of(tokens: list[int]) -> list[float]:
        generated = len(tokens) - len(ask.prompt)
        salt = next((s for start, s in reversed(salts) if start <= generated), 0)
        return hash_logits(hash_history(tokens, salt))

    return decode_alone(ask, logits_of, changes)
