"""Triton kernel of logits processing, bit for bit equal to ``sampling.process_logits``.

A row is split over programs; the one that ends last does what needs the row's maximum. Float
operations are those of the reference, one by one: ``enable_fp_fusion=False``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.pdl import pdl_enter
from megatron_async.kernels.sampling.automata import allowed_words, state_behind
from megatron_async.kernels.sampling.row_thresholds import (
    NAN_KEY,
    NEG_INF,
    NO_KEY,
    SCALED_LIMIT,
    is_nan,
    order_key,
    scale,
)
from megatron_async.sampling.process_logits import IN_PROMPT as IN_PROMPT_
from megatron_async.sampling.process_logits import RECENT, Tables, mask_words
from megatron_async.step import extras

BLOCK = 2048
"""Logits of a program."""
NUM_WARPS = 4
ROW_BLOCK = 8192
"""Logits at a time of the program that does what is left of a row."""

IN_PROMPT = tl.constexpr(IN_PROMPT_)
PENALTIES = tl.constexpr(extras.FEATURE_PENALTIES)
MIN_P = tl.constexpr(extras.FEATURE_MIN_P)
MIN_TOKENS = tl.constexpr(extras.FEATURE_MIN_TOKENS)
BIAS = tl.constexpr(extras.FEATURE_BIAS)
ALLOWED = tl.constexpr(extras.FEATURE_ALLOWED)
BAD_WORDS = tl.constexpr(extras.FEATURE_BAD_WORDS)
GUIDED = tl.constexpr(extras.FEATURE_GUIDED)
OF_LOGITS = tl.constexpr(extras.FEATURES_OF_LOGITS)
BIASES = tl.constexpr(extras.MAX_LOGIT_BIASES)
WORDS = tl.constexpr(extras.MAX_BAD_WORDS)
LENGTH = tl.constexpr(RECENT)
TOP = tl.constexpr(extras.MAX_TOP_LOG_PROBS)
NO_LOG_PROBS = tl.constexpr(extras.NO_LOG_PROBS)
RAW_LOG_PROBS = tl.constexpr(extras.RAW_LOG_PROBS)
PROCESSED_LOG_PROBS = tl.constexpr(extras.PROCESSED_LOG_PROBS)
NEG_INF_KEY = tl.constexpr(-0x7F800001)  # order_key of it


class Masks(Protocol):
    """A pinned ring of what guides allow, by row of logits: ``masks`` int32 [entries, rows, words]
    and ``masked`` int32 [entries, rows], 0 or 1."""

    masks: Tensor
    masked: Tensor


class SamplingState(Protocol):
    """Device-resident state by slot: of ``runner.slot_state.SlotState``."""

    kv_length: Tensor
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    finished: Tensor
    max_total: Tensor
    stop_ids: Tensor
    drafts: Tensor


class RowBuffers(NamedTuple):
    """What the kernels of an extended S leave for each other, for R rows of T tiles.

    Args:
        processed: float32 [R, V], rows aligned to 128 bytes.
        raw_maxima, maxima: int32 [R, T], the largest ``order_key`` of each tile of the logits, and
            of the processed ones but for min-p, NAN_KEY if it holds NaN.
        arrivals: int32 [R], tiles of the row that are processed; 0 between launches.
        largest: int32 [R], that of the whole row of the logits whose log-probabilities are asked.
        least_listed: int32 [R], a key that at least TOP logits of the row reach, if it has as many.
        threshold: int64 [R], the smallest key that top-k and top-p keep.
        masses: int64 [R, T], the sum of each tile's masses.
        candidates: int64 [R, T, TOP], the most likely ids of each tile.
        block: logits of a tile.
    """

    processed: Tensor
    raw_maxima: Tensor
    maxima: Tensor
    arrivals: Tensor
    largest: Tensor
    least_listed: Tensor
    threshold: Tensor
    masses: Tensor
    candidates: Tensor
    block: int

    @classmethod
    def make(cls, rows: int, vocab_size: int, device: torch.device) -> RowBuffers:
        """Make room for ``rows`` rows."""
        tiles = triton.cdiv(vocab_size, BLOCK)

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            room(rows, triton.cdiv(vocab_size, 32) * 32, dtype=torch.float32)[:, :vocab_size],
            room(rows, tiles),
            room(rows, tiles),
            room(rows),
            room(rows),
            room(rows),
            room(rows, dtype=torch.int64),
            room(rows, tiles, dtype=torch.int64),
            room(rows, tiles, extras.MAX_TOP_LOG_PROBS, dtype=torch.int64),
            BLOCK,
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes on the device."""
        return sum(t.untyped_storage().nbytes() for t in self[:-1])  # type: ignore[union-attr]


