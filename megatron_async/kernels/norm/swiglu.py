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
def gated(gate, up, COMPILED: tl.constexpr = False):
    """SiLU of ``gate`` times ``up``, float32.

    ``COMPILED`` for a GPU: the same bits with fewer instructions. An exponential below 2^-126 does
    not change one, and a quarter of both numbers has their quotient.
    """
    if COMPILED:
        exponential = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * -1.4426950408889634],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [tl.fma(exponential, 0.25, 0.25)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        out = gate * 0.25 * inverse * up
    else:
        out = gate / (1.0 + tl.exp(-gate)) * up
    return out


@triton.jit
def rounded_to_bfloat16(x):
    """Float32 ``x`` rounded to bfloat16, as float32; compiled for a GPU, two by an instruction."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 both;
        cvt.rn.bf16x2.f32 both, $3, $2;
        shl.b32 $0, both, 16;
        and.b32 $1, both, 0xffff0000;
        }
        """,
        "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


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
