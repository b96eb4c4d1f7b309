"""Triton kernel of token sampling, bit for bit equal to ``sampling.sample_tokens_reference``.

``sample.cu`` does the same, and filters far faster, where it can be had: this one is for fp16,
very large vocabularies and GPUs before Hopper.

Keys, exact arithmetic and thresholds are those of ``row_thresholds.py``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.compile import KernelTooLargeError
from megatron_async.kernels.pdl import pdl_enter
from megatron_async.kernels.sampling import sample_cuda as cuda_sample
from megatron_async.kernels.sampling.row_thresholds import (
    NAN_KEY,
    NEG_INF,
    NO_KEY,
    SCALED_LIMIT,
    exact_log,
    filter_threshold,
    is_nan,
    order_key,
    scale,
)
from megatron_async.sampling import noise, philox
from megatron_async.sampling.sample import SampleInputs

logger = logging.getLogger(__name__)

BLOCK = 2048
NUM_WARPS = 8
TARGET_PROGRAMS = 512
"""Rows are split over programs until about this many run at once."""

# All values of a float format with fewer than 23 mantissa bits have keys that are equal, for one
# sign, in the low bits; shifting them out shortens the search.
_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

TOKEN_STREAM = tl.constexpr(philox.TOKEN_STREAM)
UNIFORM_MAX = tl.constexpr(noise.UNIFORM_MAX)
UNIFORM_UNIT = tl.constexpr(2.0**-33)
ID_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def _gumbel(seed, position, start, BLOCK: tl.constexpr):
    """Noise of the ids ``start + [0, BLOCK)``; ``start`` is a multiple of four."""
    block = start // 4 + tl.arange(0, BLOCK // 4)
    low = position.to(tl.int32)
    high = (position >> 32).to(tl.int32)
    b0, b1, b2, b3 = tl.philox(seed, block, low, high, TOKEN_STREAM)
    bits = tl.interleave(tl.interleave(b0, b2), tl.interleave(b1, b3))
    v = (bits.to(tl.int64) * 2 + 1).to(tl.float32) * UNIFORM_UNIT
    v = tl.where(v > UNIFORM_MAX, UNIFORM_MAX, v)
    w = -v + 1.0
    exponential = -(exact_log(w) + (-v - (w - 1.0)))
    return -exact_log(exponential)


# A vocabulary of one must stay a number in the kernel.
@triton.jit(do_not_specialize=["vocab_size"])
def _sample_kernel(
    logits_ptr, row_stride, inverse_temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, position_ptr,
    index_ptr, index_stride, out_ptr, vocab_size, split_size,
    KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr, INDEXED: tl.constexpr, WINDOW: tl.constexpr,
    FIRST_ID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row's slice per program: its best score and id, packed so that the maximum wins.

    The noise is that of the ids from FIRST_ID on. A row with a filter is done by the program of its
    first slice alone.
    """
    pdl_enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    at = row // WINDOW
    if INDEXED:
        at = tl.load(index_ptr + row // WINDOW * index_stride).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperature_ptr + at)
    top_k = tl.load(top_k_ptr + at)
    top_p = tl.load(top_p_ptr + at)
    sampled = inverse_temperature > 0.0
    begin = split * split_size
    end = tl.minimum(begin + split_size, vocab_size)
    best_key = tl.full([BLOCK], NO_KEY, tl.int32)
    best_id = tl.zeros([BLOCK], tl.int32)
    if sampled:
        factor = tl.where(inverse_temperature > SCALED_LIMIT, SCALED_LIMIT, inverse_temperature)
        seed = tl.load(seed_ptr + at)
        position = tl.load(position_ptr + at) + row % WINDOW
        threshold = tl.full([], NO_KEY, tl.int64)
        if ((top_k > 0) & (top_k < vocab_size)) | ((top_p > 0.0) & (top_p < 1.0)):
            begin = 0
            end = tl.where(split == 0, vocab_size, 0)
            if split == 0:
                threshold = filter_threshold(
                    row_ptr, vocab_size, factor, top_k, top_p, KEY_SHIFT, BLOCK
                )
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < end, other=NEG_INF).to(tl.float32)
            keys = tl.where(ids < end, order_key(x), NO_KEY)
            score = scale(x, factor) + _gumbel(seed, position, FIRST_ID + start, BLOCK)
            kept = ((keys >> KEY_SHIFT).to(tl.int64) >= threshold) & (x > NEG_INF)
            score_key = tl.where(is_nan(x), NAN_KEY, order_key(tl.where(kept, score, NEG_INF)))
            better = (score_key > best_key) & (ids < end)
            best_key = tl.where(better, score_key, best_key)
            best_id = tl.where(better, ids, best_id)
    else:
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < end, other=NEG_INF).to(tl.float32)
            keys = tl.where(ids < end, tl.where(is_nan(x), NAN_KEY, order_key(x)), NO_KEY)
            better = keys > best_key
            best_key = tl.where(better, keys, best_key)
            best_id = tl.where(better, ids, best_id)
    key = tl.max(best_key, 0)
    token = tl.min(tl.where(best_key == key, best_id, ID_MASK), 0)
    packed = (key.to(tl.int64) << 32) | (token ^ ID_MASK).to(tl.int64)
    tl.store(out_ptr + row * tl.num_programs(1) + split, packed)