@triton.jit
def from_key(key):
    """The float32 of an order-preserving key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_keys(maxima, row, tiles, TILES: tl.constexpr):
    """The largest key of each of a row's tiles, behind them NO_KEY."""
    tile = tl.arange(0, TILES)
    # Past L1: other programs may have written them in this launch.
    return tl.load(
        maxima + row * tiles + tile, mask=tile < tiles, other=NO_KEY, cache_modifier=".cg"
    )


@triton.jit
def bounded(inverse_temperature):
    """The factor that ``scale`` takes, of a positive inverse temperature."""
    return tl.where(inverse_temperature > SCALED_LIMIT, SCALED_LIMIT, inverse_temperature)


@triton.jit
def _bits(words, start, count, BLOCK: tl.constexpr):
    """Whether the ids ``start + [0, BLOCK)`` are in a mask of ``count`` words."""
    word = start // 32 + tl.arange(0, BLOCK // 32)
    return _spread(tl.load(words + word, mask=word < count, other=0), BLOCK)


@triton.jit
def _spread(words, BLOCK: tl.constexpr):
    """The bits of words [BLOCK / 32]."""
    bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tl.reshape(bits, [BLOCK]) != 0


@triton.jit
def _matched_words(bad_words, recent, drafts, position, ahead, WINDOW: tl.constexpr):
    """The last token of each of a slot's bad words whose others came just now, else -1: [WORDS].
    The last ``ahead`` tokens before the position are drafts."""
    word, column = tl.arange(0, WORDS)[:, None], tl.arange(0, LENGTH)
    tokens = tl.load(bad_words + word * LENGTH + column[None, :])
    at = position - (LENGTH - 1) + column
    before = tl.load(recent + (at & (LENGTH - 1)), mask=at >= 0, other=-1)
    if WINDOW > 1:
        draft = at - (position - ahead)
        is_draft = (draft >= 0) & (draft < ahead)
        drafted = tl.load(drafts + draft, mask=is_draft, other=-1)
        before = tl.where(is_draft, drafted.to(tl.int32), before)
    is_last = (column == LENGTH - 1)[None, :]
    fits = is_last | (tokens < 0) | (tokens == before[None, :])
    last = tl.max(tl.where(is_last, tokens, -1), 1)
    return tl.where(tl.min(fits.to(tl.int32), 1) != 0, last, -1)


