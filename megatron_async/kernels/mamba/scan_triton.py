"""Prefill chunks of Mamba-2 layers in three Triton kernels: convolution, scan, norm.

The scan goes through a chunk's tokens in pieces (SSD, arXiv:2405.21060, section 6): within a piece
tokens meet as in attention, between pieces there is the state. A program has some channels of one
head of one chunk, and keeps their state in registers from the first piece to the last.

Pieces end at multiples of PIECE positions of the sequence, wherever its chunks do. So a prompt's
results are the same bits for all divisions into chunks that begin at such multiples; a chunk that
begins elsewhere has a shorter first piece, whose sums may differ in their last bits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.mamba.layer import (
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)
from megatron_async.kernels.mamba.parts_triton import (
    check_layout,
    norm_group_of,
    silu,
    step_size,
    unsupported,
)
from megatron_async.kernels.pdl import pdl_enter, uses_pdl
from megatron_async.kernels.shared_memory import (
    HOPPER_BYTES,
    block_limit,
    first_that_fits,
    loop_buffers,
)

TOKENS = 16
"""Tokens of a program of convolution and norm."""

CHANNELS = 128
"""Channels of a program of the convolution."""


@triton.jit
def _tile_of(lengths_ptr, count, tile, TOKENS: tl.constexpr, COUNT_PAD: tl.constexpr):
    """Chunk and first token, counted within it, of the ``tile``-th group of TOKENS tokens of a
    forward's chunks; the chunk is ``count`` behind the last one."""
    n = tl.arange(0, COUNT_PAD)
    lengths = tl.load(lengths_ptr + n, mask=n < count, other=0).to(tl.int32)
    tiles = tl.cdiv(lengths, TOKENS)
    ends = tl.cumsum(tiles, 0)
    chunk = tl.sum((ends <= tile).to(tl.int32))
    begin = tl.sum(tl.where(n < chunk, tiles, 0))
    return tl.minimum(chunk, count), (tile - begin) * TOKENS


