"""The embedding of a rank that has some token ids, in operations that a graph can hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding  # isort: skip


class ShardedEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """megatron's, which in inference indexes nothing by a mask: that may wait for the device."""

    def forward(self, input_: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self.reduce_scatter_embeddings:
            embedded: Tensor = super().forward(input_)
            return embedded
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        own = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        output = F.embedding(own, self.weight).masked_fill(elsewhere[..., None], 0.0)
        dist.all_reduce(output, group=self.tp_group)
        return output


def shard_embedding(embedding: Any) -> None:
    """Make the word embeddings of several tensor-parallel ranks such, in place."""
    words = embedding.word_embeddings
    if type(words) is VocabParallelEmbedding and words.tp_group.size() > 1:
        words.__class__ = ShardedEmbedding