@triton.jit
def _penalized(x, words, repetition, presence, frequency):
    count = words & (IN_PROMPT - 1)
    x = tl.where(words != 0, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - frequency * count.to(tl.float32)
    return tl.where(count > 0, x - presence, x)


@triton.jit
def _finish_row(
    out, largest, features, slot, min_p_ptr, inverse_temperature_ptr, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Min-p, and the rule for rows without a candidate."""
    if largest == NEG_INF_KEY:
        tl.store(out, float("nan"))
    elif ((features & MIN_P) != 0) & (largest != NAN_KEY):
        inverse_temperature = tl.load(inverse_temperature_ptr + slot)
        if inverse_temperature > 0.0:
            factor = bounded(inverse_temperature)
            least = scale(from_key(largest), factor) + tl.load(min_p_ptr + slot)
            for start in range(0, vocab_size, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                inside = ids < vocab_size
                # Past L1: other programs have written them in this launch.
                x = tl.load(out + ids, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(out + ids, NEG_INF, mask=inside & (scale(x, factor) < least))


# A vocabulary of one must stay a number in the kernels.
@triton.jit(do_not_specialize=["vocab_size"])
def _process_kernel(
    logits, logits_stride, raw, raw_stride, processed, processed_stride, raw_maxima, maxima,
    index, index_stride, position_ptr, features_ptr, min_total_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, counts, recent, bias_ids, bias_values, bad_words, allowed, stops,
    masks, masked, counter, mask_entries, mask_rows, drafts_ptr, draft_width,
    arrivals, min_p_ptr, inverse_temperature_ptr, automaton_ptr, addresses,
    vocab_size, mask_size, HAS_AUTOMATA: tl.constexpr, HAS_MASKS: tl.constexpr,
    HAS_RAW: tl.constexpr, WINDOW: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a row; the row's last program then does the rest of it. A row is a position of a
    window; the drafts before it are tokens of the output."""
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    window = row // WINDOW
    ahead = row % WINDOW
    slot = tl.load(index + window * index_stride).to(tl.int64)
    features = tl.load(features_ptr + slot)
    start = tile * BLOCK
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=NEG_INF).to(tl.float32)
    failed = is_nan(x)
    out = processed + row * processed_stride
    keys = tl.where(inside, tl.where(failed, NAN_KEY, order_key(x)), NO_KEY)
    largest = tl.max(keys, 0)
    at = row * tl.num_programs(1) + tile
    of_raw = largest
    if HAS_RAW:
        y = tl.load(raw + row * raw_stride + ids, mask=inside, other=NEG_INF).to(tl.float32)
        of_raw = tl.max(tl.where(inside, tl.where(is_nan(y), NAN_KEY, order_key(y)), NO_KEY), 0)
    tl.store(raw_maxima + at, of_raw)
    if (features & OF_LOGITS) != 0:
        position = tl.load(position_ptr + slot) + ahead
        drafts = drafts_ptr
        if WINDOW > 1:
            drafts += slot * draft_width
        if (features & ALLOWED) != 0:
            mask = _bits(allowed + slot * mask_size, start, mask_size, BLOCK)
            x = tl.where(mask, x, NEG_INF)
        if HAS_AUTOMATA:
            state = tl.load(automaton_ptr + slot).to(tl.int64)
            if ((features & GUIDED) != 0) & (state >= 0):
                ends = stops + slot * mask_size
                if WINDOW > 1:
                    for draft in range(ahead):
                        state = state_behind(addresses, ends, state, tl.load(drafts + draft))
                words = allowed_words(addresses, ends, state, start // 32, mask_size, BLOCK // 32)
                x = tl.where(_spread(words, BLOCK), x, NEG_INF)
        if HAS_MASKS:
            is_guided = (features & GUIDED) != 0
            if HAS_AUTOMATA:
                is_guided = is_guided & (tl.load(automaton_ptr + slot) < 0)
            if is_guided:
                # Over the bus. The host rewrites an entry between launches alone, and no cache
                # keeps a kernel's reads of its memory for the next one. Volatile reads would be
                # made thread by thread: a mask of 128,256 ids took 0.26 ms.
                at_row = tl.load(counter) % mask_entries * mask_rows + row
                if tl.load(masked + at_row) != 0:
                    mask = _bits(masks + at_row * mask_size, start, mask_size, BLOCK)
                    x = tl.where(mask, x, NEG_INF)
        if (features & MIN_TOKENS) != 0:
            is_early = position < tl.load(min_total_ptr + slot)
            if is_early:
                early = _bits(stops + slot * mask_size, start, mask_size, BLOCK)
                x = tl.where(early, NEG_INF, x)
        if (features & (BIAS | BAD_WORDS)) != 0:
            # Single ids are reached through memory: by other threads than had them.
            tl.store(out + ids, x, mask=inside)
            tl.debug_barrier()
            if (features & BAD_WORDS) != 0:
                last = _matched_words(
                    bad_words + slot * (WORDS * LENGTH), recent + slot * LENGTH, drafts, position,
                    ahead, WINDOW,
                )  # fmt: skip
                hit = (last >= start) & (last < start + BLOCK) & (last < vocab_size)
                tl.store(out + last, NEG_INF, mask=hit)
                tl.debug_barrier()
            if (features & BIAS) != 0:
                entry = slot * BIASES + tl.arange(0, BIASES)
                biased = tl.load(bias_ids + entry)
                value = tl.load(bias_values + entry)
                hit = (biased >= start) & (biased < start + BLOCK) & (biased < vocab_size)
                hit = hit & (value != 0.0)
                before = tl.load(out + biased, mask=hit, other=0.0)
                # WAR: entries may be held by several threads; all of them have read.
                tl.debug_barrier()
                tl.store(out + biased, before + value, mask=hit)
                tl.debug_barrier()
            x = tl.load(out + ids, mask=inside, other=NEG_INF)
            tl.debug_barrier()
        if (features & PENALTIES) != 0:
            words = tl.load(counts + slot * vocab_size + ids, mask=inside, other=0)
            if WINDOW > 1:
                for draft in range(ahead):
                    words += (ids == tl.load(drafts + draft)).to(tl.int32)
            x = _penalized(
                x, words, tl.load(repetition_ptr + slot), tl.load(presence_ptr + slot),
                tl.load(frequency_ptr + slot),
            )  # fmt: skip
        x = tl.where(failed, float("nan"), x)
        keys = tl.where(inside, tl.where(is_nan(x), NAN_KEY, order_key(x)), NO_KEY)
        largest = tl.max(keys, 0)
    tl.store(out + ids, x, mask=inside)
    tl.store(maxima + at, largest)
    if (features & OF_LOGITS) != 0:
        tiles = tl.num_programs(1)
        # All of the program's stores, before it arrives.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == tiles - 1:
            tl.store(arrivals + row, 0)
            of_row = tl.max(row_keys(maxima, row, tiles, TILES), 0)
            _finish_row(
                out, of_row, features, slot, min_p_ptr, inverse_temperature_ptr, vocab_size,
                ROW_BLOCK,
            )  # fmt: skip


def process_logits_gpu(
    logits: Tensor,
    tables: Tables,
    index: Tensor,
    state: SamplingState,
    buffers: RowBuffers,
    masks: Masks | None = None,
    counter: Tensor | None = None,
    *,
    raw: Tensor | None = None,
    window: int = 1,
    pdl: bool = False,
) -> Tensor:
    """``sampling.process_logits`` of ``logits`` [R, V], float32 [R, V] in the buffers.

    Args:
        index: int32 [R / window], may be strided: row r is position ``r % window`` of the window of
            slot ``index[r // window]``, behind as many of its drafts.
        masks: of the rows' guides; they are in the entry ``counter % entries``.
        counter: int64 [1] on the device.
        raw: [R, V], whose raw log-probabilities are asked, where ``logits`` are others.

    Raises:
        ValueError: the tables are of another vocabulary.
    """
    rows, vocab_size = logits.shape
    if tables.counts.shape[1] != vocab_size:
        raise ValueError(f"tables of {tables.counts.shape[1]} token ids, logits of {vocab_size}")
    processed = buffers.processed[:rows]
    tiles, count = buffers.maxima.shape[1], mask_words(vocab_size)
    ring: tuple[Tensor | int, ...] = (index, index, index, 1, 1)
    has_masks = masks is not None and counter is not None
    if masks is not None and counter is not None:
        ring = (masks.masks, masks.masked, counter, *masks.masked.shape)
    of_raw = logits if raw is None else raw
    _process_kernel[(rows, tiles)](
        logits, logits.stride(0), of_raw, of_raw.stride(0), processed, processed.stride(0),
        buffers.raw_maxima, buffers.maxima, index, index.stride(0), state.kv_length,
        tables.features, tables.min_total, tables.repetition, tables.presence, tables.frequency,
        tables.counts, tables.recent, tables.bias_ids, tables.bias_values, tables.bad_words,
        tables.allowed, tables.stops,
        *ring, *((state.drafts, state.drafts.shape[1]) if window > 1 else (None, 0)),
        buffers.arrivals, tables.min_p, state.inverse_temperature,
        tables.automaton, tables.addresses, vocab_size, count,
        HAS_AUTOMATA=tables.addresses is not None, HAS_MASKS=has_masks,
        HAS_RAW=raw is not None, WINDOW=window,
        TILES=triton.next_power_of_2(tiles), BLOCK=buffers.block, ROW_BLOCK=ROW_BLOCK, PDL=pdl,
        num_warps=NUM_WARPS, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
    return processed
