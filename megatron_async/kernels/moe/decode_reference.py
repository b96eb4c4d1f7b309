"""What the kernels of a decode step's experts compute, with PyTorch, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.kernels.moe.mxfp4 import PACKED, unpack
from megatron_async.kernels.moe.reference import (
    Routing,
    activate,
    expert_mlp,
    held_experts,
    route,
    router_logits,
)
from megatron_async.kernels.moe.shape import Live, MoeShape, MoeWeights


def norm_reference(
    shape: MoeShape, weights: MoeWeights, hidden: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normed rows, rounded as ``hidden``, and logits ``[T, experts]``, with PyTorch, in fp32."""
    wide = _widened(weights)
    norm_weight, norm_bias = wide.norm
    size = (shape.hidden,)
    if shape.center:
        normed = F.layer_norm(hidden.float(), size, norm_weight, norm_bias, eps)
    else:
        normed = F.rms_norm(hidden.float(), size, norm_weight, eps)
    normed = normed.to(hidden.dtype).float()
    return normed, router_logits(normed, wide.router, wide.router_bias)


def moe_decode_reference(
    shape: MoeShape,
    weights: MoeWeights,
    hidden: Tensor,
    eps: float,
    *,
    live: Live | None = None,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Tensor:
    """What :class:`~.decode.MoeDecode` writes to ``out``, with PyTorch, in fp32.

    Args:
        routing: in place of what the router chooses, whose last bits decide between equals.
    """
    wide = _widened(weights)
    mask = None if live is None else live.values >= live.first
    normed, logits = norm_reference(shape, weights, hidden, eps)
    if routing is None:
        chosen = route(logits, shape.settings, expert_bias=wide.expert_bias, live=mask)
        routing = held_experts(chosen, shape.expert_begin, shape.held)
    total = expert_mlp(normed, routing, wide.w1, wide.w2, shape.activation, b1=wide.b1, b2=wide.b2)
    if wide.shared_w1 is not None and wide.shared_w2 is not None:
        activated = activate(F.linear(normed, wide.shared_w1), shape.activation)
        shared = F.linear(activated, wide.shared_w2)
        if wide.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(normed, wide.shared_gate))
        total = total + (shared if mask is None else shared.masked_fill(~mask[:, None], 0.0))
    if residual is not None:
        total = total + residual.float()
    return total.to(hidden.dtype)


def _widened(weights: MoeWeights) -> MoeWeights:
    norm_weight, norm_bias = weights.norm
    norm = norm_weight.float(), None if norm_bias is None else norm_bias.float()
    if weights.w1.dtype == PACKED and weights.w1_scale is not None and weights.w2_scale is not None:
        w1, w2 = unpack(weights.w1, weights.w1_scale), unpack(weights.w2, weights.w2_scale)
        weights = weights._replace(w1=w1, w2=w2, w1_scale=None, w2_scale=None)
    wide = {
        name: None if part is None else part.float()
        for name, part in weights._asdict().items()
        if name != "norm"
    }
    for name in ("w1", "w2", "shared_w1", "shared_w2"):
        scale, weight = wide.pop(f"{name}_scale"), wide[name]
        if scale is not None and weight is not None:
            groups = weight.unflatten(-1, (scale.shape[-1], -1))
            wide[name] = (groups * scale[..., None]).flatten(-2)
    return MoeWeights(norm=norm, **wide)  # type: ignore[arg-type]
