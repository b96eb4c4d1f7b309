"""Which way a layer's experts are computed outside of the kernels of decode steps."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.gemm.invariant import mode as batch_invariant
from megatron_async.kernels.moe.reference import Routing, expert_mlp, route, router_logits
from megatron_async.kernels.moe.settings import RouterSettings
from megatron_async.models.quantized.values import KEPT, is_packed

HAS_TRITON = importlib.util.find_spec("triton") is not None
FEW_TOKENS = 64
"""For as many tokens or fewer the grouped GEMMs of PyTorch stay."""
_MOST_EXPERTS, _MOST_CHOSEN = 512, 16
_ROW_BYTES, _LEAST_STEP = 16, 16
"""Bytes that a row begins at a multiple of, and the fewest columns of a product's step."""


class KeptWeights(NamedTuple):
    """:class:`~.layer.ExpertWeights` as they are in memory.

    Where the first two are e4m3 they have scales, fp32 ``[experts, 2 I or I, groups]`` and
    ``[experts, H, groups]``; as MXFP4 they are uint8, and so are their scales, see
    ``kernels/moe/mxfp4.py``.
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None


def _kernels_take(*given: Tensor | None) -> bool:
    """Whether kernels of many tokens run for parameters and ``hidden [T, H]``, the first: on a GPU,
    for more than :data:`FEW_TOKENS` tokens in bfloat16, without gradients, and not to be
    batch-invariant, which has another order of sums."""
    hidden = given[0]
    if not (trial.GROUPED_EXPERTS and HAS_TRITON and hidden is not None and hidden.is_cuda):
        return False
    if hidden.shape[0] <= FEW_TOKENS or batch_invariant.is_on() or not _is_covered(hidden):
        return False
    needs_grad = any(tensor is not None and tensor.requires_grad for tensor in given)
    return not (torch.is_grad_enabled() and needs_grad)


def grouped_takes(hidden: Tensor, weights: KeptWeights) -> bool:
    """Whether ``kernels/moe/grouped.py`` computes the experts of ``hidden [T, H]``."""
    w1, w2, b1, b2, *scales = weights
    if not _kernels_take(hidden, w1, w2, b1, b2) or w1.dtype != w2.dtype:
        return False
    if not all(_is_covered(bias) for bias in (b1, b2) if bias is not None):
        return False
    of_each = zip((w1, w2), scales, strict=True)
    return all(_has_rows(weight) and _fits(weight, scale) for weight, scale in of_each)


def _router_takes(hidden: Tensor, router: Any, settings: RouterSettings) -> bool:
    """Whether ``wide_triton.route_many`` chooses the experts of ``hidden [T, H]``."""
    weight, bias, expert_bias = router.weight, router.bias, router.expert_bias
    if not _kernels_take(hidden, weight, bias) or not _is_covered(weight):
        return False
    if expert_bias is not None and expert_bias.dtype != torch.float32:
        return False
    return settings.num_experts <= _MOST_EXPERTS and settings.top_k <= _MOST_CHOSEN


def routing_of(
    layer: Any, hidden: Tensor, *, live: Tensor | None, chosen: Tensor | None
) -> Routing:
    """The experts of ``hidden [T, H]`` by a layer's router, see :func:`~.reference.route`."""
    router, settings = layer.router, layer.settings
    if hidden.is_cuda and chosen is None and _router_takes(hidden, router, settings):
        from megatron_async.kernels.moe.routing.wide_triton import route_many

        return route_many(
            hidden, router.weight, settings, bias=router.bias, expert_bias=router.expert_bias,
            live=live,
        )  # fmt: skip
    logits = router_logits(hidden, router.weight, router.bias)
    return route(logits, settings, expert_bias=router.expert_bias, live=live, chosen=chosen)


def _is_covered(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and _has_rows(tensor)


def _has_rows(tensor: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    whole = tensor.shape[-1] * tensor.itemsize % _ROW_BYTES == 0
    return whole and tensor.is_contiguous() and tensor.data_ptr() % _ROW_BYTES == 0


def _fits(weight: Tensor, scale: Tensor | None) -> bool:
    """Whether a weight is bfloat16, MXFP4, or e4m3 with scales of 16 columns or more."""
    if weight.dtype not in KEPT:
        return weight.dtype == torch.bfloat16
    if scale is None or not scale.is_contiguous():
        return False
    return is_packed(weight) or weight.shape[-1] // scale.shape[-1] % _LEAST_STEP == 0


def experts_of(layer: Any, hidden: Tensor, routing: Routing) -> Tensor:
    """``[T, H]``: what the experts of a layer that this rank has add up to for each token.

    Args:
        layer: a :class:`~.layer.MoELayer`, or what has its attributes.
        hidden: ``[T, H]``.
        routing: by the numbers of this rank's experts.
    """
    quantizes = getattr(layer, "quantizes_inputs", False)
    if quantizes and not hidden.is_cuda:
        from megatron_async.models.moe import quantized

        return quantized.expert_mlp(hidden, routing, layer.kept_weights, layer.activation)
    if not hidden.is_cuda or not grouped_takes(hidden, layer.kept_weights):
        w1, w2, b1, b2 = layer.weights
        return expert_mlp(hidden, routing, w1, w2, layer.activation, b1=b1, b2=b2)
    from megatron_async.kernels.moe import grouped

    kept, count = layer.kept_weights, layer.settings.num_experts
    of_expert = routing.ids.numel() / count
    is_widened = kept.w1.dtype in KEPT and of_expert <= grouped.MOST_WIDENED
    weights = grouped.GroupedWeights(*(kept if is_widened or quantizes else layer.weights))
    return grouped.grouped_experts(
        hidden, routing, weights, layer.activation, num_experts=count, quantizes=quantizes
    )
