"""Products of groups of rows, each with a matrix of its own, with the bits of
``products_triton.matmul_by_row``."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.gemm.invariant.products_triton import (
    DTYPES,
    Tile,
    choose_tile,
    segment_size,
    segments_of,
    smaller,
)
from megatron_async.kernels.gemm.invariant.sums_triton import sum_of_segments


@triton.jit
def _grouped_kernel(
    a_ptr, b_ptr, ends_ptr, out_ptr, groups, columns, depth, b_g, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUPS_PAD: tl.constexpr, PRECISION: tl.constexpr, SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """A tile of the rows of one group times its matrix. A group's tiles begin at its first row //
    BLOCK_M + its index, which leaves room for the ragged tiles of all groups before it."""
    tile = tl.program_id(0)
    index = tl.arange(0, GROUPS_PAD)
    is_later = (index > 0) & (index < groups)
    begins = tl.load(ends_ptr + index - 1, mask=is_later, other=0)
    is_before = (begins // BLOCK_M + index <= tile) & (index < groups)
    group = tl.sum(is_before.to(tl.int32), 0) - 1
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    begin += (tile - begin // BLOCK_M - group) * BLOCK_M
    if begin >= end:
        return
    m = begin + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = sum_of_segments(
        a_ptr, b_ptr + group.to(tl.int64) * b_g, m, n, end, columns, depth, b_k, b_n, BLOCK_M,
        BLOCK_N, BLOCK_K, EVEN_K, PRECISION, SEGMENTS, SEGMENT,
    )  # fmt: skip
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    is_one = (m < end)[:, None] & (n < columns)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_one)


def matmul_by_group(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows ``[T, K]`` in groups times ``[G, K, N]`` of any strides, a matrix for each group;
    ``ends`` int32 ``[G]`` are the rows behind the groups, which follow each other. A row has the
    bits of ``matmul_by_row``; those behind the last group are 0. Returns ``[T, N]``.

    Raises:
        ValueError: dtypes or shapes do not fit.
    """
    (rows, depth), (groups, _, columns) = a.shape, b.shape
    if depth != b.shape[1] or ends.shape != (groups,) or ends.dtype is not torch.int32:
        raise ValueError(
            f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)} in groups that end at "
            f"{ends.dtype} {tuple(ends.shape)}"
        )
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise ValueError(f"a product of {a.dtype} by {b.dtype}: use one of {DTYPES} for both")
    a, ends = a.contiguous(), ends.contiguous()
    out = torch.zeros((rows, columns), dtype=a.dtype, device=a.device)
    if out.numel() == 0 or groups == 0:
        return out

    segments = segments_of(a.dtype, columns, depth)

    def launch(tile: Tile) -> None:
        grid = (rows // tile.m + groups, triton.cdiv(columns, tile.n))
        _grouped_kernel[grid](
            a, b, ends, out, groups, columns, depth, b.stride(0), b.stride(1), b.stride(2),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, EVEN_K=depth % tile.k == 0,
            GROUPS_PAD=triton.next_power_of_2(groups),
            PRECISION="ieee" if a.dtype is torch.float32 else "tf32", SEGMENTS=segments,
            SEGMENT=segment_size(depth, segments),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    tile, _ = choose_tile(a.device, a.dtype, -(-rows // groups), columns, groups, segments)
    launch_fitting("batch-invariant product of groups", tile, smaller, launch)
    return out