@triton.jit
def _conv_kernel(
    projected_ptr, inputs_ptr, convolved_ptr, weight_ptr, bias_ptr,
    slots_ptr, first_ptr, lengths_ptr, starts_ptr, count, null_slot,
    projected_stride, inputs_slot, inputs_row,
    INNER: tl.constexpr, WIDTH: tl.constexpr, CONV: tl.constexpr, HAS_BIAS: tl.constexpr,
    RING: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COUNT_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``x | B | C`` of chunks behind convolution and SiLU, to ``convolved`` [T, WIDTH]."""
    pdl_enter(PDL)
    row, begin = _tile_of(lengths_ptr, count, tl.program_id(0), TOKENS, COUNT_PAD)
    if row == count:
        return
    slot = tl.load(slots_ptr + row)
    if slot == null_slot:
        return
    first, start = tl.load(first_ptr + row), tl.load(starts_ptr + row).to(tl.int32)
    step = begin + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < WIDTH
    mask = (step < tl.load(lengths_ptr + row))[:, None] & is_channel[None, :]
    ring_ptr = inputs_ptr + slot * inputs_slot
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(0, CONV):
        at = step + (tap - (CONV - 1))
        is_old = at < 0
        position = start + at
        old_at = tl.maximum(position, 0) % RING * inputs_row
        old_mask = mask & (is_old & (position >= 0))[:, None]
        old = tl.load(ring_ptr + old_at[:, None] + channel[None, :], mask=old_mask, other=0.0)
        new_at = (first + at) * projected_stride + INNER
        new_mask = mask & (at >= 0)[:, None]
        new = tl.load(projected_ptr + new_at[:, None] + channel[None, :], mask=new_mask, other=0.0)
        weight = tl.load(weight_ptr + channel * CONV + tap, mask=is_channel, other=0.0)
        taken = tl.where(is_old[:, None], old, new).to(tl.float32)
        total += weight.to(tl.float32)[None, :] * taken
    bias = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    value = silu(total + bias[None, :]).to(convolved_ptr.dtype.element_ty)
    out_at = (first + step)[:, None] * WIDTH + channel[None, :]
    tl.store(convolved_ptr + out_at, value, mask=mask)


@triton.jit
def _scan_kernel(
    projected_ptr, convolved_ptr, inputs_ptr, ssm_ptr, out_ptr,
    dt_bias_ptr, a_log_ptr, d_ptr, slots_ptr, first_ptr, lengths_ptr, starts_ptr,
    null_slot, projected_stride, inputs_slot, inputs_row, ssm_slot, out_stride,
    dt_low, dt_high,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    CONV: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr, STATE_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    WIDE_D: tl.constexpr, GATES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chunk ``program_id(1)``: its output, gated or not, its last state and inputs."""
    INNER: tl.constexpr = HEADS * HEAD_DIM
    WIDTH: tl.constexpr = INNER + 2 * GROUPS * STATE
    TILES: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    pdl_enter(PDL)
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    if (slot == null_slot) | (length == 0):
        return
    first, start = tl.load(first_ptr + row), tl.load(starts_ptr + row).to(tl.int32)
    tile = tl.program_id(0)
    head = tile // TILES
    group = head // (HEADS // GROUPS)
    local = tile % TILES * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = local < HEAD_DIM
    channel = head * HEAD_DIM + local
    n = tl.arange(0, STATE_PAD)
    is_n = n < STATE
    state_at = channel[:, None] * STATE + n[None, :]
    is_state = is_channel[:, None] & is_n[None, :]
    ssm_ptr += slot * ssm_slot
    state = tl.load(ssm_ptr + state_at, mask=is_state & (start > 0), other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if WIDE_D:
        d = tl.load(d_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    else:
        d = tl.load(d_ptr + head).to(tl.float32)
    b_channel = INNER + group * STATE + n
    i = tl.arange(0, PIECE)
    projected_ptr += first * projected_stride
    convolved_ptr += first * WIDTH
    out_ptr += first * out_stride
    # The first piece may begin in front of the chunk: it ends at a multiple of PIECE.
    for begin in range(-(start % PIECE), length, PIECE):
        step = begin + i
        is_step = (step >= 0) & (step < length)
        at = step[:, None] * WIDTH
        is_x = is_step[:, None] & is_channel[None, :]
        x = tl.load(convolved_ptr + at + channel[None, :], mask=is_x, other=0.0)
        is_bc = is_step[:, None] & is_n[None, :]
        b = tl.load(convolved_ptr + at + b_channel[None, :], mask=is_bc, other=0.0)
        c = tl.load(
            convolved_ptr + at + (b_channel + GROUPS * STATE)[None, :], mask=is_bc, other=0.0
        )
        raw = tl.load(
            projected_ptr + step * projected_stride + INNER + WIDTH + head, mask=is_step, other=0.0
        )
        dt = tl.where(is_step, step_size(raw, dt_bias, dt_low, dt_high), 0.0)
        decays = tl.cumsum(dt * rate, 0)
        total = tl.sum(dt * rate, 0)
        # Within the piece: token i takes in what tokens j up to itself brought.
        meet = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        fades = tl.where(i[:, None] >= i[None, :], decays[:, None] - decays[None, :], float("-inf"))
        meet = meet * tl.exp(fades) * dt[None, :]
        wide = x.to(tl.float32)
        y = tl.dot(meet, wide, input_precision=PRECISION)
        # What came before, then what goes on.
        past = tl.dot(c.to(tl.float32), tl.trans(state), input_precision=PRECISION)
        y += past * tl.exp(decays)[:, None] + d * wide
        entering = wide * (dt * tl.exp(total - decays))[:, None]
        state = state * tl.exp(total)
        state = tl.dot(tl.trans(entering), b.to(tl.float32), state, input_precision=PRECISION)
        if GATES:
            z_at = step[:, None] * projected_stride + channel[None, :]
            y *= silu(tl.load(projected_ptr + z_at, mask=is_x, other=0.0).to(tl.float32))
        out_at = step[:, None] * out_stride + channel[None, :]
        tl.store(out_ptr + out_at, y.to(out_ptr.dtype.element_ty), mask=is_x)
    tl.store(ssm_ptr + state_at, state.to(ssm_ptr.dtype.element_ty), mask=is_state)

    # The convolution of this chunk has read the ring.
    ring_ptr = inputs_ptr + slot * inputs_slot
    for last in tl.static_range(1, CONV):
        if last <= length:
            token_ptr = projected_ptr + (length - last) * projected_stride + INNER
            kept_ptr = ring_ptr + (start + length - last) % RING * inputs_row
            taken = tl.load(token_ptr + channel, mask=is_channel, other=0.0)
            tl.store(kept_ptr + channel, taken, mask=is_channel)
            if tile % TILES == 0:
                tl.store(kept_ptr + WIDTH + head, tl.load(token_ptr + WIDTH + head))
            if tile % (TILES * (HEADS // GROUPS)) == 0:
                c_channel = b_channel + GROUPS * STATE
                b_taken = tl.load(token_ptr + b_channel, mask=is_n, other=0.0)
                c_taken = tl.load(token_ptr + c_channel, mask=is_n, other=0.0)
                tl.store(kept_ptr + b_channel, b_taken, mask=is_n)
                tl.store(kept_ptr + c_channel, c_taken, mask=is_n)


@triton.jit
def _norm_kernel(
    gated_ptr, projected_ptr, weight_ptr, out_ptr, slots_ptr, first_ptr, lengths_ptr,
    count, null_slot, projected_stride, out_stride, eps,
    INNER: tl.constexpr, SIZE: tl.constexpr, GATES: tl.constexpr, TOKENS: tl.constexpr,
    COUNT_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A norm group of TOKENS tokens of a chunk."""
    pdl_enter(PDL)
    row, begin = _tile_of(lengths_ptr, count, tl.program_id(0), TOKENS, COUNT_PAD)
    if row == count:
        return
    if tl.load(slots_ptr + row) == null_slot:
        return
    first = tl.load(first_ptr + row)
    end = tl.minimum(begin + TOKENS, tl.load(lengths_ptr + row))
    at = tl.program_id(1) * SIZE
    for token in range(first + begin, first + end):
        norm_group_of(
            gated_ptr + token * INNER + at, projected_ptr + token * projected_stride + at,
            weight_ptr + at, out_ptr + token * out_stride + at, eps, SIZE, GATES,
        )  # fmt: skip


class ScanTile(NamedTuple):
    """How the scan is divided over programs, and over pieces."""

    channels: int
    """Channels of a head, a power of two from 16 on."""
    piece: int
    """Tokens, a power of two from 16 on: chunks that begin at its multiples keep all bits."""
    warps: int
    stages: int = 2


DEFAULT_TILE = ScanTile(32, 16, 4)


def padded_state(sizes: MambaSizes) -> int:
    """Columns of a tile of the state."""
    return max(16, int(triton.next_power_of_2(sizes.state_size)))


def shared_bytes(tile: ScanTile, sizes: MambaSizes, element_size: int) -> int:
    """What a program of the scan takes of shared memory at most: its state in fp32, a piece of x, B
    and C, and how its tokens meet."""
    columns, piece = padded_state(sizes), tile.piece
    tokens = loop_buffers(tile.stages) * piece * (2 * columns + tile.channels) * element_size
    return 4 * tile.channels * columns + tokens + 4 * piece * piece + 16 * piece


def smaller(tile: ScanTile) -> Iterator[ScanTile]:
    """Tiles that take less, with the same pieces, on which a sequence's bits depend."""
    channels = tile.channels
    while channels >= 16:
        for stages in range(tile.stages, 0, -1):
            yield tile._replace(channels=channels, stages=stages)
        channels //= 2


@functools.cache
def scan_tile(
    sizes: MambaSizes,
    element_size: int,
    limit: int = HOPPER_BYTES,
    tile: ScanTile = DEFAULT_TILE,
) -> ScanTile:
    """The tile of the scan, which is ``tile`` if it fits a device with such a limit."""
    channels = max(16, min(tile.channels, int(triton.next_power_of_2(sizes.head_dim))))
    tile = tile._replace(channels=channels)
    return first_that_fits(
        itertools.chain((tile,), smaller(tile)),
        lambda each: shared_bytes(each, sizes, element_size),
        limit,
    )


def scan_chunks_triton(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
    *,
    tile: ScanTile = DEFAULT_TILE,
) -> None:
    """``reference.scan_chunks`` in pieces; nothing waits for the device, and the launches depend on
    shapes alone. Matrix products of float32 models are exact, others have tf32 operands.

    Args:
        rows: of lengths on the device; none is behind, and ``keeps`` are the lengths.

    Raises:
        ValueError: ``parts_triton.unsupported`` names a reason, or a tensor is laid out in another
            way.
    """
    sizes, norm = parameters.sizes, parameters.norm
    why_not = unsupported(parameters)
    if why_not is not None:
        raise ValueError(f"{why_not}: use reference.scan_chunks")
    check_layout(projected, parameters, states, rows, out)
    tokens, count = len(projected), len(rows.slots)
    inner, width = sizes.inner, sizes.conv_channels
    pdl = uses_pdl(projected.device)
    ring = states.inputs.shape[1]
    convolved = projected.new_empty(tokens, width)
    tiles = tokens // TOKENS + min(count, tokens)
    count_pad = triton.next_power_of_2(count)
    _conv_kernel[(tiles, triton.cdiv(width, CHANNELS))](
        projected, states.inputs, convolved, parameters.conv_weight, parameters.conv_bias,
        rows.slots, rows.first, rows.lengths, rows.starts, count, states.null_slot,
        projected.stride(0), states.inputs.stride(0), states.inputs.stride(1),
        INNER=inner, WIDTH=width, CONV=sizes.conv_width, RING=ring,
        HAS_BIAS=parameters.conv_bias is not None, TOKENS=TOKENS, CHANNELS=CHANNELS,
        COUNT_PAD=count_pad, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    scanned = out if norm is None else out.new_empty(tokens, inner, dtype=torch.float32)

    def launch(tile: ScanTile) -> None:
        _scan_kernel[(sizes.heads * triton.cdiv(sizes.head_dim, tile.channels), count)](
            projected, convolved, states.inputs, states.ssm, scanned,
            parameters.dt_bias, parameters.a_log, parameters.d,
            rows.slots, rows.first, rows.lengths, rows.starts,
            states.null_slot, projected.stride(0), states.inputs.stride(0),
            states.inputs.stride(1), states.ssm.stride(0), scanned.stride(0), *parameters.dt_limits,
            HEADS=sizes.heads, HEAD_DIM=sizes.head_dim, GROUPS=sizes.groups, STATE=sizes.state_size,
            CONV=sizes.conv_width, RING=ring, CHANNELS=tile.channels,
            STATE_PAD=padded_state(sizes), PIECE=tile.piece,
            WIDE_D=parameters.d.numel() != sizes.heads, GATES=norm is None or not norm.before_gate,
            PRECISION="ieee" if projected.dtype is torch.float32 else "tf32", PDL=pdl,
            num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
        )  # fmt: skip

    limit = block_limit(projected.device)
    fitting = scan_tile(sizes, projected.element_size(), limit, tile)
    launch_fitting("scan of Mamba layers", fitting, smaller, launch)
    if norm is not None:
        _norm_kernel[(tiles, inner // norm.group_size)](
            scanned, projected, norm.weight, out, rows.slots, rows.first, rows.lengths,
            count, states.null_slot, projected.stride(0), out.stride(0), norm.eps,
            INNER=inner, SIZE=norm.group_size, GATES=norm.before_gate, TOKENS=TOKENS,
            COUNT_PAD=count_pad, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