@triton.jit
def best_token(packed_ptr, row, exists, splits, SPLITS: tl.constexpr):
    """The id of the best of the slices of each row [R] int64, -1 if it holds NaN; ``exists`` masks
    rows."""
    split = tl.arange(0, SPLITS)
    mask = exists[:, None] & (split < splits)[None, :]
    least: tl.constexpr = -(2**63)
    at = row[:, None] * splits + split[None, :]
    packed = tl.load(packed_ptr + at, mask=mask, other=least)
    best = tl.max(packed, 1)
    return tl.where((best >> 32) == NAN_KEY, -1, (best & ID_MASK) ^ ID_MASK)


@triton.jit
def _combine_kernel(packed_ptr, token_ptr, splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    tl.store(token_ptr + row, best_token(packed_ptr, row, row >= 0, splits, SPLITS))


def sample_splits(
    logits: Tensor,
    inputs: SampleInputs,
    index: Tensor | None = None,
    *,
    window: int = 1,
    pdl: bool = False,
) -> Tensor:
    """The best of each slice of each row, [R, splits] int64 for :func:`best_token`.

    Row r's parameters are those at ``index[r // window]`` ([R / window] integers, may be strided),
    at r // window without it; its position is ``r % window`` further.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    parameters = [t.contiguous() for t in inputs]
    reason = cuda_sample.why_not(logits, index)
    if reason is None:
        try:
            return cuda_sample.best_of_rows(logits, parameters, index, window=window)
        except KernelTooLargeError as error:
            reason = str(error)
    if logits.is_cuda:
        _warn_of_slow_filters(reason)
    return _triton_splits(logits, parameters, index, window=window, pdl=pdl)


def sample_shard(
    logits: Tensor,
    inputs: SampleInputs,
    index: Tensor | None = None,
    *,
    first_id: int,
    window: int = 1,
    pdl: bool = False,
) -> Tensor:
    """:func:`sample_splits` of columns of rows that are on several ranks: those of the ids from
    ``first_id`` on, a multiple of four. Ids in the result count from 0, and no row has a filter.
    """
    return _triton_splits(
        logits, [t.contiguous() for t in inputs], index,
        window=window, first_id=first_id, pdl=pdl,
    )  # fmt: skip


@functools.cache
def _warn_of_slow_filters(reason: str) -> None:
    logger.warning("top-k and top-p run in the Triton kernel, which is slower: %s", reason)


def _triton_splits(
    logits: Tensor,
    parameters: Sequence[Tensor],
    index: Tensor | None = None,
    *,
    window: int = 1,
    first_id: int = 0,
    pdl: bool = False,
) -> Tensor:
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, BLOCK)
    tiles_per_split = triton.cdiv(tiles, max(1, min(tiles, TARGET_PROGRAMS // rows)))
    splits = triton.cdiv(tiles, tiles_per_split)
    packed = torch.empty((rows, splits), dtype=torch.int64, device=logits.device)
    _sample_kernel[(rows, splits)](
        logits, logits.stride(0), *parameters, parameters[-1] if index is None else index,
        0 if index is None else index.stride(0), packed, vocab_size, tiles_per_split * BLOCK,
        KEY_SHIFT=_KEY_SHIFT[logits.dtype], BLOCK=BLOCK, INDEXED=index is not None,
        WINDOW=window, FIRST_ID=first_id, PDL=pdl, num_warps=NUM_WARPS, enable_fp_fusion=False,
        launch_pdl=pdl,
    )  # fmt: skip
    return packed


def sample_tokens_gpu(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """``sampling.sample_tokens`` on the device of ``logits``, in the CUDA C++ kernel where that
    takes them; arguments are not checked."""
    return _best_tokens(sample_splits(logits, inputs)) if len(logits) else _none(logits)


def sample_tokens_triton(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """The same, always in the Triton kernel."""
    return _best_tokens(_triton_splits(logits, inputs)) if len(logits) else _none(logits)


def _none(logits: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=logits.device)


def _best_tokens(packed: Tensor) -> Tensor:
    rows, splits = packed.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=packed.device)
    _combine_kernel[(rows,)](
        packed, tokens, splits, SPLITS=triton.next_power_of_2(splits), num_warps=1
    )
    return tokens
