"""Experts in e4m3 whose inputs become e4m3 too (``quantize_activations``): the definition, which
the CPU runs. On a GPU the grouped GEMMs do (``kernels/moe/grouped.py``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_async.kernels.moe.reference import (
    Routing,
    activate,
    each_by_itself,
    weighted_sum,
)
from megatron_async.kernels.moe.settings import ExpertActivation
from megatron_async.models.quantized.inputs import product, quantize_inputs


def expert_mlp(hidden: Tensor, routing: Routing, kept: Any, activation: ExpertActivation) -> Tensor:
    """As :func:`~megatron_async.kernels.moe.reference.expert_mlp`, each product of e4m3 by e4m3.

    Args:
        hidden: ``[T, H]``.
        kept: :class:`~.compute.KeptWeights` in e4m3.
    """

    def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        out = product(quantize_inputs(x, scale.shape[-1]), weight, scale, x.dtype)
        return out if bias is None else out + bias

    def run(x: Tensor, expert: int) -> Tensor:
        w1, w2, b1, b2, one, other = (None if part is None else part[expert] for part in kept)
        assert w1 is not None and w2 is not None and one is not None and other is not None
        return linear(activate(linear(x, w1, one, b1), activation), w2, other, b2)

    out = each_by_itself(hidden, routing.ids, kept.w2.shape[1], run)
    return weighted_sum(out, routing)
