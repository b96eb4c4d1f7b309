"""Inputs of linear layers as e4m3, so that both factors of a product are.

A layer that quantizes its input has weights in e4m3 with ``groups`` scales a row (``values.py``).
Its input has as many scales a token: one, or one for each group of columns, chosen by the largest
value of each (DeepSeek-V3, arXiv:2412.19437); or one that the checkpoint brings, for all tokens.
:func:`quantize_inputs` and :func:`product` define the numbers. The CPU runs them, and the kernels
(``kernels/gemm/e4m3_inputs.py``, ``kernels/gemm/scaled_e4m3.py``) give the same up to the order of
sums.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.models.quantized.values import E4M3, LARGEST, quantize

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.scaled_e4m3 import Sums

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Inputs(NamedTuple):
    """``numbers`` e4m3 ``[..., k]`` with ``scale`` fp32 ``[..., groups]``: what they stand for is
    their product, group by group."""

    numbers: Tensor
    scale: Tensor


def quantize_inputs(x: Tensor, groups: int, static: Tensor | None = None) -> Inputs:
    """``x [..., k]`` as e4m3, to the nearest, ties to even.

    Args:
        x: of any float dtype.
        groups: scales of a token.
        static: fp32 ``[1]``, the scale of all; values beyond 448 times it become that. None chooses
            one for each group: its largest value becomes 448.

    Returns:
        Numbers and scales. A group that has a NaN or an infinity has a NaN.
    """
    if static is None:
        return Inputs(*quantize(x, groups))
    wide = x.float()
    numbers = (wide / static).clamp(-LARGEST, LARGEST)
    numbers = numbers.masked_fill(~wide.isfinite(), float("nan")).to(E4M3)
    return Inputs(numbers, static.expand(*x.shape[:-1], groups).contiguous())


def product(inputs: Inputs, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs times a weight: exact products of e4m3 are added up in fp32 within each group, the
    sums are multiplied by both scales and added up in fp32, and the total is rounded once.

    Args:
        inputs: numbers ``[..., k]``, scales ``[..., groups]``.
        weight: e4m3 ``[n, k]``.
        weight_scale: fp32 ``[n, groups]``.

    Returns:
        ``[..., n]`` in ``dtype``. On the CPU a row depends on itself alone, for any number of rows
        that is a multiple of 8.
    """
    groups = weight_scale.shape[1]
    parts = inputs.numbers.float().chunk(groups, -1), weight.float().chunk(groups, -1)
    total = None
    for group, (x, w) in enumerate(zip(*parts, strict=True)):
        sums = F.linear(x.contiguous(), w.contiguous())
        scaled = sums * inputs.scale[..., group, None] * weight_scale[:, group]
        total = scaled if total is None else total + scaled
    assert total is not None
    return total.to(dtype)


def product_of(layer: Any, x: Tensor) -> Tensor:
    """``x [..., k]``, quantized, times the weight of a layer that keeps e4m3: ``[..., n]`` in the
    dtype of ``x``."""
    if x.is_cuda and HAS_TRITON:
        return product_by_kernels(layer, x)
    inputs = quantize_inputs(x, layer.weight_scale.shape[1], layer.input_scale)
    return product(inputs, layer.weight, layer.weight_scale, x.dtype)


def product_by_kernels(layer: Any, x: Tensor) -> Tensor:
    """:func:`product_of` with Triton and cuBLAS. What was in front may have quantized ``x`` already
    (``fused_inputs.py``).

    Raises:
        TypeError: ``x`` is in e4m3, and not quantized for this layer.
    """
    from megatron_async.kernels.gemm import scaled_e4m3
    from megatron_async.kernels.gemm.invariant import mode as batch_invariant

    weight, weight_scale = layer.weight, layer.weight_scale
    inputs, dtype = _inputs_by_kernels(layer, x)
    if not scaled_e4m3.takes(x.shape[-1], weight_scale.shape[1]):
        return product(inputs, weight, weight_scale, dtype)
    by_row, unit = batch_invariant.is_on(), layer.unit_scale
    return scaled_e4m3.multiply(*inputs, weight, weight_scale, dtype, by_row=by_row, unit=unit)


def sums_by_kernels(layer: Any, x: Tensor) -> Sums | None:
    """:func:`product_by_kernels` before its scales: the caller multiplies by them and rounds to
    the dtype of the rows. None where the product is not made so."""
    from megatron_async.kernels.gemm import scaled_e4m3
    from megatron_async.kernels.gemm.invariant import mode as batch_invariant

    weight, weight_scale, unit = layer.weight, layer.weight_scale, layer.unit_scale
    groups, made = weight_scale.shape[1], getattr(x, "quantized", None)
    dtype = x.dtype if made is None else made.dtype
    rows = x.numel() // x.shape[-1]
    if (
        unit is None
        or not rows
        or batch_invariant.is_on()
        or not scaled_e4m3.library_takes(weight, groups, dtype)
        or not scaled_e4m3.has_few_results(rows, len(weight))
    ):
        return None
    numbers, scale = _inputs_by_kernels(layer, x)[0]
    flat = numbers.reshape(rows, -1).contiguous(), scale.reshape(rows, 1).contiguous()
    return scaled_e4m3.sums_by_library(*flat, weight, weight_scale, unit)


def _inputs_by_kernels(layer: Any, x: Tensor) -> tuple[Inputs, torch.dtype]:
    """What a layer multiplies, quantized in front or now, and the dtype of the rows.

    Raises:
        TypeError: see :func:`product_by_kernels`.
    """
    from megatron_async.kernels.gemm import e4m3_inputs

    made, groups = getattr(x, "quantized", None), layer.weight_scale.shape[1]
    if made is not None and made.layer is layer:
        return Inputs(x if made.numbers is None else made.numbers, made.scale), made.dtype
    if x.dtype == E4M3:
        raise TypeError("numbers in e4m3 have come without their scale, or for another layer")
    by_kernel = e4m3_inputs.takes(x.shape[-1], groups, x.dtype)
    quantize = e4m3_inputs.quantize_inputs if by_kernel else quantize_inputs
    return Inputs(*quantize(x, groups, layer.input_scale)), x.dtype
