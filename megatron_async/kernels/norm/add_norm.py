"""Residual addition and the norm that follows it; also RMSNorm and LayerNorm alone.

One Triton kernel in place of two, or three with a bias. It reads 2 T N elements and writes 2 T N.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.pdl import pdl_enter, uses_pdl

MAX_COLUMNS = 32768
"""A row is one program's tile; longer ones go to the reference."""


@triton.jit
def _add_norm_kernel(
    x_ptr, x_bias_ptr, residual_ptr, weight_ptr, bias_ptr, hidden_ptr, out_ptr, columns, eps,
    BLOCK: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    CENTER: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """One row. The sum is rounded before the statistics, which see what the next layer sees."""
    pdl_enter(PDL)
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SEGMENTS):
        x_ptr += tl.num_programs(0).to(tl.int64) * columns
        x += tl.load(x_ptr + start + column, mask=mask, other=0.0)
    if SEGMENTS > 0:
        x = x.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    if HAS_X_BIAS:
        x += tl.load(x_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + start + column, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if CENTER:
        x = tl.where(mask, x - tl.sum(x, 0) / columns, 0.0)
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps))
    out *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + OFFSET
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    *,
    center: bool | None = None,
    offset: float = 0.0,
    in_segments: bool = False,
) -> tuple[Tensor, Tensor]:
    """``hidden = x + x_bias + residual`` and its RMSNorm; with a ``bias``, its LayerNorm.

    Args:
        x, residual: ``[..., N]``. Without a residual ``x`` itself is normed, and returned.
        weight, bias: ``[N]``, of the norm.
        x_bias: ``[N]``, added to ``x`` only if there is a residual.
        center: LayerNorm, not RMSNorm; None means that there is a bias.
        offset: added to the weight in fp32.
        in_segments: ``x`` is fp32 ``[segments, ..., N]``. It is added up first, one after the
            other, and rounded to the dtype of the residual, which must be there.

    Returns:
        ``hidden`` and the normed ``hidden``, both like ``x``, or the residual if there is one; a
        row's bits depend on it alone.
    """
    columns = x.shape[-1]
    center = bias is not None if center is None else center
    like = x
    if in_segments:
        assert residual is not None
        like = residual
    if columns > MAX_COLUMNS:
        x = x.sum(0).to(like.dtype) if in_segments else x
        return add_norm_reference(
            x, residual, weight, bias, eps, x_bias, center=center, offset=offset
        )
    flat = x.contiguous()
    hidden = flat if residual is None else like.new_empty(like.shape)
    out = like.new_empty(like.shape)
    if out.numel():
        block, pdl = triton.next_power_of_2(columns), uses_pdl(x.device)
        _add_norm_kernel[(out.numel() // columns,)](
            flat, flat if x_bias is None else x_bias,
            flat if residual is None else residual.contiguous(), weight,
            weight if bias is None else bias, hidden, out, columns, eps,
            BLOCK=block, HAS_X_BIAS=x_bias is not None and residual is not None,
            HAS_RESIDUAL=residual is not None, CENTER=center, HAS_BIAS=bias is not None,
            OFFSET=offset, PDL=pdl, SEGMENTS=x.shape[0] if in_segments else 0,
            num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
        )  # fmt: skip
    return hidden, out


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    *,
    center: bool | None = None,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """:func:`add_norm` with PyTorch."""
    center = bias is not None if center is None else center
    hidden = x
    if residual is not None:
        hidden = (x.float() + residual + (0 if x_bias is None else x_bias.float())).to(x.dtype)
    wide = hidden
    if offset:
        wide, weight = hidden.float(), weight.float() + offset
        bias = None if bias is None else bias.float()
    if center:
        normed = F.layer_norm(wide, weight.shape, weight, bias, eps)
    else:
        normed = F.rms_norm(wide, weight.shape, weight, eps)
    return hidden, normed.to(hidden.dtype)
