"""Triton kernel of token sampling, bit for bit equal to ``sampling.sample_tokens_reference``.

``cuda/sample.cu`` does the same, and filters far faster, where it can be had: this one is for fp16,
very large vocabularies and GPUs before Hopper.

Logits are compared through the order-preserving int32 key of their bit pattern. Thresholds are
found by a four-way search over keys with integer counts (top-k) and integer masses (top-p), so
no result depends on an order of reduction. Float operations follow ``sampling.exact_math`` one
by one; the kernels must be launched with ``enable_fp_fusion=False``, which forbids FMAs.
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
from megatron_async.sampling import exact_math, filters, noise, philox
from megatron_async.sampling.sample import SampleInputs

logger = logging.getLogger(__name__)

BLOCK = 2048
NUM_WARPS = 8
TARGET_PROGRAMS = 512
"""Rows are split over programs until about this many run at once."""

# All values of a float format with fewer than 23 mantissa bits have keys that are equal, for one
# sign, in the low bits; shifting them out shortens the search.
_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

LOG_0 = tl.constexpr(exact_math.LOG_COEFFICIENTS[0])
LOG_1 = tl.constexpr(exact_math.LOG_COEFFICIENTS[1])
LOG_2 = tl.constexpr(exact_math.LOG_COEFFICIENTS[2])
LOG_3 = tl.constexpr(exact_math.LOG_COEFFICIENTS[3])
LOG_4 = tl.constexpr(exact_math.LOG_COEFFICIENTS[4])
LOG_5 = tl.constexpr(exact_math.LOG_COEFFICIENTS[5])
LOG_6 = tl.constexpr(exact_math.LOG_COEFFICIENTS[6])
EXP2_0 = tl.constexpr(exact_math.EXP2_COEFFICIENTS[0])
EXP2_1 = tl.constexpr(exact_math.EXP2_COEFFICIENTS[1])
EXP2_2 = tl.constexpr(exact_math.EXP2_COEFFICIENTS[2])
EXP2_3 = tl.constexpr(exact_math.EXP2_COEFFICIENTS[3])
EXP2_4 = tl.constexpr(exact_math.EXP2_COEFFICIENTS[4])
EXP2_5 = tl.constexpr(exact_math.EXP2_COEFFICIENTS[5])
EXP2_MIN = tl.constexpr(exact_math.EXP2_MIN)
SQRT_HALF_BITS = tl.constexpr(exact_math.SQRT_HALF_BITS)
LN2_HIGH = tl.constexpr(exact_math.LN2_HIGH)
LN2_LOW = tl.constexpr(exact_math.LN2_LOW)
LOG2_E = tl.constexpr(exact_math.LOG2_E)
MASS_SHIFT = tl.constexpr(exact_math.MASS_BITS - 24)
SCALED_LIMIT = tl.constexpr(filters.SCALED_LIMIT)
TOP_P_BITS = tl.constexpr(filters.TOP_P_BITS)
TOP_P_ONE = tl.constexpr(1 << filters.TOP_P_BITS)
TOKEN_STREAM = tl.constexpr(philox.TOKEN_STREAM)
UNIFORM_MAX = tl.constexpr(noise.UNIFORM_MAX)
UNIFORM_UNIT = tl.constexpr(2.0**-33)
NO_KEY = tl.constexpr(-(2**31))  # Below the key of every float that is not NaN.
NAN_KEY = tl.constexpr(2**31 - 1)  # Above them: a row with a NaN gives token -1.
ID_MASK = tl.constexpr(2**31 - 1)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def order_key(x):
    """Order-preserving int32 of a float32 that is not NaN; both zeros give 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def is_nan(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def _load(row_ptr, ids, vocab_size):
    """Logits as float32; NaN and ids outside the vocabulary are ``-inf``."""
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=NEG_INF).to(tl.float32)
    return tl.where(is_nan(x), NEG_INF, x)


@triton.jit
def _load_keys(row_ptr, ids, vocab_size):
    """Logits and their keys; ids outside the vocabulary get ``NO_KEY``."""
    x = _load(row_ptr, ids, vocab_size)
    return x, tl.where(ids < vocab_size, order_key(x), NO_KEY)


@triton.jit
def scale(x, factor):
    scaled = x * factor
    scaled = tl.where(scaled > SCALED_LIMIT, SCALED_LIMIT, scaled)
    return tl.where(scaled < -SCALED_LIMIT, -SCALED_LIMIT, scaled)


@triton.jit
def exact_log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    square = f * f
    q = LOG_0 * f + LOG_1
    q = q * f + LOG_2
    q = q * f + LOG_3
    q = q * f + LOG_4
    q = q * f + LOG_5
    q = q * f + LOG_6
    q = q * f * square + e * LN2_LOW
    q = q - square * 0.5
    q = q + f
    return q + e * LN2_HIGH


