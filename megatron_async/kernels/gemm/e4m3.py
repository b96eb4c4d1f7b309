"""E4m3 weights times their scales, in one Triton kernel that reads each number once."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 4


@triton.jit
def _multiply_out_kernel(
    numbers_ptr, scale_ptr, out_ptr, columns, groups, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    bits = tl.load(numbers_ptr + row * columns + column, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + row * groups + column // width, mask=mask, other=0.0)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    subnormal = mantissa.to(tl.float32) * 0.001953125  # 2 ** -9
    normal = ((exponent + 120) << 23) | (mantissa << 20)
    size = tl.where(exponent == 0, subnormal.to(tl.int32, bitcast=True), normal)
    value = (size | ((bits & 128) << 24)).to(tl.float32, bitcast=True) * scale
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=mask)


def multiply_out(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`megatron_async.models.quantized.values.multiply_out`, bit for bit, of contiguous
    numbers none of which is NaN."""
    columns, groups = weight.shape[-1], scale.shape[-1]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if out.numel():
        grid = (out.numel() // columns, triton.cdiv(columns, BLOCK))
        _multiply_out_kernel[grid](
            weight.view(torch.uint8), scale, out, columns, groups, columns // groups,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out
