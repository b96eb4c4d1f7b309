"""Triton kernels of a decode step around the model: S behind the sampler, and H2D with the head of
F, for rows of one token; ``window_state`` has them for rows with drafts.

The reference is the torch code of ``runner.step_program.StepProgram``, which the CPU runs.
``finish`` and ``begin`` are one program each: a step's rows are few, and a barrier then orders what
one row writes before what another reads (a block assignment may be for another row's slot).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from megatron_async.cache.block_allocator import NULL_BLOCK as NULL_BLOCK_
from megatron_async.kernels.pdl import pdl_enter
from megatron_async.kernels.rings import release
from megatron_async.kernels.sampling.automata import Guides, states_behind
from megatron_async.kernels.sampling.sample_triton import best_token
from megatron_async.step import packet
from megatron_async.step.records import ENDED as ENDED_
from megatron_async.step.records import FAILED as FAILED_
from megatron_async.step.records import RUNNING as RUNNING_

MAX_ROWS_AT_ONCE = 256
MAX_WORDS_AT_ONCE = 4096
FEW_ROWS = (1, 8, 32, 128)
"""Kernels are compiled for these numbers of rows, and behind the last one for powers of two."""
NUM_WARPS = 4

NULL_BLOCK = tl.constexpr(NULL_BLOCK_)
WIDTH = tl.constexpr(packet.ROW_WIDTH)
SLOT = tl.constexpr(packet.ROW_SLOT)
SAMPLES = tl.constexpr(packet.ROW_SAMPLES)
ASSIGNED_SLOT = tl.constexpr(packet.ROW_ASSIGNED_SLOT)
ASSIGNED_COLUMN = tl.constexpr(packet.ROW_ASSIGNED_COLUMN)
ASSIGNED_BLOCK = tl.constexpr(packet.ROW_ASSIGNED_BLOCK)
RUNNING = tl.constexpr(RUNNING_)
ENDED = tl.constexpr(ENDED_)
FAILED = tl.constexpr(FAILED_)


class SlotState(Protocol):
    """Device-resident state by slot: ``runner.slot_state.SlotState``."""

    last_token: torch.Tensor
    kv_length: torch.Tensor
    finished: torch.Tensor
    block_table: torch.Tensor
    inverse_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    max_total: torch.Tensor
    stop_ids: torch.Tensor
    drafts: torch.Tensor


class DecodeBatch(NamedTuple):
    """What F needs to know of the tokens of a decode step, each [T] int64."""

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    slot_mapping: torch.Tensor
    lengths: torch.Tensor


class Ring(Protocol):
    """A pinned ring [entries, width] int32 and the device's count [1] int64 of entries done."""

    ring: torch.Tensor
    counter: torch.Tensor


class SequencedRing(Ring, Protocol):
    """A ring whose count the host sees in pinned int32 [1]."""

    sequence: torch.Tensor


