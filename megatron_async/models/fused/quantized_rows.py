"""What the GEMM of a layer that quantizes its input reads: e4m3 with a scale for each row.

One kernel makes it, between the GEMM and what is in front of that. Numbers and scales are those of
the general path (``models/quantized/inputs.py``), whose layers quantize the normed rows as they are
rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import LAYER_NORM
from megatron_async.models.fused.blocks.residual import Norm, Residual, Workspace


def quantizes(linear: Any) -> bool:
    """Whether a linear layer of a block quantizes its input where its GEMM reads e4m3."""
    if not getattr(linear, "quantizes_input", False):
        return False
    from megatron_async.kernels.gemm.e4m3_inputs import takes

    return takes(linear.weight.shape[1], 1, torch.bfloat16)


def quantized_rows(linear: Any, x: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """``x`` for ``linear``: e4m3 ``[R, k]`` and fp32 ``[R, 1]``, overwritten by the next ones.

    Args:
        x: bfloat16 ``[R, k]``, contiguous.
    """
    numbers, scale = workspace.quantized(*x.shape)
    if x.is_cuda:
        from megatron_async.kernels.gemm.e4m3_inputs import quantize_rows

        quantize_rows(x, numbers, scale, linear.input_scale)
    else:
        _keep(linear, x, numbers, scale)
    return numbers, scale


def quantized_stream(linear: Any, norm: Norm, residual: Residual) -> tuple[Tensor, Tensor]:
    """The norm of the residual stream for ``linear``, see :func:`quantized_rows`."""
    hidden = residual.hidden
    numbers, scale = residual.workspace.quantized(*hidden.shape)
    center = norm.kind == LAYER_NORM
    if hidden.is_cuda:
        from megatron_async.kernels.norm.norm_inputs import norm_rows

        norm_rows(
            hidden, *norm.parameters, numbers=numbers, scale=scale, static=linear.input_scale,
            center=center,
        )  # fmt: skip
    else:
        from megatron_async.kernels.norm.add_norm import add_norm_reference

        normed = add_norm_reference(hidden, None, *norm.parameters, center=center)[1]
        _keep(linear, normed, numbers, scale)
    return numbers, scale


def _keep(linear: Any, x: Tensor, numbers: Tensor, scale: Tensor) -> None:
    from megatron_async.models.quantized.inputs import quantize_inputs

    made = quantize_inputs(x, 1, linear.input_scale)
    numbers.view(torch.uint8).copy_(made.numbers.view(torch.uint8))
    scale.copy_(made.scale)
