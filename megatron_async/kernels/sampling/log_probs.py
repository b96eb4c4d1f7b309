"""Triton kernels of log-probabilities, bit for bit equal to ``sampling.log_probs``.

They run behind the one of ``process_logits``, which leaves the maxima, and behind the sampler. One
program a row finds what its tiles need; a kernel over tiles of rows adds up masses and lists the
most likely ids; then one program a row joins the tiles, writes the row's words of the record, and
notes the sampled token in the tables. With drafts each position of a window is a row here, and its
token is noted if it counts.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.pdl import pdl_enter
from megatron_async.kernels.sampling.process_logits import (
    LENGTH,
    NEG_INF_KEY,
    NO_LOG_PROBS,
    NUM_WARPS,
    OF_LOGITS,
    PENALTIES,
    PROCESSED_LOG_PROBS,
    RAW_LOG_PROBS,
    TOP,
    RowBuffers,
    SamplingState,
    bounded,
    from_key,
    row_keys,
)
from megatron_async.kernels.sampling.row_thresholds import (
    LOG2_E,
    MASS_UNIT,
    NAN_KEY,
    NEG_INF,
    NO_KEY,
    exact_log,
    exp2_mass,
    filter_threshold,
    log_prob_of,
    order_key,
    scale,
)
from megatron_async.kernels.sampling.sample_triton import BLOCK as SEARCH_BLOCK
from megatron_async.kernels.sampling.sample_triton import ID_MASK, best_token
from megatron_async.kernels.sampling.verify import load_bounds, verify
from megatron_async.sampling.process_logits import Tables
from megatron_async.step import packet
from megatron_async.step.extras import LOG_PROB_WORDS as LOG_PROB_WORDS_

EMPTY = tl.constexpr(-(2**63))  # below every candidate
NAN_BITS = tl.constexpr(0x7FC00000)
PLACES = tl.constexpr(triton.next_power_of_2(TOP.value))
WIDTH = tl.constexpr(packet.ROW_WIDTH)
SLOT = tl.constexpr(packet.ROW_SLOT)
SAMPLES = tl.constexpr(packet.ROW_SAMPLES)
LOG_PROB_WORDS = tl.constexpr(LOG_PROB_WORDS_)
MERGE_WARPS = 4
ROW_WARPS = 8


@triton.jit
def _factor(mode, inverse_temperature):
    """What logits are multiplied with."""
    applies = (mode == PROCESSED_LOG_PROBS) & (inverse_temperature > 0.0)
    return tl.where(applies, bounded(inverse_temperature), 1.0)


@triton.jit
def _is_valid(largest):
    """Whether the key of a row's maximum is neither NaN's nor minus infinity's."""
    return (largest != NAN_KEY) & (largest > NEG_INF_KEY)


@triton.jit
def _least_listed(keys, exists, TILES: tl.constexpr):
    """Return the TOP-th largest of the tiles' maxima, which at least TOP logits reach."""
    above = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    return tl.min(tl.where((above < TOP) & exists, keys, NAN_KEY), 0)


