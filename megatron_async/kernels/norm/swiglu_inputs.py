"""SwiGLU, and its rows as e4m3 for the linear layer behind it.

:func:`~megatron_async.kernels.norm.swiglu.swiglu` and
:func:`~megatron_async.kernels.gemm.e4m3_inputs.quantize_inputs` in one Triton kernel. It reads 2 T
F elements and writes T F bytes: what is quantized is rounded as ``swiglu`` does, and not stored.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.gemm.e4m3_inputs import (
    empty_inputs,
    rounds_once,
    store_row,
    tile_of,
)
from megatron_async.kernels.norm.swiglu import gated, rounded_to_bfloat16


@triton.jit
def _swiglu_inputs_kernel(
    x_ptr, static_ptr, numbers_ptr, scale_ptr, groups, width,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = groups * width
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (group < groups) & (place < width)
    gate_ptr = x_ptr + row * 2 * columns + group * width + place
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = gated(gate, up, NATIVE)
    if NATIVE and x_ptr.dtype.element_ty == tl.bfloat16:
        x = rounded_to_bfloat16(out)
    else:
        x = out.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_row(
        x, row, static_ptr, numbers_ptr, scale_ptr, groups, width, GROUPS, WIDTH, STATIC, NATIVE
    )


def swiglu_inputs(x: Tensor, groups: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``quantize_inputs(swiglu(x), groups, static)`` for ``x [..., 2F]``: e4m3 ``[..., F]`` and
    fp32 ``[..., groups]``; a row's bits depend on it alone."""
    columns = x.shape[-1] // 2
    x = x.contiguous()
    numbers, scale = empty_inputs(x, columns, groups)
    if numbers.numel():
        _swiglu_inputs_kernel[(numbers.numel() // columns,)](
            x, scale if static is None else static, numbers.view(torch.uint8), scale, groups,
            columns // groups, STATIC=static is not None, NATIVE=rounds_once(x.device),
            **tile_of(columns, groups)[1],
        )  # fmt: skip
    return numbers, scale
