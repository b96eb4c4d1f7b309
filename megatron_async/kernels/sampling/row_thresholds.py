"""Triton functions over a row of logits: the keys that order it, exact logarithms and masses, and
the thresholds of top-k and top-p.

Logits are compared through the order-preserving int32 key of their bit pattern. Thresholds are
found by a four-way search over keys with integer counts (top-k) and integer masses (top-p), so
no result depends on an order of reduction. Float operations follow ``sampling.exact_math`` one
by one; kernels that call these must be launched with ``enable_fp_fusion=False``, which forbids
FMAs.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.sampling import exact_math, filters

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
MASS_UNIT = tl.constexpr(2.0**-exact_math.MASS_BITS)
MASS_SHIFT = tl.constexpr(exact_math.MASS_BITS - 24)
SCALED_LIMIT = tl.constexpr(filters.SCALED_LIMIT)
TOP_P_BITS = tl.constexpr(filters.TOP_P_BITS)
TOP_P_ONE = tl.constexpr(1 << filters.TOP_P_BITS)
NO_KEY = tl.constexpr(-(2**31))  # Below the key of every float that is not NaN.
NAN_KEY = tl.constexpr(2**31 - 1)  # Above them: a row with a NaN gives token -1.
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
def log_prob_of(x, factor, scaled_max, log_total):
    """The log-probability of a logit, by its row's scaled maximum and the logarithm of its mass."""
    value = scale(x, factor) + 0.0
    difference = value - scaled_max
    subtracted = difference - value
    error = (value - (difference - subtracted)) - (scaled_max + subtracted)
    return difference - (log_total - error)


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