@triton.jit(do_not_specialize=["vocab_size"])
def _row_kernel(
    processed, processed_stride, raw_maxima, maxima, largest_ptr, least_listed_ptr, threshold_ptr,
    index, index_stride, features_ptr, log_probs_ptr, inverse_temperature_ptr, top_k_ptr, top_p_ptr,
    vocab_size, tiles,
    WINDOW: tl.constexpr, TILES: tl.constexpr, SEARCH_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + row // WINDOW * index_stride).to(tl.int64)
    mode = tl.load(log_probs_ptr + slot)
    if mode != NO_LOG_PROBS:
        tile = tl.arange(0, TILES)
        if mode == RAW_LOG_PROBS:
            keys = row_keys(raw_maxima, row, tiles, TILES)
        else:
            keys = row_keys(maxima, row, tiles, TILES)
        largest = tl.max(keys, 0)
        if (mode == PROCESSED_LOG_PROBS) & ((tl.load(features_ptr + slot) & OF_LOGITS) != 0):
            # A row without a candidate has failed.
            largest = tl.where(largest == NEG_INF_KEY, NAN_KEY, largest)
        least_listed = tl.full([], NO_KEY, tl.int32)
        if tiles >= TOP:
            least_listed = _least_listed(keys, tile < tiles, TILES)
        threshold = tl.full([], NO_KEY, tl.int64)
        inverse_temperature = tl.load(inverse_temperature_ptr + slot)
        is_filtered = (mode == PROCESSED_LOG_PROBS) & (inverse_temperature > 0.0)
        if is_filtered & (largest != NAN_KEY):
            top_k = tl.load(top_k_ptr + slot)
            top_p = tl.load(top_p_ptr + slot)
            if ((top_k > 0) & (top_k < vocab_size)) | ((top_p > 0.0) & (top_p < 1.0)):
                threshold = filter_threshold(
                    processed + row * processed_stride, vocab_size, bounded(inverse_temperature),
                    top_k, top_p, 0, SEARCH_BLOCK,
                )  # fmt: skip
        tl.store(largest_ptr + row, largest)
        tl.store(least_listed_ptr + row, least_listed)
        tl.store(threshold_ptr + row, threshold)


@triton.jit(do_not_specialize=["vocab_size"])
def _tiles_kernel(
    logits, logits_stride, processed, processed_stride, index, index_stride, log_probs_ptr,
    inverse_temperature_ptr, largest_ptr, least_listed_ptr, threshold_ptr, masses, candidates,
    vocab_size, WINDOW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(index + row // WINDOW * index_stride).to(tl.int64)
    mode = tl.load(log_probs_ptr + slot)
    if mode != NO_LOG_PROBS:
        largest = tl.load(largest_ptr + row)
        if _is_valid(largest):
            factor = _factor(mode, tl.load(inverse_temperature_ptr + slot))
            ids = tile * BLOCK + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            if mode == RAW_LOG_PROBS:
                source = logits + row * logits_stride + ids
                x = tl.load(source, mask=inside, other=NEG_INF).to(tl.float32)
            else:
                x = tl.load(processed + row * processed_stride + ids, mask=inside, other=NEG_INF)
            keys = order_key(x)
            kept = (x > NEG_INF) & (keys.to(tl.int64) >= tl.load(threshold_ptr + row))
            scaled_max = scale(from_key(largest), factor)
            mass = exp2_mass((scale(x, factor) - scaled_max) * LOG2_E)
            at = row * tl.num_programs(1) + tile
            tl.store(masses + at, tl.sum(tl.where(kept, mass, 0), 0))
            listed = kept & (keys >= tl.load(least_listed_ptr + row))
            packed = (keys.to(tl.int64) << 32) | (ids ^ ID_MASK).to(tl.int64)
            packed = tl.where(listed, packed, EMPTY)
            # Few ids are listed, but where one tile has all of a row's most likely ones.
            best = tl.max(packed, 0)
            number = tl.full([], 0, tl.int32)
            while (number < TOP) & (best > EMPTY):
                tl.store(candidates + at * TOP + number, best)
                packed = tl.where(packed == best, EMPTY, packed)
                best = tl.max(packed, 0)
                number += 1
            place = tl.arange(0, PLACES)
            rest = (place >= number) & (place < TOP)
            tl.store(candidates + at * TOP + place, tl.full([PLACES], EMPTY, tl.int64), mask=rest)


@triton.jit
def _note_of_window(
    counts, recent, features, packed, row, splits, slot, samples, length, max_total, stop_ids,
    drafts, draft_width, seeds, finished, vocab_size,
    STOPS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, WINDOW_PLACES: tl.constexpr,
    ACCEPT_BELOW: tl.constexpr,
):  # fmt: skip
    """Note the token of one position of a live row's window. Its other positions, which other
    programs note, may have the same token."""
    only = row // WINDOW + tl.arange(0, 1)
    exists = only >= 0
    none = tl.zeros([1], tl.int32)
    draft, stops, limit = load_bounds(
        slot + none, exists, samples + none, length + none, max_total, stop_ids, drafts,
        draft_width, seeds,
        STOPS, WINDOW, WINDOW_PLACES, ACCEPT_BELOW,
    )  # fmt: skip
    token, final, _, failed = verify(
        packed, only, exists, splits, length + none, draft, stops, limit,
        SPLITS, WINDOW, WINDOW_PLACES, ACCEPT_BELOW,
    )  # fmt: skip
    count = tl.max(final + tl.where(failed, 0, 1), 0)
    place = row % WINDOW
    own = tl.arange(0, WINDOW_PLACES)[None, :] == place
    token = tl.max(tl.max(tl.where(own, token, 0), 1), 0)
    is_live = (samples != 0) & (tl.load(finished + slot) == 0)
    notes = is_live & (place < count)
    tl.atomic_add(
        counts + slot * vocab_size + token, 1, mask=notes & ((features & PENALTIES) != 0),
        sem="relaxed",
    )  # fmt: skip
    # Where a window has more tokens than are kept, the last ones stay.
    column = (length + place) & (LENGTH - 1)
    tl.store(
        recent + slot * LENGTH + column, token.to(tl.int32), mask=notes & (place + LENGTH >= count)
    )


# One for all numbers of rows, and of splits that they come in.
@triton.jit(do_not_specialize=["rows", "offset", "splits"])
def _merge_kernel(
    best, logits, logits_stride, processed, processed_stride, records, log_probs_ptr,
    inverse_temperature_ptr, largest_ptr, threshold_ptr, masses, candidates,
    out, counter, entries, entry_stride, offset,
    features_ptr, counts, recent, position_ptr, finished, max_total, stop_ids, drafts,
    draft_width, seeds, vocab_size, rows, splits, tiles,
    TILES: tl.constexpr, CANDIDATES: tl.constexpr, SPLITS: tl.constexpr, STOPS: tl.constexpr,
    WINDOW: tl.constexpr, WINDOW_PLACES: tl.constexpr, ACCEPT_BELOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    record = records + row // WINDOW * WIDTH
    slot = tl.load(record + SLOT).to(tl.int64)
    only = row + tl.arange(0, 1)
    token = tl.max(best_token(best, only, only >= 0, splits, SPLITS), 0)
    mode = tl.load(log_probs_ptr + slot)
    place = tl.arange(0, PLACES)
    token_bits = tl.full([], 0, tl.int32)
    top_ids = tl.zeros([PLACES], tl.int32)
    top_bits = tl.zeros([PLACES], tl.int32)
    if mode != NO_LOG_PROBS:
        token_bits = tl.full([], NAN_BITS, tl.int32)
        top_ids = tl.full([PLACES], -1, tl.int32)
        top_bits = tl.full([PLACES], NAN_BITS, tl.int32)
        largest = tl.load(largest_ptr + row)
        if _is_valid(largest):
            factor = _factor(mode, tl.load(inverse_temperature_ptr + slot))
            scaled_max = scale(from_key(largest), factor)
            tile = tl.arange(0, TILES)
            mass = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0)
            log_total = exact_log(tl.sum(mass, 0).to(tl.float32) * MASS_UNIT)
            number = tl.arange(0, CANDIDATES)
            listed = tl.load(
                candidates + row * tiles * TOP + number, mask=number < tiles * TOP, other=EMPTY
            )
            top = tl.full([PLACES], EMPTY, tl.int64)
            for rank in range(TOP):
                most = tl.max(listed, 0)
                top = tl.where(place == rank, most, top)
                listed = tl.where(listed == most, EMPTY, listed)
            x = from_key((top >> 32).to(tl.int32))
            is_id = top > EMPTY
            log_prob = tl.where(is_id, log_prob_of(x, factor, scaled_max, log_total), NEG_INF)
            top_bits = log_prob.to(tl.int32, bitcast=True)
            top_ids = tl.where(is_id, ((top & ID_MASK) ^ ID_MASK).to(tl.int32), -1)
            if token >= 0:
                if mode == RAW_LOG_PROBS:
                    own = tl.load(logits + row * logits_stride + token).to(tl.float32)
                else:
                    own = tl.load(processed + row * processed_stride + token)
                kept = (own > NEG_INF) & (
                    order_key(own).to(tl.int64) >= tl.load(threshold_ptr + row)
                )
                own = tl.where(kept, log_prob_of(own, factor, scaled_max, log_total), NEG_INF)
                token_bits = own.to(tl.int32, bitcast=True)
    words = out + tl.load(counter) % entries * entry_stride + offset + row // WINDOW
    if WINDOW > 1:
        words += row % WINDOW * LOG_PROB_WORDS * rows
    tl.store(words, token_bits)
    tl.store(words + (1 + place) * rows, top_ids, mask=place < TOP)
    tl.store(words + (1 + TOP + place) * rows, top_bits, mask=place < TOP)

    # Live rows have slots of their own; the null slot, which others share, stays finished.
    features = tl.load(features_ptr + slot)
    if WINDOW > 1:
        if features != 0:
            _note_of_window(
                counts, recent, features, best, row, splits, slot, tl.load(record + SAMPLES),
                tl.load(position_ptr + slot), max_total, stop_ids, drafts, draft_width, seeds,
                finished, vocab_size,
                STOPS, SPLITS, WINDOW, WINDOW_PLACES, ACCEPT_BELOW,
            )  # fmt: skip
    else:
        is_live = (tl.load(record + SAMPLES) != 0) & (tl.load(finished + slot) == 0)
        notes = is_live & (token >= 0) & (features != 0)
        count = counts + slot * vocab_size + tl.maximum(token, 0)
        before = tl.load(count)
        position = tl.load(position_ptr + slot)
        # WAR: the number is held by several threads; all of them have read it.
        tl.debug_barrier()
        tl.store(count, before + 1, mask=notes & ((features & PENALTIES) != 0))
        tl.store(recent + slot * LENGTH + (position & (LENGTH - 1)), token.to(tl.int32), mask=notes)


def log_probs_and_advance(
    best: Tensor,
    logits: Tensor,
    tables: Tables,
    records: Tensor,
    state: SamplingState,
    finished: Tensor,
    buffers: RowBuffers,
    out: Tensor,
    counter: Tensor,
    offset: int,
    *,
    window: int = 1,
    accept_below: int | None = None,
    pdl: bool = False,
) -> None:
    """Write what ``sampling.log_probs.pack`` gives for the rows to ``out[counter % entries,
    offset:]``, zeros for those that did not ask, and note the tokens of live rows in the tables
    (``sampling.process_logits.advance``).

    Args:
        best: int64 [R, splits] of ``sample_splits``, which sampled ``buffers.processed``.
        logits: [R, V], of the model.
        records: int32 [R / window, ROW_WIDTH].
        finished: uint8 by slot, before this step's tokens.
        buffers: as ``process_logits_gpu`` left them.
        accept_below: as for ``window_state.finish_windows``.
        out: int32 [entries, words], pinned or on the device; ``counter`` int64 [1] on the device.
    """
    rows, vocab_size = logits.shape
    splits, tiles, stops = best.shape[1], buffers.maxima.shape[1], state.stop_ids.shape[1]
    of_window: tuple[Tensor | int | None, ...] = (None, None, None, 0, None)
    if window > 1:
        seeds = None if accept_below is None else state.seed
        of_window = (state.max_total, state.stop_ids, state.drafts, state.drafts.shape[1], seeds)
    processed = buffers.processed
    index = records[:, packet.ROW_SLOT]
    inputs = (logits, logits.stride(0), processed, processed.stride(0))
    _row_kernel[(rows,)](
        processed, processed.stride(0), buffers.raw_maxima, buffers.maxima, buffers.largest,
        buffers.least_listed, buffers.threshold, index, index.stride(0), tables.features,
        tables.log_probs, state.inverse_temperature, state.top_k, state.top_p, vocab_size, tiles,
        WINDOW=window, TILES=triton.next_power_of_2(tiles), SEARCH_BLOCK=SEARCH_BLOCK, PDL=pdl,
        num_warps=ROW_WARPS, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    _tiles_kernel[(rows, tiles)](
        *inputs, index, index.stride(0), tables.log_probs, state.inverse_temperature,
        buffers.largest, buffers.least_listed, buffers.threshold, buffers.masses,
        buffers.candidates, vocab_size, WINDOW=window, BLOCK=buffers.block, PDL=pdl,
        num_warps=NUM_WARPS, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        best, *inputs, records, tables.log_probs, state.inverse_temperature, buffers.largest,
        buffers.threshold, buffers.masses, buffers.candidates, out, counter, *out.shape, offset,
        tables.features, tables.counts, tables.recent, state.kv_length, finished, *of_window,
        vocab_size, rows // window, splits, tiles, TILES=triton.next_power_of_2(tiles),
        CANDIDATES=triton.next_power_of_2(tiles * TOP.value),
        SPLITS=_splits_of_kernel(splits, window), STOPS=stops, WINDOW=window,
        WINDOW_PLACES=triton.next_power_of_2(window), ACCEPT_BELOW=accept_below, PDL=pdl,
        num_warps=MERGE_WARPS, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip


def _splits_of_kernel(splits: int, window: int) -> int:
    """A warp looks at 32 as fast as at one; of a window it looks at many."""
    padded = int(triton.next_power_of_2(splits))
    return padded if window > 1 else max(padded, 32)