@triton.jit
def exp2_mass(x):
    x = tl.where(x < EXP2_MIN, EXP2_MIN, x)
    whole = x.to(tl.int32)
    r = x - whole.to(tl.float32)
    p = EXP2_0 * r + EXP2_1
    p = p * r + EXP2_2
    p = p * r + EXP2_3
    p = p * r + EXP2_4
    p = p * r + EXP2_5
    p = p * r + 1.0
    mantissa = (p * 16777216.0).to(tl.int32).to(tl.int64)
    return (mantissa << MASS_SHIFT) >> (-whole).to(tl.int64)


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


@triton.jit
def _counts_and_masses(
    row_ptr, vocab_size, factor, scaled_max, t1, t2, t3,
    BY_MASS: tl.constexpr, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many keys reach each of three thresholds, and their masses (else the counts again)."""
    n1 = tl.zeros([BLOCK], tl.int32)
    n2 = tl.zeros([BLOCK], tl.int32)
    n3 = tl.zeros([BLOCK], tl.int32)
    m1 = tl.zeros([BLOCK], tl.int64)
    m2 = tl.zeros([BLOCK], tl.int64)
    m3 = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        x, keys = _load_keys(row_ptr, start + tl.arange(0, BLOCK), vocab_size)
        keys = (keys >> KEY_SHIFT).to(tl.int64)
        n1 += (keys >= t1).to(tl.int32)
        n2 += (keys >= t2).to(tl.int32)
        n3 += (keys >= t3).to(tl.int32)
        if BY_MASS:
            mass = exp2_mass((scale(x, factor) - scaled_max) * LOG2_E)
            m1 += tl.where(keys >= t1, mass, 0)
            m2 += tl.where(keys >= t2, mass, 0)
            m3 += tl.where(keys >= t3, mass, 0)
    c1 = tl.sum(n1, 0).to(tl.int64)
    c2 = tl.sum(n2, 0).to(tl.int64)
    c3 = tl.sum(n3, 0).to(tl.int64)
    if BY_MASS:
        return c1, c2, c3, tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0)
    else:
        return c1, c2, c3, c1, c2, c3


@triton.jit
def _search(
    row_ptr, vocab_size, factor, scaled_max, need, low, high, n_low, n_high,
    BY_MASS: tl.constexpr, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A threshold that keeps what the largest key with a weight at or above it of ``need`` does.

    Invariant: weight(>= low) >= need > weight(>= high), and n_low, n_high keys reach them. The
    search may stop as soon as one key is left in [low, high): all thresholds there that satisfy
    the invariant keep the same ids.
    """
    while (high - low > 1) & (n_low - n_high > 1):
        step = (high - low + 3) // 4
        t1, t2, t3 = low + step, low + 2 * step, low + 3 * step
        c1, c2, c3, w1, w2, w3 = _counts_and_masses(
            row_ptr, vocab_size, factor, scaled_max, t1, t2, t3, BY_MASS, KEY_SHIFT, BLOCK
        )
        if w3 >= need:
            low, n_low = t3, c3
        elif w2 >= need:
            low, n_low = t2, c2
            high, n_high = tl.minimum(high, t3), tl.maximum(n_high, c3)
        elif w1 >= need:
            low, n_low = t1, c1
            high, n_high = tl.minimum(high, t2), tl.maximum(n_high, c2)
        else:
            high, n_high = tl.minimum(high, t1), tl.maximum(n_high, c1)
    return low, n_low


@triton.jit
def filter_threshold(
    row_ptr, vocab_size, factor, top_k, top_p, KEY_SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest shifted key that top-k and then top-p keep, int64."""
    largest = tl.full([BLOCK], NEG_INF, tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _load(row_ptr, ids, vocab_size)
        largest = tl.maximum(largest, x)
        smallest = tl.where(ids < vocab_size, tl.minimum(smallest, x), smallest)
    row_max = tl.max(largest, 0)
    scaled_max = scale(row_max, factor)
    low = (order_key(tl.min(smallest, 0)) >> KEY_SHIFT).to(tl.int64)
    high = (order_key(row_max) >> KEY_SHIFT).to(tl.int64) + 1
    n_low = vocab_size.to(tl.int64)
    n_high = n_low * 0
    if (top_k > 0) & (top_k < vocab_size):
        low, n_low = _search(
            row_ptr, vocab_size, factor, scaled_max, top_k.to(tl.int64), low, high, n_low, n_high,
            False, KEY_SHIFT, BLOCK,
        )  # fmt: skip
    if (top_p > 0.0) & (top_p < 1.0):
        _, _, _, total, _, _ = _counts_and_masses(
            row_ptr, vocab_size, factor, scaled_max, low, low, low, True, KEY_SHIFT, BLOCK
        )
        units = (top_p * TOP_P_ONE).to(tl.int64)
        units = tl.maximum(units, 1)
        rest = (total & (TOP_P_ONE - 1)) * units + (TOP_P_ONE - 1)
        need = (total >> TOP_P_BITS) * units + (rest >> TOP_P_BITS)
        low, _ = _search(
            row_ptr, vocab_size, factor, scaled_max, need, low, high, n_low, n_high,
            True, KEY_SHIFT, BLOCK,
        )  # fmt: skip
    return low


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
