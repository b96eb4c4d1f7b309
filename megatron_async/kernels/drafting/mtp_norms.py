"""The norms at both ends of an MTP layer that drafts: what its projection reads, and what its head
and the next layer read.

Each is one Triton kernel with the gathers around it, next to its reference in torch. The first
moves 4 T N elements, the second 2 T N and R N. Where the head norms by itself the first norms what
the layer before has put out, and there is no second.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.drafting.mtp_input import DraftInput, NormParameters, hidden_before
from megatron_async.kernels.drafting.mtp_rows import RowsKernel, draft_row
from megatron_async.kernels.pdl import pdl_enter, uses_pdl

MAX_COLUMNS = 32768
"""A row is one program's tile; longer ones go to the reference."""

FIRST, NEXT, FURTHER = (tl.constexpr(number) for number in range(3))
"""Where hidden states come from: the decoder, the layer before, the same layer again."""


@triton.jit
def _normed(x, weight, bias, column, mask, columns, eps, CENTER: tl.constexpr):
    if CENTER:
        x = tl.where(mask, x - tl.sum(x, 0) / columns, 0.0)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps))
    x *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if CENTER:
        x += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _mtp_input_kernel(
    tokens, position_ids, table, positions, enorm_weight, enorm_bias, hidden, last_ptr, slots,
    tails, hnorm_weight, hnorm_bias, final_weight, final_bias, out,
    tokens_stride, columns, layers, layer, enorm_eps, hnorm_eps, final_eps,
    WIDTH: tl.constexpr, BEFORE: tl.constexpr, SOURCE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    CENTER_E: tl.constexpr, CENTER_H: tl.constexpr, FINAL: tl.constexpr, CENTER_F: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One half of one token's input: its embedding, or the hidden state that it meets."""
    pdl_enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, j = token // WIDTH, token % WIDTH
    column = tl.arange(0, BLOCK)
    mask = column < columns
    dtype = out.dtype.element_ty
    if tl.program_id(1) == 0:
        number = tl.load(tokens + row * tokens_stride + j)
        x = tl.load(table + number * columns + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_POSITIONS:
            position = tl.load(position_ids + token)
            at = positions + position * columns + column
            x += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            x = x.to(dtype).to(tl.float32)
        x = _normed(x, enorm_weight, enorm_bias, column, mask, columns, enorm_eps, CENTER_E)
        tl.store(out + token * 2 * columns + column, x.to(dtype), mask=mask)
    else:
        last = tl.load(last_ptr + row)
        before = row * BEFORE + j
        if SOURCE == FIRST:
            before = row * BEFORE + tl.maximum(last - (WIDTH - 1) + j, 0)
        if SOURCE == FURTHER:
            before = row * BEFORE + BEFORE - 1
        x = tl.load(hidden + before * columns + column, mask=mask, other=0.0)
        if FINAL:
            x = _normed(
                x.to(tl.float32), final_weight, final_bias, column, mask, columns, final_eps,
                CENTER_F,
            ).to(dtype)  # fmt: skip
        if SOURCE == NEXT:
            first = WIDTH - 1 - layer - last
            tail = tails + (tl.load(slots + row) * layers + layer) * columns + column
            if j == first:
                x = tl.load(tail, mask=mask, other=0.0)
            # WAR: one program of a row reads its tail and writes the next one.
            tl.debug_barrier()
            if (j == first) | ((first < 0) & (j == WIDTH - layer)):
                at = hidden + (row * BEFORE + WIDTH - layer) * columns + column
                kept = tl.load(at, mask=mask, other=0.0)
                if FINAL:
                    kept = _normed(
                        kept.to(tl.float32), final_weight, final_bias, column, mask, columns,
                        final_eps, CENTER_F,
                    ).to(dtype)  # fmt: skip
                tl.store(tail, kept, mask=mask)
        x = x.to(tl.float32)
        x = _normed(x, hnorm_weight, hnorm_bias, column, mask, columns, hnorm_eps, CENTER_H)
        tl.store(out + (token * 2 + 1) * columns + column, x.to(dtype), mask=mask)


@triton.jit
def _first_input_kernel(
    row_slots, row_tokens, row_last, row_first, finished, block_table, computed_from, max_total,
    inverse_temperature, top_k, top_p, seed,
    tokens, placed, sample_positions,
    row_inverse_temperature, row_top_k, row_top_p, row_seed,
    tokens_stride, block_columns, null_slot,
    table, enorm_weight, enorm_bias, hidden, hnorm_weight, hnorm_bias, out,
    columns, enorm_eps, hnorm_eps,
    WINDOW: tl.constexpr, LAYERS: tl.constexpr, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, PLACES: tl.constexpr,
    CENTER_E: tl.constexpr, CENTER_H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``_mtp_input_kernel`` of the first layer; a third program of each row's first token does the
    index arithmetic of the row, which none of the others reads."""
    pdl_enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, j = token // WINDOW, token % WINDOW
    at = tl.maximum(tl.load(row_last + row) - (WINDOW - 1) + j, 0)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    dtype = out.dtype.element_ty
    if tl.program_id(1) == 0:
        number = tl.load(row_tokens + row * tokens_stride + at)
        x = tl.load(table + number * columns + column, mask=mask, other=0.0).to(tl.float32)
        x = _normed(x, enorm_weight, enorm_bias, column, mask, columns, enorm_eps, CENTER_E)
        tl.store(out + token * 2 * columns + column, x.to(dtype), mask=mask)
    elif tl.program_id(1) == 1:
        before = hidden + (row * WINDOW + at) * columns + column
        x = tl.load(before, mask=mask, other=0.0).to(tl.float32)
        x = _normed(x, hnorm_weight, hnorm_bias, column, mask, columns, hnorm_eps, CENTER_H)
        tl.store(out + (token * 2 + 1) * columns + column, x.to(dtype), mask=mask)
    elif j == 0:
        draft_row(
            row, tl.num_programs(0) // WINDOW,
            row_slots, row_tokens, row_last, row_first, finished, block_table, computed_from,
            max_total, inverse_temperature, top_k, top_p, seed, tokens, placed, sample_positions,
            row_inverse_temperature, row_top_k, row_top_p, row_seed,
            tokens_stride, block_columns, null_slot,
            WINDOW, LAYERS, COUNT, BLOCK_SIZE, COLUMNS, PLACES,
        )  # fmt: skip


def _first_input(
    begin: RowsKernel,
    hidden: Tensor,
    table: Tensor,
    enorm: NormParameters,
    hnorm: NormParameters,
    out: Tensor,
) -> None:
    columns = table.shape[1]
    block = triton.next_power_of_2(columns)
    pdl = uses_pdl(out.device)
    _first_input_kernel[(len(out), 3)](
        *begin.arguments, table,
        enorm.weight, enorm.weight if enorm.bias is None else enorm.bias, hidden,
        hnorm.weight, hnorm.weight if hnorm.bias is None else hnorm.bias, out,
        columns, enorm.eps, hnorm.eps, **begin.constants,
        CENTER_E=enorm.bias is not None, CENTER_H=hnorm.bias is not None, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


def mtp_input(
    of: DraftInput,
    table: Tensor,
    positions: Tensor | None,
    enorm: NormParameters,
    hnorm: NormParameters,
    out: Tensor,
) -> None:
    """The input of an MTP layer's projection: ``[enorm(embedding), hnorm(hidden state)]``.

    Args:
        table: ``[vocabulary, N]``.
        positions: ``[positions, N]``, learned embeddings; None for none.
        out: ``[T, 2 N]``, contiguous, overwritten. The tails of the next step are kept too.
    """
    columns = table.shape[1]
    if columns > MAX_COLUMNS:
        return mtp_input_reference(of, table, positions, enorm, hnorm, out)
    if of.begin is not None and positions is None:
        return _first_input(of.begin, of.hidden, table, enorm, hnorm, out)
    if of.begin is not None:
        of.begin()
    rows, width = of.tokens.shape
    source = FIRST if of.draft == 0 else NEXT if of.draft == of.layer else FURTHER
    block = triton.next_power_of_2(columns)
    pdl = uses_pdl(out.device)
    final = hnorm if of.norm is None else of.norm
    _mtp_input_kernel[(rows * width, 2)](
        of.tokens, of.position_ids, table, table if positions is None else positions,
        enorm.weight, enorm.weight if enorm.bias is None else enorm.bias, of.hidden, of.last,
        of.slots, of.tails, hnorm.weight, hnorm.weight if hnorm.bias is None else hnorm.bias,
        final.weight, final.weight if final.bias is None else final.bias, out,
        of.tokens.stride(0), columns, of.tails.shape[1], of.layer, enorm.eps, hnorm.eps, final.eps,
        WIDTH=width, BEFORE=of.hidden.shape[1], SOURCE=source.value,
        HAS_POSITIONS=positions is not None, CENTER_E=enorm.bias is not None,
        CENTER_H=hnorm.bias is not None, FINAL=of.norm is not None,
        CENTER_F=final.bias is not None, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return None


def mtp_input_reference(
    of: DraftInput,
    table: Tensor,
    positions: Tensor | None,
    enorm: NormParameters,
    hnorm: NormParameters,
    out: Tensor,
) -> None:
    """:func:`mtp_input` with PyTorch."""
    if of.begin is not None:
        of.begin()
    embedded = F.embedding(of.tokens.flatten(), table)
    if positions is not None:
        embedded = embedded + F.embedding(of.position_ids, positions)
    out.copy_(torch.cat([enorm(embedded), hnorm(hidden_before(of).flatten(0, 1))], 1))


@triton.jit
def _mtp_output_kernel(
    x_ptr, weight, bias, out, chosen, statistics, columns, eps,
    WIDTH: tl.constexpr, CENTER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token."""
    pdl_enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    raw = tl.load(x_ptr + token * columns + column, mask=mask, other=0.0)
    x = raw.to(tl.float32)
    normed = _normed(x, weight, bias, column, mask, columns, eps, CENTER)
    tl.store(out + token * columns + column, normed.to(out.dtype.element_ty), mask=mask)
    if token % WIDTH == WIDTH - 1:
        row = token // WIDTH
        mean = 0.0
        if CENTER:
            mean = tl.sum(x, 0) / columns
            x = tl.where(mask, x - mean, 0.0)
            tl.store(chosen + row * columns + column, raw, mask=mask)
        else:
            scaled = x * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
            scaled = scaled.to(chosen.dtype.element_ty)
            tl.store(chosen + row * columns + column, scaled, mask=mask)
        tl.store(statistics + row * 2, mean)
        tl.store(statistics + row * 2 + 1, tl.sum(x * x, 0))


def mtp_output(
    x: Tensor, norm: NormParameters, out: Tensor, chosen: Tensor, statistics: Tensor
) -> None:
    """The norm of an MTP layer's output, and what the GEMM of the head reads, which norms it too.

    Args:
        x: ``[T, N]``, contiguous, n = T / R tokens of each row.
        out: ``[T, N]``, contiguous, filled with the normed x.
        chosen: ``[R, N]``, contiguous, filled with the last token of each row, before an RMSNorm
            times its weight.
        statistics: fp32 ``[R, 1, 2]``, contiguous, filled with theirs, as ``add_statistics`` does.
    """
    columns = x.shape[1]
    if columns > MAX_COLUMNS:
        return mtp_output_reference(x, norm, out, chosen, statistics)
    block = triton.next_power_of_2(columns)
    pdl = uses_pdl(x.device)
    _mtp_output_kernel[(len(x),)](
        x, norm.weight, norm.weight if norm.bias is None else norm.bias, out, chosen, statistics,
        columns, norm.eps,
        WIDTH=len(x) // len(chosen), CENTER=norm.bias is not None, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return None


def mtp_output_reference(
    x: Tensor, norm: NormParameters, out: Tensor, chosen: Tensor, statistics: Tensor
) -> None:
    """:func:`mtp_output` with PyTorch."""
    out.copy_(norm(x))
    last = x.unflatten(0, (len(chosen), -1))[:, -1]
    wide = last.float()
    mean = torch.zeros_like(wide[:, 0]) if norm.bias is None else wide.mean(1)
    statistics[:, 0, 0] = mean
    statistics[:, 0, 1] = (wide - mean[:, None]).square().sum(1)
    chosen.copy_(last * norm.weight if norm.bias is None else last)


@triton.jit
def _norm_rows_kernel(
    x_ptr, weight, bias, out, columns, eps,
    CENTER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token."""
    pdl_enter(PDL)
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
    x = _normed(x, weight, bias, column, mask, columns, eps, CENTER)
    tl.store(out + start + column, x.to(out.dtype.element_ty), mask=mask)


def norm_rows(x: Tensor, norm: NormParameters, out: Tensor) -> None:
    """The final norm of a decoder, from which the first layer drafts.

    Args:
        x: ``[T, N]``, contiguous.
        out: ``[T, N]``, contiguous, filled with the normed x.
    """
    columns = x.shape[1]
    if columns > MAX_COLUMNS:
        out.copy_(norm(x))
        return
    block = triton.next_power_of_2(columns)
    pdl = uses_pdl(x.device)
    _norm_rows_kernel[(len(x),)](
        x, norm.weight, norm.weight if norm.bias is None else norm.bias, out, columns, norm.eps,
        CENTER=norm.bias is not None, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


def input_kernel(x: Tensor) -> Callable[..., None]:
    """:func:`mtp_input` where ``x`` is."""
    return mtp_input if x.is_cuda else mtp_input_reference


def output_kernel(x: Tensor) -> Callable[..., None]:
    """:func:`mtp_output` where ``x`` is."""
    return mtp_output if x.is_cuda else mtp_output_reference
