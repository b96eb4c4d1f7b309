"""Triton kernels of the index arithmetic when MTP layers draft: one ahead of all drafts of a step,
or inside the kernel of the first layer's input (``mtp_norms``), and one that takes each draft from
its samples where the sampler does not do it.

The reference is ``drafting.mtp_rows.draft_rows``, equal bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.cache.block_allocator import NULL_BLOCK as NULL_BLOCK_
from megatron_async.kernels.compile import KernelTooLargeError
from megatron_async.kernels.pdl import pdl_enter, uses_pdl
from megatron_async.kernels.sampling import sample_cuda
from megatron_async.kernels.sampling.sample_cuda import Taken
from megatron_async.kernels.sampling.sample_triton import best_token, sample_splits
from megatron_async.kernels.sampling.step_state import SlotState
from megatron_async.sampling.sample import SampleInputs

NULL_BLOCK = tl.constexpr(NULL_BLOCK_)


class DraftingSlotState(SlotState, Protocol):
    """State by slot of an engine that drafts."""

    computed_from: torch.Tensor


@triton.jit
def draft_row(
    row, rows,
    row_slots, row_tokens, row_last, row_first, finished, block_table, computed_from, max_total,
    inverse_temperature, top_k, top_p, seed,
    tokens, placed, sample_positions,
    row_inverse_temperature, row_top_k, row_top_p, row_seed,
    tokens_stride, columns, null_slot,
    WINDOW: tl.constexpr, LAYERS: tl.constexpr, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row of a step; the other arguments are those of :class:`RowsKernel`."""
    slot = tl.load(row_slots + row)
    last = tl.load(row_last + row)
    end = tl.load(row_first + row) + last

    column = tl.arange(0, COLUMNS)
    index = last - (WINDOW - 1) + column
    index = tl.minimum(tl.maximum(index, 0), WINDOW - 1)
    exists = column < WINDOW + COUNT
    token = tl.load(row_tokens + row * tokens_stride + index, mask=exists, other=0)
    tl.store(tokens + row * (WINDOW + COUNT) + column, token, mask=exists)
    draft = exists & (column < COUNT)
    tl.store(sample_positions + column * rows + row, end + 1 + column, mask=draft)

    # A row's tokens in the forwards of all layers, then those of further drafts.
    place = tl.arange(0, PLACES)
    layer, j = place // WINDOW, place % WINDOW
    ahead = place - LAYERS * WINDOW
    is_layer = ahead < 0
    exists = place < LAYERS * WINDOW + COUNT - LAYERS
    position = end + tl.where(is_layer, j - WINDOW, ahead)
    valid = (is_layer & (last - (WINDOW - 1) + layer + j >= 0)) | ((ahead >= 0) & (position >= 0))
    valid &= (position >= tl.load(computed_from + slot)) & (slot != null_slot)
    valid &= position + 1 < tl.load(max_total + slot)
    position = tl.where(valid, position, 0)
    # A dead row writes to the null block.
    runs = exists & valid & (tl.load(finished + slot) == 0)
    block = tl.load(block_table + slot * columns + position // BLOCK_SIZE, mask=runs,
                    other=NULL_BLOCK)  # fmt: skip
    at = tl.where(
        is_layer, (layer * rows + row) * WINDOW + j, (LAYERS * WINDOW + ahead) * rows + row
    )
    size = rows * (LAYERS * WINDOW + COUNT - LAYERS)
    tl.store(placed + at, tl.where(valid, slot, null_slot), mask=exists)
    tl.store(placed + size + at, position, mask=exists)
    mapping = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(placed + 2 * size + at, mapping, mask=exists)
    tl.store(placed + 3 * size + at, position + 1, mask=exists)

    tl.store(row_inverse_temperature + row, tl.load(inverse_temperature + slot))
    tl.store(row_top_k + row, tl.load(top_k + slot))
    tl.store(row_top_p + row, tl.load(top_p + slot))
    tl.store(row_seed + row, tl.load(seed + slot))


