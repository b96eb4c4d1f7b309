"""A model whose every token depends on the whole history that it reads back from the cache.

It stores token ids in the paged KV cache and derives its logits from a hash of the ids that it
finds there through the block table. One stale write, wrong block or lost row changes all later
tokens of a request. ``oracle.py`` computes the same without any cache.
"""

from __future__ import annotations

import torch

from megatron_async.context import DynamicInferenceContext
from megatron_async.models.wrapper import KVCacheSpec

VOCAB_SIZE = 61
MODULUS = 2**31 - 1


def hash_history(tokens: list[int]) -> int:
    """Order-dependent hash of all tokens."""
    state = 17
    for token in tokens:
        state = (state * 1103515245 + token + 12345) % MODULUS
    return state


def hash_logits(state: int) -> list[float]:
    """Logits of the next token; multiples of 1/64, so every path computes them exactly."""
    return [((state * (2 * v + 1) + 7919 * v) % MODULUS % 512) / 64.0 for v in range(VOCAB_SIZE)]


class HashModel:
    """Reads and writes the cache like a real model; everything else is integer arithmetic."""

    def __init__(self, max_sequence_length: int = 256) -> None:
        self.vocab_size = VOCAB_SIZE
        self.max_sequence_length = max_sequence_length
        self.logits_dtype = torch.float32
        self.kv_cache_spec = KVCacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int64
        )

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: DynamicInferenceContext
    ) -> torch.Tensor:
        block_size = context.block_size_tokens
        cells = context.kv_cache[0, 0, :, :, 0, 0].view(-1)
        cells[context.slot_mapping] = token_ids
        index = context.last_token_index
        if index is None:
            index = torch.arange(token_ids.shape[0])
        rows = []
        for token in index.tolist():
            slot = int(context.token_slots[token])
            table = context.block_table[slot]
            history = [
                int(cells[int(table[p // block_size]) * block_size + p % block_size])
                for p in range(int(position_ids[token]) + 1)
            ]
            rows.append(hash_logits(hash_history(history)))
        return torch.tensor(rows, dtype=torch.float32)
