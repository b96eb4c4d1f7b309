"""SiLU of the first half of a row times its second half (arXiv:2002.05202).

One Triton kernel in place of two. It reads 2 T F elements and writes T F.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.pdl import pdl_enter, uses_pdl

BLOCK, WARPS = 1024, 4
"""Columns of a program, and its warps: neither changes bits."""


@triton.jit
def gated(gate, up):
    """SiLU of ``gate`` times ``up``, float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate_ptr = x_ptr + row * 2 * columns + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = gated(gate, up)
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(x: Tensor) -> Tensor:
    """``[..., 2F] -> [..., F]``, computed in fp32 and rounded once; each element by itself."""
    columns = x.shape[-1] // 2
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        pdl = uses_pdl(x.device)
        grid = (out.numel() // columns, triton.cdiv(columns, BLOCK))
        _swiglu_kernel[grid](x, out, columns, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS, launch_pdl=pdl)
    return out


def swiglu_reference(x: Tensor) -> Tensor:
    """:func:`swiglu` with PyTorch."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
