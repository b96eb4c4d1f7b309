"""A model whose every token depends on the whole history that it reads back from the cache.

It stores token ids in the paged KV cache and derives its logits from a hash of the ids that it
finds there through the block table. One stale write, wrong block or lost row changes all later
tokens of a request. ``oracle.py`` computes the same without any cache. All arithmetic is exact,
on the CPU and inside a CUDA graph.
"""

from __future__ import annotations

import torch

from megatron_async.context import DynamicInferenceContext
from megatron_async.models.wrapper import KVCacheSpec

VOCAB_SIZE = 61
MODULUS = 2**31 - 1
MAX_LENGTH = 256
WEIGHTS = [pow(48271, position + 1, MODULUS) for position in range(MAX_LENGTH)]


def hash_history(tokens: list[int], salt: int = 0) -> int:
    """Hash of all tokens in their order; ``salt`` stands for the weights."""
    return sum((token + 1 + 97 * salt) * WEIGHTS[p] for p, token in enumerate(tokens)) % MODULUS


def hash_logits(state: int) -> list[float]:
    """Logits of the next token, multiples of 1/64."""
    return [(state * (2 * v + 1) + 7919 * v) % MODULUS % 512 / 64.0 for v in range(VOCAB_SIZE)]


class HashModel:
    """Reads and writes the cache like a real model; everything else is integer arithmetic."""

    def __init__(self, device: str = "cpu") -> None:
        self.vocab_size = VOCAB_SIZE
        self.max_sequence_length = MAX_LENGTH
        self.logits_dtype = torch.float32
        self.kv_cache_spec = KVCacheSpec(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int64
        )
        self._positions = torch.arange(MAX_LENGTH, device=device)
        self._weights = torch.tensor(WEIGHTS, device=device)
        self._ids = torch.arange(VOCAB_SIZE, device=device)
        self._salt = torch.zeros(1, dtype=torch.int64, device=device)

    def update_weights(self, source: dict[str, int]) -> None:
        """The only weight is the salt."""
        self._salt.fill_(source["salt"])

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: DynamicInferenceContext
    ) -> torch.Tensor:
        block_size = context.block_size_tokens
        cells = context.kv_cache[0, 0, :, :, 0, 0].view(-1)
        # A key depends on the weights that computed it: stale ones show.
        cells[context.slot_mapping] = token_ids + 97 * self._salt
        slots, lengths = context.token_slots, position_ids + 1
        if context.last_token_index is not None:
            slots = slots[context.last_token_index]
            lengths = lengths[context.last_token_index]
        blocks = context.block_table[slots][:, self._positions // block_size]
        history = cells[blocks * block_size + self._positions % block_size]
        terms = torch.where(self._positions < lengths[:, None], (history + 1) * self._weights, 0)
        state = terms.sum(dim=1, keepdim=True) % MODULUS
        mixed = (state * (2 * self._ids + 1) + 7919 * self._ids) % MODULUS % 512
        return mixed.to(torch.float32) / 64.0