@triton.jit
def _draft_rows_kernel(
    row_slots, row_tokens, row_last, row_first, finished, block_table, computed_from, max_total,
    inverse_temperature, top_k, top_p, seed,
    tokens, placed, sample_positions,
    row_inverse_temperature, row_top_k, row_top_p, row_seed,
    tokens_stride, columns, null_slot,
    WINDOW: tl.constexpr, LAYERS: tl.constexpr, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    pdl_enter(PDL)
    draft_row(
        tl.program_id(0), tl.num_programs(0),
        row_slots, row_tokens, row_last, row_first, finished, block_table, computed_from,
        max_total, inverse_temperature, top_k, top_p, seed, tokens, placed, sample_positions,
        row_inverse_temperature, row_top_k, row_top_p, row_seed, tokens_stride, columns, null_slot,
        WINDOW, LAYERS, COUNT, BLOCK_SIZE, COLUMNS, PLACES,
    )  # fmt: skip


class RowsKernel(NamedTuple):
    """The index arithmetic ahead of all drafts of a step; a call launches it.

    Args:
        rows: of the step.
        arguments, constants: of :func:`draft_row`, in order, and by name.
        outputs: the tensors of ``drafting.mtp_rows.DraftRows``, in its order, which it fills.
    """

    rows: int
    arguments: tuple[Tensor | int, ...]
    constants: Mapping[str, int]
    outputs: Sequence[Tensor]

    def __call__(self) -> None:
        pdl = uses_pdl(self.outputs[0].device)
        _draft_rows_kernel[(self.rows,)](
            *self.arguments, **self.constants, PDL=pdl, num_warps=1, launch_pdl=pdl
        )


def rows_kernel(
    slots: Tensor,
    sampled: Tensor,
    last: Tensor,
    first: Tensor,
    state: DraftingSlotState,
    layers: int,
    count: int,
    block_size: int,
    null_slot: int,
) -> RowsKernel:
    """What is to be launched.

    Args:
        slots, sampled, last, first: ``runner.drafter.SampledRows``.
        layers, count: that draft, and their drafts.
    """
    rows, window = sampled.shape
    if sampled.stride(1) != 1:
        sampled = sampled.contiguous()
    each = layers * window + count - layers
    device = slots.device
    tokens = torch.empty(rows, window + count, dtype=torch.int64, device=device)
    placed = torch.empty(4, rows * each, dtype=torch.int64, device=device)
    sample_positions = torch.empty(count, rows, dtype=torch.int64, device=device)
    parameters = (state.inverse_temperature, state.top_k, state.top_p, state.seed)
    of_rows = [torch.empty(rows, dtype=each.dtype, device=device) for each in parameters]
    arguments: tuple[Tensor | int, ...] = (
        slots.contiguous(), sampled, last.contiguous(), first.contiguous(),
        state.finished.view(torch.uint8), state.block_table, state.computed_from, state.max_total,
        *parameters, tokens, placed, sample_positions, *of_rows,
        sampled.stride(0), state.block_table.shape[1], null_slot,
    )  # fmt: skip
    constants = {
        "WINDOW": window, "LAYERS": layers, "COUNT": count, "BLOCK_SIZE": block_size,
        "COLUMNS": triton.next_power_of_2(window + count),
        "PLACES": triton.next_power_of_2(each),
    }  # fmt: skip
    outputs = (tokens, *placed.unbind(0), sample_positions, *of_rows)
    return RowsKernel(rows, arguments, constants, outputs)


@triton.jit
def _take_draft_kernel(
    packed, tokens, slots, by_slot, stride, slot_stride, splits,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    token = tl.maximum(best_token(packed, row, row >= 0, splits, SPLITS), 0)
    tl.store(tokens + row * stride, token)
    tl.store(by_slot + tl.load(slots + row) * slot_stride, token)


def sample_draft(logits: Tensor, inputs: SampleInputs, taken: Taken) -> None:
    """Sample a draft of each row, in one launch where the CUDA C++ sampler takes the logits.

    Args:
        logits: ``[R, V]``.
        inputs: of each row, contiguous.
    """
    if logits.stride(1) == 1 and sample_cuda.why_not(logits, None) is None:
        try:
            sample_cuda.best_of_rows(logits, inputs, taken=taken)
            return
        except KernelTooLargeError:
            pass  # the sampler below says so
    take_draft(sample_splits(logits, inputs, pdl=uses_pdl(logits.device)), taken)


def take_draft(packed: Tensor, taken: Taken) -> None:
    """Write the best of each row of ``packed`` [R, splits] (``sample_triton.sample_splits``) to
    where it goes."""
    tokens, by_slot, slots, _ = taken
    rows, splits = packed.shape
    pdl = uses_pdl(packed.device)
    _take_draft_kernel[(rows,)](
        packed, tokens, slots, by_slot, tokens.stride(0), by_slot.stride(0), splits,
        SPLITS=triton.next_power_of_2(splits), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
