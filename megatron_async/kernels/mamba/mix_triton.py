"""Mamba-2 layers between their two projections, in one Triton kernel for rows and windows.

A program has some channels of one head of one row. It takes the state's tile in while the input
projection still runs, and writes it once. Convolution, gate and the taken inputs are its own
channels'; B and C are computed by each program of their group. The last program of a row's norm
group to arrive norms it, so that what comes out is ready for the output projection.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.mamba.layer import (
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)
from megatron_async.kernels.mamba.parts_triton import (
    check_layout,
    load,
    norm_group_of,
    norm_kind,
    silu,
    step_size,
    store,
    unsupported,
)
from megatron_async.kernels.mamba.reference import remember
from megatron_async.kernels.pdl import uses_pdl


@triton.jit
def _tap(weight_ptr, channel, mask, tap, CONV: tl.constexpr, EVEN: tl.constexpr):
    return load(weight_ptr + channel * CONV + tap, mask, EVEN).to(tl.float32)


@triton.jit
def _old_taps(
    ring_ptr, weight_ptr, channel, mask, position, ring_stride,
    TAPS: tl.constexpr, CONV: tl.constexpr, RING: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The first TAPS taps of the convolution of ``channel`` at ``position``, from the ring."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(0, TAPS):
        at = position + (tap - (CONV - 1))
        ptr = ring_ptr + tl.maximum(at, 0) % RING * ring_stride
        old = tl.load(ptr + channel, mask=mask & (at >= 0), other=0.0).to(tl.float32)
        total += _tap(weight_ptr, channel, mask, tap, CONV, EVEN) * old
    return total


@triton.jit
def _taps(
    ring_ptr, token_ptr, weight_ptr, channel, mask, position, start, ring_stride, stride,
    CONV: tl.constexpr, RING: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All taps but the last at ``position``; those before ``start`` are in the ring."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(0, CONV - 1):
        at = position + (tap - (CONV - 1))
        is_old = at < start
        old_ptr = ring_ptr + tl.maximum(at, 0) % RING * ring_stride
        old = tl.load(old_ptr + channel, mask=mask & is_old & (at >= 0), other=0.0)
        new_ptr = token_ptr + (tap - (CONV - 1)) * stride
        new = tl.load(new_ptr + channel, mask=mask & (at >= start), other=0.0)
        taken = tl.where(is_old, old, new).to(tl.float32)
        total += _tap(weight_ptr, channel, mask, tap, CONV, EVEN) * taken
    return total


@triton.jit
def _activated(total, bias, dtype: tl.constexpr):
    """The activated sum as the layer's dtype has it, in float32."""
    return silu(total + bias).to(dtype).to(tl.float32)


@triton.jit
def _updated(state, x, b, dt, rate, dtype: tl.constexpr):
    # A compiler fuses one of two products into their sum, now the first and now the second.
    state = tl.fma(state, tl.exp(dt * rate), (x * dt)[:, None] * b[None, :])
    return state.to(dtype).to(tl.float32)