# A program is hardly slower for rows that are not there, and each variant takes time at the start.
@triton.jit(do_not_specialize=["rows"])
def _finish_and_publish_kernel(
    packed, records, last_token, kv_length, finished, max_total, stop_ids,
    ring, sequence, counter, states, ends, addresses, entries, stride, rows, splits, words,
    GUIDES: tl.constexpr, STOPS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # What the sampling kernel does not write is read while that runs.
    number = tl.load(counter)
    result = ring + number % entries * stride
    stop = tl.arange(0, STOPS)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        record = records + row * WIDTH
        slot = tl.load(record + SLOT, mask=exists, other=0).to(tl.int64)
        samples = tl.load(record + SAMPLES, mask=exists, other=0) != 0
        live = samples & (tl.load(finished + slot, mask=exists, other=1) == 0)
        at = slot[:, None] * STOPS + stop[None, :]
        stops = tl.load(stop_ids + at, mask=exists[:, None], other=-1)
        length = tl.load(kv_length + slot, mask=exists, other=0)
        limit = tl.load(max_total + slot, mask=exists, other=0)
        pdl_enter(PDL)
        token = best_token(packed, row.to(tl.int64), exists, splits, SPLITS)
        # The stop ids of a set that is not full are -1, as is the token of a row that failed.
        failed = token < 0
        is_stop = tl.max((stops == token[:, None]).to(tl.int32), 1) != 0
        ended = is_stop | failed | (length + 1 >= limit)
        status = tl.where(ended, ENDED, RUNNING)
        status = tl.where(live, tl.where(failed, FAILED, status), ENDED)
        if GUIDES:
            state = tl.load(states + slot, mask=exists, other=-1).to(tl.int64)
            guided = live & (state >= 0)
        # WAR: a small block is held by several warps; all of them have read the state.
        tl.debug_barrier()
        # Live rows have slots of their own. The others leave no trace: the null slot, which they
        # share, stays finished.
        tl.store(last_token + slot, tl.maximum(token, 0), mask=live)
        tl.store(finished + slot, ended.to(tl.uint8), mask=live)
        tl.store(result + row, (live & (token >= 0)).to(tl.int32), mask=exists)
        tl.store(result + rows + row, status.to(tl.int32), mask=exists)
        tl.store(result + 2 * rows + row, token.to(tl.int32), mask=exists)
        if GUIDES:
            some = tl.max(guided.to(tl.int32), 0)
            if some != 0:
                state = states_behind(addresses, ends + slot * words, state, token, guided)
                tl.store(states + slot, state.to(tl.int32), mask=guided)
    release(sequence, counter, number, ON_DEVICE)


@triton.jit
def take_packet(
    entry, records, block_table, rows, columns,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the row records of a ring's entry and apply their block assignments."""
    # The packet is read, over the bus, while the kernel in front runs.
    for first in range(0, rows * WIDTH, WORDS):
        word = first + tl.arange(0, WORDS)
        mask = word < rows * WIDTH
        # The host rewrites the entry between launches: never take it from a cache.
        words = tl.load(entry + word, mask=mask, volatile=True)
        pdl_enter(PDL)
        tl.store(records + word, words, mask=mask)
    tl.debug_barrier()
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        record = records + row * WIDTH
        slot = tl.load(record + ASSIGNED_SLOT, mask=exists, other=0).to(tl.int64)
        column = tl.load(record + ASSIGNED_COLUMN, mask=exists, other=0)
        block = tl.load(record + ASSIGNED_BLOCK, mask=exists, other=0).to(tl.int64)
        tl.store(block_table + slot * columns + column, block, mask=exists)
    # An assignment stands in any row's record: all are in the table before any row reads it.
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows"])
def _read_packet_and_begin_kernel(
    ring, counter, records, last_token, kv_length, finished, block_table,
    token_ids, position_ids, slots, slot_mapping, lengths,
    entries, stride, rows, columns,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    number = tl.load(counter)
    entry = ring + number % entries * stride
    take_packet(entry, records, block_table, rows, columns, WORDS, BLOCK, PDL)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        slot = tl.load(records + row * WIDTH + SLOT, mask=exists, other=0).to(tl.int64)
        position = tl.load(kv_length + slot, mask=exists, other=0)
        token = tl.load(last_token + slot, mask=exists, other=0)
        runs = exists & (tl.load(finished + slot, mask=exists, other=1) == 0)
        # A dead row writes to the null block, so its overshoot harms nothing at any depth.
        at = slot * columns + position // BLOCK_SIZE
        block = tl.load(block_table + at, mask=runs, other=NULL_BLOCK)
        # WAR: a small block is held by several warps; all of them have read the state.
        tl.debug_barrier()
        tl.store(token_ids + row, token, mask=exists)
        tl.store(position_ids + row, position, mask=exists)
        tl.store(slots + row, slot, mask=exists)
        tl.store(slot_mapping + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
        tl.store(lengths + row, position + 1, mask=exists)
        tl.store(kv_length + slot, position + 1, mask=runs)
    tl.store(counter, number + 1)


def finish(
    packed: torch.Tensor,
    records: torch.Tensor,
    state: SlotState,
    results: SequencedRing,
    guides: Guides | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Take the tokens of ``packed`` [R, splits] (``sample.sample_splits``) for the row records
    [R, ROW_WIDTH] int32: last tokens, ends, and the records [3, R] of ``step.records``, which are
    published as the ring's next. The states of ``guides`` go on by these tokens."""
    rows, splits = packed.shape
    _finish_and_publish_kernel[(1,)](
        packed, records, state.last_token, state.kv_length, state.finished.view(torch.uint8),
        state.max_total, state.stop_ids, results.ring, results.sequence, results.counter,
        *(guides or (None, None, None)), *results.ring.shape, rows, splits,
        0 if guides is None else guides.stops.shape[1], GUIDES=guides is not None,
        STOPS=state.stop_ids.shape[1], SPLITS=triton.next_power_of_2(splits),
        BLOCK=min(MAX_ROWS_AT_ONCE, rows_of_kernel(rows)), ON_DEVICE=packed.is_cuda, PDL=pdl,
        num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip


def begin(
    records: torch.Tensor,
    state: SlotState,
    block_size: int,
    packets: Ring,
    batch: DecodeBatch,
    *,
    pdl: bool = False,
) -> None:
    """Take the ring's next packet into the row records [R, ROW_WIDTH] int32, apply its block
    assignments, fill ``batch`` and advance the lengths of the rows that run.

    Lengths may advance ahead of the forward: in a decode step it reads ``batch`` alone.
    """
    rows, width = records.shape
    of_kernel = rows_of_kernel(rows)
    _read_packet_and_begin_kernel[(1,)](
        packets.ring, packets.counter, records, state.last_token, state.kv_length,
        state.finished.view(torch.uint8), state.block_table, *batch,
        *packets.ring.shape, rows, state.block_table.shape[1],
        BLOCK_SIZE=block_size, WORDS=words_at_once(of_kernel * width),
        BLOCK=min(MAX_ROWS_AT_ONCE, of_kernel), PDL=pdl,
        num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip


def rows_of_kernel(rows: int) -> int:
    """For how many rows the kernel is compiled that takes ``rows``: a power of two."""
    few = (each for each in FEW_ROWS if each >= rows)
    return next(few, int(triton.next_power_of_2(rows)))


def words_at_once(words: int) -> int:
    """How many words of a packet are in registers together."""
    return min(MAX_WORDS_AT_ONCE, int(triton.next_power_of_2(words)))
