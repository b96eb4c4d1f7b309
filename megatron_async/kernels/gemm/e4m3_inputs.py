"""Inputs of linear layers as e4m3, in one Triton kernel that reads each once.

The numbers are those of ``models/quantized/inputs.py``, bit for bit, but for the payload of NaN.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.rope_append import as_kept
from megatron_async.kernels.pdl import pdl_enter, uses_pdl

E4M3 = torch.float8_e4m3fn
MOST_COLUMNS = 32768
"""A row is one program's tile."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_INVERTED, MOST_INVERTED = tl.constexpr(2.0**-80), tl.constexpr(2.0**100)
"""Scales by whose inverse numbers may be multiplied."""


@triton.jit
def scales_of(x):
    """Fp32 ``[G, 1]`` for fp32 ``x [G, W]``, zeros where there is nothing: the largest of each
    group becomes 448. NaN stays NaN."""
    largest = tl.max(tl.abs(x), 1)[:, None]
    is_nan = tl.max((x != x).to(tl.int32), 1)[:, None] > 0
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(is_nan, float("nan"), tl.maximum(scale, LEAST_SCALE))


@triton.jit
def _nearer(share, x, scale, inverse):
    """``share`` of ``x / scale``, corrected by what it leaves of ``x``."""
    return tl.fma(tl.fma(-scale, share, x), inverse, share)


@triton.jit
def quotient(x, scale, BY_INVERSE: tl.constexpr):
    """``x [G, W]`` divided by ``scale [G, 1]``, rounded once.

    ``BY_INVERSE``, with fused multiply-adds and ``x`` of at most 448 scales: multiplied by the
    inverse and corrected twice, which rounds as a division does (P. Markstein, IBM Journal of
    Research and Development 34, 1990) where nothing overflows and what underflows is far below the
    least number of e4m3. A division takes twice the instructions.
    """
    wide = tl.broadcast_to(scale, x.shape)
    if BY_INVERSE:
        least, most = tl.min(tl.min(scale, 1), 0), tl.max(tl.max(scale, 1), 0)
        if (least >= LEAST_INVERTED) & (most <= MOST_INVERTED):
            one = tl.full(scale.shape, 1.0, tl.float32)
            inverse = tl.broadcast_to(tl.div_rn(one, scale), x.shape)
            share = x * inverse
            share = _nearer(share, x, wide, inverse)
            share = _nearer(share, x, wide, inverse)
        else:
            share = tl.div_rn(x, wide)
    else:
        share = tl.div_rn(x, wide)
    return share


@triton.jit
def encoded(share, NATIVE: tl.constexpr):
    """Bytes of e4m3 nearest to fp32 ``share``, ties to even, at most 448 in size. NaN stays NaN.
    ``NATIVE``: by the instruction, see :func:`rounds_once`."""
    if NATIVE:
        byte = share.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        byte = as_kept(share, 1.0, True)
    return byte


@triton.jit
def store_row(
    x, row, static_ptr, numbers_ptr, scale_ptr, groups, width,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row of inputs, fp32 ``[GROUPS, WIDTH]`` of which ``groups`` by ``width`` are there and
    others are zeros, as bytes of e4m3 and scales."""
    group, column = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    if STATIC:
        scale = tl.full([GROUPS, 1], 1.0, tl.float32) * tl.load(static_ptr)
        x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
    else:
        scale = scales_of(x)
    byte = encoded(quotient(x, scale, NATIVE and not STATIC), NATIVE)
    mask = (group < groups) & (column < width)
    tl.store(numbers_ptr + row * groups * width + group * width + column, byte, mask=mask)
    tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)


@triton.jit
def _inputs_kernel(
    x_ptr, static_ptr, numbers_ptr, scale_ptr, groups, width,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, column = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (group < groups) & (column < width)
    at = row * groups * width + group * width + column
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    store_row(
        x, row, static_ptr, numbers_ptr, scale_ptr, groups, width, GROUPS, WIDTH, STATIC, NATIVE
    )


@functools.cache
def rounds_once(device: torch.device) -> bool:
    """Whether a device makes e4m3 of fp32 with one instruction, as GPUs do from Hopper on: those
    before it go by float16, and round twice."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def takes(columns: int, groups: int, dtype: torch.dtype) -> bool:
    """Whether :func:`quantize_inputs` quantizes rows of ``columns`` in ``groups``."""
    return tile_of(columns, groups)[0] <= MOST_COLUMNS and dtype in FLOATS


def tile_of(columns: int, groups: int) -> tuple[int, dict[str, int]]:
    """Elements of a row's tile, and its sizes and warps as kernels take them."""
    sizes = triton.next_power_of_2(groups), triton.next_power_of_2(columns // groups)
    elements = sizes[0] * sizes[1]
    warps = max(1, min(16, elements // 512))
    return elements, {"GROUPS": sizes[0], "WIDTH": sizes[1], "num_warps": warps}


def empty_inputs(like: Tensor, columns: int, groups: int) -> tuple[Tensor, Tensor]:
    """Numbers ``[..., columns]`` and scales ``[..., groups]`` without values, of as many rows."""
    numbers = torch.empty(*like.shape[:-1], columns, dtype=E4M3, device=like.device)
    return numbers, torch.empty(*like.shape[:-1], groups, device=like.device)


def quantize_inputs(x: Tensor, groups: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x [..., k]`` as e4m3 with scales.

    Args:
        x: bfloat16, float16 or float32, of at most :data:`MOST_COLUMNS` columns.
        groups: scales of a row, which divide its columns.
        static: fp32 ``[1]``, the scale of all; None chooses them.

    Returns:
        E4m3 ``[..., k]`` and fp32 ``[..., groups]``; a row's bits depend on it alone.
    """
    columns = x.shape[-1]
    x = x.contiguous()
    numbers, scale = empty_inputs(x, columns, groups)
    if x.numel():
        _inputs_kernel[(x.numel() // columns,)](
            x, scale if static is None else static, numbers.view(torch.uint8), scale, groups,
            columns // groups, STATIC=static is not None, NATIVE=rounds_once(x.device), PDL=False,
            **tile_of(columns, groups)[1],
        )  # fmt: skip
    return numbers, scale


def quantize_rows(x: Tensor, numbers: Tensor, scale: Tensor, static: Tensor | None) -> None:
    """:func:`quantize_inputs` of ``x [R, k]``, contiguous, with one scale a row, into ``numbers [R,
    k]`` and ``scale [R, 1]``; between kernels of a fused step."""
    (rows, columns), pdl = x.shape, uses_pdl(x.device)
    if rows:
        _inputs_kernel[(rows,)](
            x, scale if static is None else static, numbers.view(torch.uint8), scale, 1, columns,
            STATIC=static is not None, NATIVE=rounds_once(x.device), PDL=pdl,
            **tile_of(columns, 1)[1], launch_pdl=pdl,
        )  # fmt: skip
