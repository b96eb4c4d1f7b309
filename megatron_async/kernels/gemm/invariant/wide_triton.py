"""Products of many rows in one order of K, with operands that TMA brings: the largest tiles.

A program stays on its multiprocessor and takes tile after tile; operands of the next one come in
while the last one is stored. Where K has segments a program takes a tile's one after the other and
keeps their sum in a scratch tile of its own, which stays in the L2 cache: there are no registers
for two sums of 128 x 256 numbers. So numbers are added up as ``sums_triton.py`` does.

With SwiGLU a tile has 128 columns of the gate and the 128 of the other half that they meet, side by
side in one operand. One thread has both numbers of each pair, so none goes through memory.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_async.kernels.norm.swiglu import gated

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64
GROUP_M = 16
"""Tiles of rows that run together with the same columns."""
REFUSALS = (RuntimeError, OutOfResources, triton.CompilationError)
"""What a launch raises where a GPU or a release of Triton cannot have these kernels."""


@triton.jit
def _place(
    tile, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """First row and first column of a tile."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first_tile = tile // per_group * GROUP_M
    side_by_side = tl.minimum(row_tiles - first_tile, GROUP_M)
    m = first_tile + tile % per_group % side_by_side
    return m * BLOCK_M, tile % per_group // side_by_side * BLOCK_N


@triton.jit(do_not_specialize=["rows"])
def _wide_kernel(
    a_desc, b_desc, bias_ptr, out_ptr, scratch_ptr, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP_M: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = tl.cdiv(tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N) - program, programs)
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    scratch_ptr += program * (BLOCK_M * BLOCK_N)
    for item in tl.range(0, own * SEGMENTS, flatten=True):
        tile = program + item // SEGMENTS * programs
        segment = item % SEGMENTS
        m, n = _place(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
        begin, end = 0, depth
        if SEGMENTS > 1:
            begin = segment * SEGMENT
            end = tl.minimum(begin + SEGMENT, depth)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(begin, end, BLOCK_K):
            a = a_desc.load([m, k])
            b = b_desc.load([n, k])
            total = tl.dot(a, b.T, total)
        if SEGMENTS > 1:
            if segment > 0:
                total = tl.load(scratch_ptr + within) + total
            if segment < SEGMENTS - 1:
                tl.store(scratch_ptr + within, total)
                tl.debug_barrier()
        if segment == SEGMENTS - 1:
            at_m, at_n = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + at_n, mask=at_n < columns, other=0.0)
                total += bias.to(tl.float32)[None, :]
            out_at = at_m.to(tl.int64)[:, None] * columns + at_n[None, :]
            is_one = (at_m < rows)[:, None] & (at_n < columns)[None, :]
            tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=is_one)


@triton.jit(do_not_specialize=["rows"])
def _wide_gated_kernel(
    a_desc, b_desc, out_ptr, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of each half; ``b_desc`` is ``[2, columns, depth]``."""
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        m, n = _place(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
        total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, depth, BLOCK_K):
            a = a_desc.load([m, k])
            b = tl.reshape(b_desc.load([0, n, k]), [2 * BLOCK_N, BLOCK_K])
            total = tl.dot(a, b.T, total)
        halves = tl.permute(tl.reshape(total, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1])
        gate, up = tl.split(halves)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        out = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32))
        at_m, at_n = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        out_at = at_m.to(tl.int64)[:, None] * columns + at_n[None, :]
        is_one = (at_m < rows)[:, None] & (at_n < columns)[None, :]
        tl.store(out_ptr + out_at, out.to(dtype), mask=is_one)


def takes(a: Tensor, b: Tensor) -> bool:
    """Whether TMA reads ``a`` ``[M, K]``, contiguous, and ``b`` ``[K, N]``: columns of 16 bits
    begin at multiples of 16 bytes, and follow each other along K."""
    return (
        a.element_size() == 2
        and b.stride(0) == 1
        and (a.shape[1] | b.stride(1)) % 8 == 0
        and (a.data_ptr() | b.data_ptr()) % 16 == 0
    )


def tiles(rows: int, columns: int) -> int:
    """How many a product has."""
    return -(-rows // BLOCK_M) * -(-columns // BLOCK_N)


def wide_product(
    a: Tensor, b: Tensor, bias: Tensor | None, segments: int, segment: int, programs: int
) -> Tensor:
    """``a @ b + bias``, ``[rows, columns]``, of what :func:`takes` takes, in ``segments`` segments
    of K of ``segment`` columns, by at most ``programs`` programs."""
    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty((rows, columns), dtype=a.dtype, device=a.device)
    programs = min(programs, tiles(rows, columns))
    scratch = out
    if segments > 1:
        scratch = torch.empty(programs * BLOCK_M * BLOCK_N, dtype=torch.float32, device=a.device)
    _wide_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(b.t(), [BLOCK_N, BLOCK_K]),
        b if bias is None else bias, out, scratch, rows, columns, depth,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, HAS_BIAS=bias is not None,
        GROUP_M=GROUP_M, SEGMENTS=segments, SEGMENT=segment, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


def wide_gated_product(a: Tensor, b: Tensor, programs: int) -> Tensor:
    """``swiglu(a @ b)``, ``[rows, F]``, of b ``[K, 2 F]`` that :func:`takes` takes, in one segment
    of K, by at most ``programs`` programs: the product is rounded to its dtype first."""
    (rows, depth), columns = a.shape, b.shape[1] // 2
    out = torch.empty((rows, columns), dtype=a.dtype, device=a.device)
    half = BLOCK_N // 2
    halves = b.t().unflatten(0, (2, columns))
    _wide_gated_kernel[(min(programs, tiles(rows, 2 * columns)),)](
        TensorDescriptor.from_tensor(a, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(halves, [2, half, BLOCK_K]),
        out, rows, columns, depth, BLOCK_M=BLOCK_M, BLOCK_N=half, BLOCK_K=BLOCK_K,
        GROUP_M=GROUP_M, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out
