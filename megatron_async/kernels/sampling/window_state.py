"""Triton kernels of a decode step with drafts: what ``step_state`` does, for rows that bring
windows of up to ``WINDOW`` tokens.

The reference is the torch code of ``runner.sampling_stage.SamplingStage`` and
``runner.step_program.StepProgram``. Tensors have rows on their first axis and the places of a
window, padded to a power of two, on the second. A kernel is one program here too.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_async.kernels.pdl import pdl_enter
from megatron_async.kernels.rings import release
from megatron_async.kernels.sampling.automata import Guides, states_behind
from megatron_async.kernels.sampling.step_state import (
    ENDED,
    FAILED,
    NULL_BLOCK,
    NUM_WARPS,
    RUNNING,
    SAMPLES,
    SLOT,
    WIDTH,
    DecodeBatch,
    Ring,
    SequencedRing,
    SlotState,
    rows_of_kernel,
    take_packet,
    words_at_once,
)
from megatron_async.kernels.sampling.verify import load_bounds, verify

MAX_TOKENS_AT_ONCE = 256


class SampledWindows(NamedTuple):
    """What a drafter needs to know of R rows, int64 each: ``runner.drafter.SampledRows``."""

    slots: torch.Tensor
    tokens: torch.Tensor
    last: torch.Tensor
    first: torch.Tensor

    @classmethod
    def make(cls, rows: int, window: int, device: torch.device) -> SampledWindows:
        """Make room for ``rows`` rows."""
        shapes = ((rows,), (rows, window), (rows,), (rows,))
        return cls(*(torch.zeros(s, dtype=torch.int64, device=device) for s in shapes))


@triton.jit(do_not_specialize=["rows"])
def _finish_and_publish_windows_kernel(
    packed, records, last_token, kv_length, finished, max_total, stop_ids, drafts, draft_width,
    seeds, target, tokens, last, first_position,
    ring, sequence, counter, states, ends, addresses,
    entries, stride, rows, splits, null_slot, words,
    GUIDES: tl.constexpr, STOPS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr, ACCEPT_BELOW: tl.constexpr, ON_DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # What the sampling kernel does not write is read while that runs.
    number = tl.load(counter)
    result = ring + number % entries * stride
    place = tl.arange(0, PLACES)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        record = records + row * WIDTH
        slot = tl.load(record + SLOT, mask=exists, other=0).to(tl.int64)
        samples = tl.load(record + SAMPLES, mask=exists, other=0)
        live = (samples != 0) & (tl.load(finished + slot, mask=exists, other=1) == 0)
        length = tl.load(kv_length + slot, mask=exists, other=0)
        draft, stops, limit = load_bounds(
            slot, exists, samples, length, max_total, stop_ids, drafts, draft_width, seeds,
            STOPS, WINDOW, PLACES, ACCEPT_BELOW,
        )  # fmt: skip
        pdl_enter(PDL)
        token, final, ended, failed = verify(
            packed, row.to(tl.int64), exists, splits, length, draft, stops, limit,
            SPLITS, WINDOW, PLACES, ACCEPT_BELOW,
        )  # fmt: skip
        status = tl.where(ended, ENDED, RUNNING)
        status = tl.where(live, tl.where(failed, FAILED, status), ENDED)
        count = tl.where(live, final + tl.where(failed, 0, 1), 0)
        known = tl.maximum(token, 0)
        newest = tl.sum(tl.where(place[None, :] == final[:, None], known, 0), 1)
        if GUIDES:
            state = tl.load(states + slot, mask=exists, other=-1).to(tl.int64)
            guided = live & (state >= 0)
        # WAR: a small block is held by several warps; all of them have read the state.
        tl.debug_barrier()
        # Live rows have slots of their own. The others leave no trace: the null slot, which they
        # share, stays finished.
        tl.store(last_token + slot, newest, mask=live)
        tl.store(finished + slot, ended.to(tl.uint8), mask=live)
        tl.store(kv_length + slot, length + final, mask=live)
        tl.store(result + row, count.to(tl.int32), mask=exists)
        tl.store(result + rows + row, status.to(tl.int32), mask=exists)
        inside = exists[:, None] & (place < WINDOW)[None, :]
        at = (2 + place[None, :]) * rows + row[:, None]
        tl.store(result + at, token.to(tl.int32), mask=inside)
        tl.store(target + row, tl.where(live, slot, null_slot), mask=exists)
        tl.store(tokens + row[:, None] * WINDOW + place[None, :], known, mask=inside)
        tl.store(last + row, tl.where(live, final, 0).to(tl.int64), mask=exists)
        tl.store(first_position + row, length, mask=exists)
        if GUIDES:
            some = tl.max(guided.to(tl.int32), 0)
            if some != 0:
                for step in tl.static_range(WINDOW):
                    taken = tl.sum(tl.where(place[None, :] == step, known, 0), 1)
                    counts = guided & (step <= final)
                    state = states_behind(addresses, ends + slot * words, state, taken, counts)
                tl.store(states + slot, state.to(tl.int32), mask=guided)
    release(sequence, counter, number, ON_DEVICE)


@triton.jit(do_not_specialize=["rows"])
def _read_packet_and_begin_windows_kernel(
    ring, counter, records, last_token, kv_length, finished, max_total, drafts, draft_width,
    block_table,
    token_ids, position_ids, slots, slot_mapping, lengths,
    entries, stride, rows, columns, null_slot,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    number = tl.load(counter)
    entry = ring + number % entries * stride
    take_packet(entry, records, block_table, rows, columns, WORDS, BLOCK, PDL)
    place = tl.arange(0, PLACES)[None, :]
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        inside = exists[:, None] & (place < WINDOW)
        slot = tl.load(records + row * WIDTH + SLOT, mask=exists, other=0).to(tl.int64)
        length = tl.load(kv_length + slot, mask=exists, other=0)
        limit = tl.load(max_total + slot, mask=exists, other=0)
        newest = tl.load(last_token + slot, mask=exists, other=0)
        runs = exists & (tl.load(finished + slot, mask=exists, other=1) == 0)
        samples = tl.load(records + row * WIDTH + SAMPLES, mask=exists, other=0)
        draft = drafts + slot[:, None] * draft_width + place - 1
        token = tl.load(draft, mask=inside & (place > 0), other=0)
        token = tl.where(place == 0, newest[:, None], token)
        # Padding: what the row has less than the window, and what is behind the last token but one
        # of its request, for which there are no blocks.
        position = length[:, None] + place
        beyond = (position + 1 >= limit[:, None]) | (place >= samples[:, None])
        position = tl.where(beyond, 0, position)
        # A dead row writes to the null block, so its overshoot harms nothing at any depth.
        at = slot[:, None] * columns + position // BLOCK_SIZE
        writes = runs[:, None] & inside & (beyond == 0)
        block = tl.load(block_table + at, mask=writes, other=NULL_BLOCK)
        # WAR: a small block is held by several warps; all of them have read the state.
        tl.debug_barrier()
        of_token = row[:, None] * WINDOW + place
        tl.store(token_ids + of_token, token, mask=inside)
        tl.store(position_ids + of_token, position, mask=inside)
        tl.store(slots + of_token, tl.where(beyond, null_slot, slot[:, None]), mask=inside)
        tl.store(slot_mapping + of_token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        tl.store(lengths + of_token, position + 1, mask=inside)
        tl.store(kv_length + slot, length + 1, mask=runs)
    tl.store(counter, number + 1)


def finish_windows(
    packed: torch.Tensor,
    records: torch.Tensor,
    state: SlotState,
    results: SequencedRing,
    sampled: SampledWindows,
    null_slot: int,
    guides: Guides | None = None,
    *,
    accept_below: int | None = None,
    pdl: bool = False,
) -> None:
    """Verify the windows of ``packed`` [R * window, splits] (``sample.sample_splits``) for the row
    records [R, ROW_WIDTH] int32: last tokens, lengths, ends, and the records of ``step.records``,
    which are published as the ring's next; fill ``sampled``. The states of ``guides`` go on by the
    tokens that count. With ``accept_below`` drafts are right
    whose ``sampling.synthetic_acceptance.synthetic_bits`` are less."""
    rows, splits = len(records), packed.shape[1]
    window = packed.shape[0] // rows
    _finish_and_publish_windows_kernel[(1,)](
        packed, records, state.last_token, state.kv_length, state.finished.view(torch.uint8),
        state.max_total, state.stop_ids, state.drafts, state.drafts.shape[1],
        None if accept_below is None else state.seed, *sampled,
        results.ring, results.sequence, results.counter, *(guides or (None, None, None)),
        *results.ring.shape, rows, splits, null_slot,
        0 if guides is None else guides.stops.shape[1], GUIDES=guides is not None,
        STOPS=state.stop_ids.shape[1], SPLITS=triton.next_power_of_2(splits),
        WINDOW=window, PLACES=triton.next_power_of_2(window), BLOCK=_rows_at_once(rows, window),
        ACCEPT_BELOW=accept_below, ON_DEVICE=packed.is_cuda, PDL=pdl,
        num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip


def begin_windows(
    records: torch.Tensor,
    state: SlotState,
    block_size: int,
    packets: Ring,
    batch: DecodeBatch,
    null_slot: int,
    *,
    pdl: bool = False,
) -> None:
    """:func:`~megatron_async.kernels.sampling.step_state.begin` of rows with drafts: ``batch`` has
    R * window tokens. Lengths advance by the last token alone."""
    rows, width = records.shape
    window = len(batch.token_ids) // rows
    _read_packet_and_begin_windows_kernel[(1,)](
        packets.ring, packets.counter, records, state.last_token, state.kv_length,
        state.finished.view(torch.uint8), state.max_total, state.drafts, state.drafts.shape[1],
        state.block_table, *batch,
        *packets.ring.shape, rows, state.block_table.shape[1], null_slot,
        BLOCK_SIZE=block_size, WORDS=words_at_once(rows_of_kernel(rows) * width), WINDOW=window,
        PLACES=triton.next_power_of_2(window), BLOCK=_rows_at_once(rows, window), PDL=pdl,
        num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip


def _rows_at_once(rows: int, window: int) -> int:
    places: int = triton.next_power_of_2(window)
    return max(1, min(MAX_TOKENS_AT_ONCE // places, rows_of_kernel(rows)))
