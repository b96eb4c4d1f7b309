"""Norms and activations on a GPU that quantize what they hand to a linear layer.

Each is linked with the layer behind it (``feeds.py``). Its result carries e4m3 and scales for that
layer, ``result.quantized``, and no other reads them: a norm's result is the normed rows as ever; an
activation's, which nothing but the layer reads, is the numbers themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.scaled_e4m3 import Sums


class Quantized(NamedTuple):
    """What a tensor is for ``layer``: e4m3 ``numbers``, None for the tensor itself, with ``scale``;
    ``dtype`` is that of the rows."""

    layer: Any
    numbers: Tensor | None
    scale: Tensor
    dtype: torch.dtype


def add_norm(
    norm: Any, linear: Any, x: Tensor | Sums, residual: Tensor | None, x_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``hidden = x + x_bias + residual`` and the normed ``hidden``, quantized for ``linear``. Of
    ``Sums`` ``x`` is what they are by their scales, in the dtype of the residual."""
    from megatron_async.kernels.norm.norm_inputs import add_norm_inputs

    hidden, normed, (numbers, scale) = add_norm_inputs(
        x, residual, norm.weight, norm.bias, norm.eps, x_bias, center=norm.center,
        offset=norm.offset, groups=linear.weight_scale.shape[1], static=linear.input_scale,
    )  # fmt: skip
    normed.quantized = Quantized(linear, numbers, scale, normed.dtype)  # type: ignore[attr-defined]
    return hidden, normed


def swiglu(linear: Any, x: Tensor) -> Tensor:
    """E4m3 of ``x [..., 2F]``, quantized for ``linear``, that nobody else may read."""
    from megatron_async.kernels.norm.swiglu_inputs import swiglu_inputs

    numbers, scale = swiglu_inputs(x, linear.weight_scale.shape[1], linear.input_scale)
    numbers.quantized = Quantized(linear, None, scale, x.dtype)  # type: ignore[attr-defined]
    return numbers
