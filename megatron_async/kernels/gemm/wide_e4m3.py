"""Products with e4m3 weights for more rows than skinny GEMMs take: weights are widened on their way
into the tensor cores, and scales are applied to sums.

Of up to some hundred rows reading the weights is what costs. For more it is the arithmetic, and the
weight multiplied out once (``e4m3.py``) is as fast.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.register_operands import ended

MOST_ROWS = 256
"""Rows of x at most."""
WIDTH = 128
"""Columns that share a scale are a multiple of these, so that all of a stage have one."""
TINY = tl.constexpr(2.0**120)
"""What a number is divided by while its bits lie where bfloat16 has them."""


class WideTile(NamedTuple):
    """Shape of a program's work and how it is compiled.

    Args:
        n, m, k: rows of the weight, rows of x, columns of a stage.
        split_k: programs that share the columns.
    """

    n: int
    m: int
    k: int
    split_k: int
    num_warps: int
    num_stages: int


@triton.jit
def widened(bits, COMPILED: tl.constexpr):
    """Bytes of e4m3 as bfloat16, exactly; NaN becomes 480."""
    if COMPILED:
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, big, zero;
            mov.b32 big, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            prmt.b32 t, $2, 0, 0x9180;
            shl.b32 t, t, 4;
            and.b32 t, t, 0x87f087f0;
            fma.rn.bf16x2 $0, t, big, zero;
            prmt.b32 t, $2, 0, 0xb3a2;
            shl.b32 t, t, 4;
            and.b32 t, t, 0x87f087f0;
            fma.rn.bf16x2 $1, t, big, zero;
            }
            """,
            "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        word = bits.to(tl.int32)
        in_place = (((word & 0x80) << 8) | ((word & 0x7F) << 4)) << 16
        value = (in_place.to(tl.float32, bitcast=True) * TINY).to(tl.bfloat16)
    return value


@triton.jit(do_not_specialize=["rows", "split_k"])
def _wide_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, rows, columns, depth, split_k,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """``WIDTH``: columns that share a scale, a multiple of BLOCK_K; 0 for all of a row."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    stages = tl.cdiv(depth, BLOCK_K)
    first, end = stages * part // split_k, stages * (part + 1) // split_k
    k = first * BLOCK_K + tl.arange(0, BLOCK_K)
    exists = n < columns
    w_ptrs = w_ptr + tl.where(exists, n, 0).to(tl.int64)[:, None] * depth + k[None, :]
    x_ptrs = x_ptr + m[None, :] * depth + k[:, None]
    in_rows = (m < rows)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for stage in range(first, end):
        w = widened(tl.load(w_ptrs), COMPILED)
        x = tl.load(x_ptrs, mask=in_rows, other=0.0)
        if WIDTH > 0:
            group = stage * BLOCK_K // WIDTH
            scale = tl.load(scale_ptr + n * (depth // WIDTH) + group, mask=exists, other=0.0)
            total += tl.dot(w, x) * scale[:, None]
        else:
            total = ended(tl.dot(w, x, total))
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    if WIDTH == 0:
        total *= tl.load(scale_ptr + n, mask=exists, other=0.0)[:, None]
    out_ptrs = out_ptr + (part * rows + m[None, :]).to(tl.int64) * columns + n[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=exists[:, None] & in_rows)


@functools.cache
def tile_of(columns: int, depth: int, rows: int, sm_count: int) -> WideTile:
    """The tile for ``rows`` rows of x and a weight ``[columns, depth]``: by what measuring favoured
    for the shapes of Llama-8B and Qwen3-0.6B on an H200."""
    is_large = columns * depth >= 50e6
    if rows <= 64:
        tile = WideTile(64, 32 if rows <= 32 else 64, 128, 1, num_warps=4, num_stages=3)
    elif rows <= 128 and depth >= 4096:
        tile = WideTile(128, 128, 64, 1, num_warps=8, num_stages=4)
    elif rows > 128 and is_large:
        tile = WideTile(128, 256, 64, 1, num_warps=8, num_stages=4)
    else:
        tile = WideTile(64, 128, 128, 1, num_warps=4, num_stages=3)
    programs, split = -(-columns // tile.n), 1
    if rows <= 128 or is_large:
        while split < 4 and programs * split <= sm_count and depth >= 2048 * split:
            split *= 2
    return tile._replace(split_k=split)


def takes(rows: int, depth: int, scale: Tensor) -> bool:
    """Whether :func:`multiply` computes products of ``depth`` columns, with scales ``[N, groups]``,
    and is faster than the weight multiplied out."""
    groups = scale.shape[1]
    if depth % WIDTH or (groups > 1 and depth // groups % WIDTH):
        return False
    return rows <= (MOST_ROWS if groups == 1 else MOST_ROWS // 2)


def multiply(x: Tensor, weight: Tensor, scale: Tensor, tile: WideTile | None = None) -> Tensor:
    """``x @ (weight * scale).T``.

    Args:
        x: bfloat16 ``[..., K]``, of up to :data:`MOST_ROWS` rows.
        weight: e4m3 ``[N, K]``, contiguous, without NaN; K a multiple of 128.
        scale: float32 ``[N, groups]``; a group is all of a row, or a multiple of 128 columns.
        tile: by default the one of these sizes.

    Returns:
        bfloat16 ``[..., N]``; sums are float32, products are exact.
    """
    (columns, depth), groups = weight.shape, scale.shape[1]
    if groups > 1 and depth // groups % (tile.k if tile else WIDTH):
        raise ValueError(f"{depth // groups} columns share a scale, which end within a stage")
    flat = x.reshape(-1, depth).contiguous()
    rows, of_gpu = len(flat), x.is_cuda
    if tile is None:
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count if of_gpu else 4
        tile = tile_of(columns, depth, -(-rows // 32) * 32, sms)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)

    def launch(tile: WideTile) -> None:
        into = out
        if tile.split_k > 1:
            into = torch.empty(tile.split_k, rows, columns, device=x.device)
        grid = (triton.cdiv(columns, tile.n), triton.cdiv(rows, tile.m), tile.split_k)
        _wide_kernel[grid](
            flat, weight.view(torch.uint8), scale, into, rows, columns, depth, tile.split_k,
            BLOCK_N=tile.n, BLOCK_M=tile.m, BLOCK_K=tile.k,
            WIDTH=0 if groups == 1 else depth // groups, COMPILED=of_gpu,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if tile.split_k > 1:
            torch.sum(into, 0, out=out)

    launch_fitting("product with e4m3 weights", tile, _smaller, launch)
    return out.view(*x.shape[:-1], columns)


def _smaller(tile: WideTile) -> list[WideTile]:
    return [tile._replace(num_stages=stages) for stages in range(tile.num_stages - 1, 0, -1)]