@triton.jit
def _output(
    state, x, c, d, token_ptr, gated_ptr, out_ptr, channel, is_channel,
    INNER: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Gate, and write for the norm or as the result."""
    # Rounded products: in a sum of two of them a compiler would fuse one.
    y = tl.fma(d, x, tl.sum(tl.fma(state, c[None, :], 0.0), axis=1))
    if NORM != 2:
        z = load(token_ptr - INNER + channel, is_channel, EVEN).to(tl.float32)
        y *= silu(z)
    if NORM == 0:
        store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), is_channel, EVEN)
    else:
        store(gated_ptr + channel, y, is_channel, EVEN)


@triton.jit
def _keep_inputs(
    token_ptr, kept_ptr, channel, is_channel, b_channel, c_channel, is_n, dt_at, has_dt, has_bc,
    EVEN: tl.constexpr,
):  # fmt: skip
    """What no other program of the row keeps of a token."""
    store(kept_ptr + channel, load(token_ptr + channel, is_channel, EVEN), is_channel, EVEN)
    if has_dt:
        tl.store(kept_ptr + dt_at, tl.load(token_ptr + dt_at))
    if has_bc:
        store(kept_ptr + b_channel, load(token_ptr + b_channel, is_n, EVEN), is_n, EVEN)
        store(kept_ptr + c_channel, load(token_ptr + c_channel, is_n, EVEN), is_n, EVEN)


@triton.jit
def _mix_kernel(
    projected_ptr, inputs_ptr, ssm_ptr, out_ptr, gated_ptr, arrived_ptr,
    conv_weight_ptr, conv_bias_ptr, dt_bias_ptr, a_log_ptr, d_ptr, norm_weight_ptr,
    slots_ptr, first_ptr, lengths_ptr, starts_ptr, behind_ptr,
    null_slot, most, projected_stride, inputs_slot, inputs_row, ssm_slot, out_stride,
    dt_low, dt_high, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    CONV: tl.constexpr, CHANNELS: tl.constexpr, STATE_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDE_D: tl.constexpr, NORM: tl.constexpr, NORM_GROUP: tl.constexpr,
    RING: tl.constexpr, CHUNKS: tl.constexpr, WINDOWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    INNER: tl.constexpr = HEADS * HEAD_DIM
    TILES: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    DT: tl.constexpr = INNER + 2 * GROUPS * STATE
    EVEN: tl.constexpr = HEAD_DIM % CHANNELS == 0 and STATE == STATE_PAD
    dtype = projected_ptr.dtype.element_ty
    state_dtype = ssm_ptr.dtype.element_ty

    row = tl.program_id(1)
    tile = tl.program_id(0)
    head = tile // TILES
    group = head // (HEADS // GROUPS)
    # What is read here was there before the kernel in front began: a row's tokens, its state and
    # its last inputs, the weights.
    slot = tl.load(slots_ptr + row)
    if slot == null_slot:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    first = tl.load(first_ptr + row)
    start = tl.load(starts_ptr + row).to(tl.int32)
    behind = tl.load(behind_ptr + row).to(tl.int32)
    local = tile % TILES * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = local < HEAD_DIM
    channel = head * HEAD_DIM + local
    n = tl.arange(0, STATE_PAD)
    is_n = n < STATE
    state_at = channel[:, None] * STATE + n[None, :]
    is_state = is_channel[:, None] & is_n[None, :]
    ssm_ptr += slot * ssm_slot
    state = tl.zeros([CHANNELS, STATE_PAD], tl.float32)
    if start != behind:
        state = load(ssm_ptr + state_at, is_state, EVEN).to(tl.float32)

    b_channel = INNER + group * STATE + n
    c_channel = b_channel + GROUPS * STATE
    x_bias = tl.zeros([CHANNELS], tl.float32)
    b_bias = tl.zeros([STATE_PAD], tl.float32)
    c_bias = tl.zeros([STATE_PAD], tl.float32)
    if HAS_BIAS:
        x_bias = load(conv_bias_ptr + channel, is_channel, EVEN).to(tl.float32)
        b_bias = load(conv_bias_ptr + b_channel, is_n, EVEN).to(tl.float32)
        c_bias = load(conv_bias_ptr + c_channel, is_n, EVEN).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if WIDE_D:
        d = load(d_ptr + channel, is_channel, EVEN).to(tl.float32)
    else:
        d = tl.load(d_ptr + head).to(tl.float32)
    ring_ptr = inputs_ptr + slot * inputs_slot
    has_dt = tile % TILES == 0
    has_bc = tile % (TILES * (HEADS // GROUPS)) == 0

    if WINDOWS:
        # Accepted drafts that the state lacks.
        for position in range(start - behind, start):
            x = _old_taps(
                ring_ptr, conv_weight_ptr, channel, is_channel, position, inputs_row,
                CONV, CONV, RING, EVEN,
            )  # fmt: skip
            b = _old_taps(
                ring_ptr, conv_weight_ptr, b_channel, is_n, position, inputs_row,
                CONV, CONV, RING, EVEN,
            )  # fmt: skip
            raw = tl.load(ring_ptr + position % RING * inputs_row + DT + head)
            dt = step_size(raw, dt_bias, dt_low, dt_high)
            x, b = _activated(x, x_bias, dtype), _activated(b, b_bias, dtype)
            state = _updated(state, x, b, dt, rate, state_dtype)

    # The first token's convolution but for the token itself.
    x = _old_taps(
        ring_ptr, conv_weight_ptr, channel, is_channel, start, inputs_row,
        CONV - 1, CONV, RING, EVEN,
    )  # fmt: skip
    b = _old_taps(
        ring_ptr, conv_weight_ptr, b_channel, is_n, start, inputs_row,
        CONV - 1, CONV, RING, EVEN,
    )  # fmt: skip
    c = _old_taps(
        ring_ptr, conv_weight_ptr, c_channel, is_n, start, inputs_row,
        CONV - 1, CONV, RING, EVEN,
    )  # fmt: skip
    x_last = _tap(conv_weight_ptr, channel, is_channel, CONV - 1, CONV, EVEN)
    b_last = _tap(conv_weight_ptr, b_channel, is_n, CONV - 1, CONV, EVEN)
    c_last = _tap(conv_weight_ptr, c_channel, is_n, CONV - 1, CONV, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    token_ptr = projected_ptr + first * projected_stride + INNER
    if CHUNKS:
        gated_ptr += first * INNER
    else:
        gated_ptr += row.to(tl.int64) * most * INNER
    x += x_last * load(token_ptr + channel, is_channel, EVEN).to(tl.float32)
    b += b_last * load(token_ptr + b_channel, is_n, EVEN).to(tl.float32)
    c += c_last * load(token_ptr + c_channel, is_n, EVEN).to(tl.float32)
    dt = step_size(tl.load(token_ptr + DT + head), dt_bias, dt_low, dt_high)
    x, b = _activated(x, x_bias, dtype), _activated(b, b_bias, dtype)
    c = _activated(c, c_bias, dtype)
    state = _updated(state, x, b, dt, rate, state_dtype)
    if not CHUNKS:
        store(ssm_ptr + state_at, state.to(state_dtype), is_state, EVEN)
        _keep_inputs(
            token_ptr, ring_ptr + start % RING * inputs_row, channel, is_channel, b_channel,
            c_channel, is_n, DT + head, has_dt, has_bc, EVEN,
        )  # fmt: skip
    _output(
        state, x, c, d, token_ptr, gated_ptr, out_ptr + first * out_stride, channel, is_channel,
        INNER, NORM, EVEN,
    )  # fmt: skip

    length = tl.full([], 1, tl.int32)
    if WINDOWS:
        length = tl.load(lengths_ptr + row).to(tl.int32)
        for position in range(start + 1, start + length):
            token_ptr += projected_stride
            gated_ptr += INNER
            x = _taps(
                ring_ptr, token_ptr, conv_weight_ptr, channel, is_channel, position, start,
                inputs_row, projected_stride, CONV, RING, EVEN,
            )  # fmt: skip
            b = _taps(
                ring_ptr, token_ptr, conv_weight_ptr, b_channel, is_n, position, start,
                inputs_row, projected_stride, CONV, RING, EVEN,
            )  # fmt: skip
            c = _taps(
                ring_ptr, token_ptr, conv_weight_ptr, c_channel, is_n, position, start,
                inputs_row, projected_stride, CONV, RING, EVEN,
            )  # fmt: skip
            x += x_last * load(token_ptr + channel, is_channel, EVEN).to(tl.float32)
            b += b_last * load(token_ptr + b_channel, is_n, EVEN).to(tl.float32)
            c += c_last * load(token_ptr + c_channel, is_n, EVEN).to(tl.float32)
            dt = step_size(tl.load(token_ptr + DT + head), dt_bias, dt_low, dt_high)
            x, b = _activated(x, x_bias, dtype), _activated(b, b_bias, dtype)
            c = _activated(c, c_bias, dtype)
            state = _updated(state, x, b, dt, rate, state_dtype)
            if not CHUNKS:
                _keep_inputs(
                    token_ptr, ring_ptr + position % RING * inputs_row, channel, is_channel,
                    b_channel, c_channel, is_n, DT + head, has_dt, has_bc, EVEN,
                )  # fmt: skip
            _output(
                state, x, c, d, token_ptr, gated_ptr,
                out_ptr + (first + position - start) * out_stride, channel, is_channel,
                INNER, NORM, EVEN,
            )  # fmt: skip
        gated_ptr -= (length - 1) * INNER
    if CHUNKS:
        store(ssm_ptr + state_at, state.to(state_dtype), is_state, EVEN)

    if NORM != 0:
        norm_group = head * HEAD_DIM // NORM_GROUP
        programs: tl.constexpr = NORM_GROUP // HEAD_DIM * TILES
        count_ptr = arrived_ptr + row * HEADS + norm_group
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        before = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
        if before == programs - 1:
            tl.store(count_ptr, 0)
            for step in range(0, length):
                norm_group_of(
                    gated_ptr + step * INNER + norm_group * NORM_GROUP,
                    projected_ptr + (first + step) * projected_stride + norm_group * NORM_GROUP,
                    norm_weight_ptr + norm_group * NORM_GROUP,
                    out_ptr + (first + step) * out_stride + norm_group * NORM_GROUP,
                    eps, NORM_GROUP, NORM == 2,
                )  # fmt: skip


class MixTile(NamedTuple):
    """How the state of a head is divided over programs."""

    channels: int
    """Channels of a head, a power of two."""
    warps: int
    registers: int | None = None
    """Registers of a thread at most; None leaves it to the compiler."""


DEFAULT_TILE = MixTile(32, 4)
WINDOW_TILE = MixTile(16, 4, 128)


class MixWorkspace:
    """What the programs of a launch hand each other. Layers share it: one runs at a time.

    Args:
        tokens: of all rows of a launch, at most; a row of a launch has room for as many as the
            longest.
        rows: of a launch, at most.
    """

    def __init__(self, tokens: int, rows: int, sizes: MambaSizes, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.gated = torch.empty(tokens, sizes.inner, dtype=torch.float32, device=device)
            # A norm group has a head at least.
            self.arrived = torch.zeros(rows, sizes.heads, dtype=torch.int32, device=device)


def mix_rows_triton(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
    *,
    most: int,
    workspace: MixWorkspace,
    chunks: bool = False,
    tile: MixTile | None = None,
) -> None:
    """``reference.mix_rows``: nothing waits for the device, and the launch depends on shapes alone.

    Args:
        rows: ``keeps`` is 1, or with ``chunks`` the rows' lengths.
        chunks: rows of any length, in ``workspace`` by their tokens. Their inputs are not written
            to the ring, which other programs may still read.

    Raises:
        ValueError: :func:`unsupported` names a reason, or a tensor is laid out in another way.
    """
    sizes, norm = parameters.sizes, parameters.norm
    why_not = unsupported(parameters)
    if why_not is not None:
        raise ValueError(f"{why_not}: use reference.mix_rows")
    check_layout(projected, parameters, states, rows, out)
    ring = states.inputs.shape[1]
    windows = chunks or most > 1 or ring > sizes.conv_width
    if tile is None:
        tile = WINDOW_TILE if windows else DEFAULT_TILE
    limit = {} if tile.registers is None else {"maxnreg": tile.registers}
    channels = min(tile.channels, triton.next_power_of_2(sizes.head_dim))
    pdl = uses_pdl(projected.device)
    grid = (sizes.heads * triton.cdiv(sizes.head_dim, channels), len(rows.slots))
    _mix_kernel[grid](
        projected, states.inputs, states.ssm, out, workspace.gated, workspace.arrived,
        parameters.conv_weight, parameters.conv_bias, parameters.dt_bias, parameters.a_log,
        parameters.d, None if norm is None else norm.weight, *rows[:5],
        states.null_slot, most, projected.stride(0), states.inputs.stride(0),
        states.inputs.stride(1), states.ssm.stride(0), out.stride(0),
        *parameters.dt_limits, 0.0 if norm is None else norm.eps,
        HEADS=sizes.heads, HEAD_DIM=sizes.head_dim, GROUPS=sizes.groups, STATE=sizes.state_size,
        CONV=sizes.conv_width, CHANNELS=channels,
        STATE_PAD=triton.next_power_of_2(sizes.state_size),
        HAS_BIAS=parameters.conv_bias is not None, WIDE_D=parameters.d.numel() != sizes.heads,
        NORM=norm_kind(norm), NORM_GROUP=sizes.inner if norm is None else norm.group_size,
        RING=ring, CHUNKS=chunks, WINDOWS=windows, PDL=pdl,
        num_warps=tile.warps, launch_pdl=pdl, **limit,
    )  # fmt: skip


def scan_tokens_triton(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
) -> None:
    """Prefill chunks token by token, with the bits of decoding: slower than
    ``scan_triton.scan_chunks_triton``, and the same however prompts are divided into chunks."""
    workspace = MixWorkspace(len(projected), len(rows.slots), parameters.sizes, projected.device)
    mix_rows_triton(
        projected, parameters, states, rows, out, most=0, workspace=workspace, chunks=True
    )
    remember(projected, states, rows)
