"""Embedding and output layer with multipliers and a soft cap.

Training reads the same modules, so loss and inference agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)

from megatron.core.models.common.embeddings.language_model_embedding import (  # isort: skip
    LanguageModelEmbedding,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # isort: skip


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """megatron's embedding times a number."""

    multiplier: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = super().forward(*args, **kwargs)
        # Rounded as Gemma was trained; what is exact in the dtype stays as it is.
        return embedded * float(torch.tensor(self.multiplier, dtype=embedded.dtype))


class ScaledOutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """megatron's output layer; its logits are multiplied, then capped by a tanh."""

    multiplier: float
    soft_cap: float | None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        logits, bias = super().forward(*args, **kwargs)
        if self.multiplier != 1:
            logits = logits * self.multiplier
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits, bias


def scale_embedding(embedding: LanguageModelEmbedding, multiplier: float) -> None:
    """Make ``embedding`` multiply by ``multiplier``, in place."""
    if multiplier != 1:
        embedding.__class__ = ScaledEmbedding
        embedding.multiplier = multiplier


def scale_logits(layer: ColumnParallelLinear, multiplier: float, soft_cap: float | None) -> None:
    """Make the output layer multiply and cap its logits, in place."""
    if multiplier != 1 or soft_cap is not None:
        layer.__class__ = ScaledOutputLayer
        layer.multiplier, layer.soft_cap = multiplier, soft_cap
