"""Which way a layer's experts are computed outside of the kernels of decode steps."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.gemm import batch_invariant
from megatron_async.kernels.moe.reference import Routing, expert_mlp

HAS_TRITON = importlib.util.find_spec("triton") is not None
FEW_TOKENS = 64
"""For as many tokens or fewer the grouped GEMMs of PyTorch stay."""
_ALIGNMENT = 8
"""Sizes are multiples of it, so that rows begin at multiples of 16 bytes."""


def grouped_takes(hidden: Tensor, *weights: Tensor | None) -> bool:
    """Whether ``kernels/moe/grouped.py`` computes the experts of ``hidden [T, H]``: on a GPU, for
    more than :data:`FEW_TOKENS` tokens, in bfloat16, without gradients, and not to be
    batch-invariant, which has another order of sums.

    Args:
        weights: the parameters, None for those that there are not.
    """
    if not (trial.GROUPED_EXPERTS and HAS_TRITON and hidden.is_cuda):
        return False
    if hidden.shape[0] <= FEW_TOKENS or batch_invariant.is_on():
        return False
    given = [hidden, *(weight for weight in weights if weight is not None)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return all(map(_is_covered, given))


def _is_covered(tensor: Tensor) -> bool:
    if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
        return False
    return tensor.shape[-1] % _ALIGNMENT == 0 and tensor.data_ptr() % 16 == 0


def experts_of(layer: Any, hidden: Tensor, routing: Routing) -> Tensor:
    """``[T, H]``: what the experts of a layer that this rank has add up to for each token.

    Args:
        layer: a :class:`~.layer.MoELayer`, or what has its attributes.
        hidden: ``[T, H]``.
        routing: by the numbers of this rank's experts.
    """
    w1, w2, b1, b2 = layer.weights
    if not grouped_takes(hidden, w1, w2, b1, b2):
        return expert_mlp(hidden, routing, w1, w2, layer.activation, b1=b1, b2=b2)
    from megatron_async.kernels.moe.grouped import grouped_experts

    return grouped_experts(
        hidden, routing, w1, w2, layer.activation, b1=b1, b2=b2,
        num_experts=layer.settings.num_experts,
    )  # fmt: skip
