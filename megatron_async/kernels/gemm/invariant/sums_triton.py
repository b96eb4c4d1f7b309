"""Sums of products in one order of K, which batch-invariant kernels share.

K is divided into segments. Each is added up from 0 on, in order, and then their sums are, one after
the other: in one program, or by a kernel behind those of the segments.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.pdl import pdl_enter


@triton.jit
def prefetch(b_ptr, n, begin, columns, depth, b_n, LINES: tl.constexpr):
    """Ask for the first ``LINES`` lines of 64 numbers of columns n, which follow each other along
    K."""
    k = tl.minimum(begin + tl.arange(0, LINES) * 64, depth - 1)
    row = tl.minimum(n, columns - 1).to(tl.int64)
    address = (b_ptr + row[:, None] * b_n + k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def join_kernel(
    partial_ptr, bias_ptr, out_ptr, size, columns,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The segments' sums, one after the other, as a program does that has all of them."""
    pdl_enter(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_one = at < size
    total = tl.load(partial_ptr + at, mask=is_one, other=0.0)
    for _ in tl.static_range(1, SEGMENTS):
        partial_ptr += size
        total += tl.load(partial_ptr + at, mask=is_one, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % columns, mask=is_one, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_one)


@triton.jit
def sum_of_segments(
    a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Rows m of ``a`` times columns n of ``b``, segment after segment."""
    first = depth
    if SEGMENTS > 1:
        first = tl.minimum(SEGMENT, depth)
    total = sum_in_order(
        a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n, 0, first, BLOCK_M, BLOCK_N, BLOCK_K,
        EVEN_K, PRECISION,
    )  # fmt: skip
    if SEGMENTS > 1:
        for segment in range(1, SEGMENTS):
            total += sum_in_order(
                a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n, segment * SEGMENT,
                tl.minimum(segment * SEGMENT + SEGMENT, depth), BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
                PRECISION,
            )  # fmt: skip
    return total


@triton.jit
def sum_in_order(
    a_ptr, b_ptr, m, n, rows, columns, depth, b_k, b_n, begin, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows m of ``a`` times columns n of ``b``, in the order of K from ``begin`` to ``end``; those
    that are not there are 0."""
    k = tl.arange(0, BLOCK_K)
    in_rows = (m < rows)[:, None]
    in_columns = (n < columns)[None, :]
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * depth + (begin + k)[None, :]
    b_ptrs = b_ptr + (begin + k).to(tl.int64)[:, None] * b_k + n.to(tl.int64)[None, :] * b_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_rows, other=0.0)
            b = tl.load(b_ptrs, mask=in_columns, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=in_rows & (start + k < depth)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=in_columns & (start + k < depth)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * b_k
    return total
