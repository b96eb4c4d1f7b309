"""A model whose every token depends on the whole history that it reads back from the cache.

It stores token ids in the paged KV cache and derives its logits from a hash of the ids that it
finds there through the block table. One stale write, wrong block or lost row changes all later
tokens of a request. ``oracle.py`` computes the same without any cache. All arithmetic is exact,
on the CPU and inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.network import Network
from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.hash_tokenizer import VOCAB_SIZE

MODULUS = 2**31 - 1
MAX_LENGTH = 256
WEIGHTS = [pow(48271, position + 1, MODULUS) for position in range(MAX_LENGTH)]


def hash_history(tokens: list[int], salt: int = 0) -> int:
    """Hash of all tokens in their order; ``salt`` stands for the weights."""
    shallow = deep = 0
    for token, weight in zip(tokens, WEIGHTS, strict=False):
        shallow = (shallow + (token + 97 * salt + 1) * weight) % MODULUS
        deep = (deep + (shallow + 1) * weight) % MODULUS
    return deep


def hash_logits(state: int) -> list[float]:
    """Logits of the next token, multiples of 1/64."""
    return [(state * (2 * v + 1) + 7919 * v) % MODULUS % 512 / 64.0 for v in range(VOCAB_SIZE)]


class HashModel(Network):
    """Reads and writes the cache like a real model; everything else is integer arithmetic.

    Two layers: what the second one stores for a token depends on all tokens before it, as the keys
    of a real model do. A block found by its own tokens under another prefix is wrong, and so are
    keys computed by other weights.
    """

    history = staticmethod(hash_history)
    """What its logits are made of."""

    salt: torch.Tensor
    """The weights, int64 [1]."""

    def __init__(self, device: str = "cpu") -> None:
        self.vocab_size = VOCAB_SIZE
        self.max_sequence_length = MAX_LENGTH
        self.logits_dtype = torch.float32
        self.kv_cache_spec = KVCacheSpec(
            num_layers=2, num_kv_heads=1, head_dim=1, dtype=torch.int64
        )
        self._positions = torch.arange(MAX_LENGTH, device=device)
        self._weights = torch.tensor(WEIGHTS, device=device)
        ids = torch.arange(VOCAB_SIZE, device=device)
        self._id_factors, self._id_terms = 2 * ids + 1, 7919 * ids
        self.salt = torch.zeros(1, dtype=torch.int64, device=device)

    def further_layers(
        self,
        state: torch.Tensor,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: ForwardBatch,
    ) -> torch.Tensor:
        """What comes behind the attention layers, of which ``state`` [T] is the output."""
        return state

    def update_weights(self, source: dict[str, int]) -> None:
        """The only weight is the salt."""
        self.salt.fill_(source["salt"])

    def read_weights(self, source: Any, **checks: bool) -> Callable[[], None]:
        return partial(self.update_weights, source)

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: ForwardBatch
    ) -> torch.Tensor:
        block_size = context.block_size_tokens
        count = context.max_sequence_length
        if position_ids.device.type == "cpu":  # a captured graph has all lengths
            count = min(count, int(position_ids.max()) + 1)
        positions = self._positions[: max(count, 0)]
        blocks = context.block_table[context.token_slots][:, positions // block_size]
        places = blocks * block_size + positions % block_size
        seen = positions <= position_ids[:, None]
        state, weights = token_ids + 97 * self.salt, self._weights[: len(positions)]
        for layer in (0, 1):
            cells = context.kv_cache[layer, 0, :, :, 0, 0].view(-1)
            cells[context.slot_mapping] = state
            terms = (cells[places] + 1) % MODULUS * weights % MODULUS
            state = torch.where(seen, terms, 0).sum(dim=1) % MODULUS
        state = self.further_layers(state, token_ids, position_ids, context)
        if context.last_token_index is not None:
            state = state[context.last_token_index]
        mixed = (state[:, None] * self._id_factors + self._id_terms) % MODULUS % 512
        return mixed.to(torch.float32) / 64.0
