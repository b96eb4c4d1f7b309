"""The bits of ``noise`` for few ids on the CPU: NumPy's operators begin in a fifth of the time that
PyTorch's take. Each function has the operations of its namesake there, in their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_async.sampling import exact_math, philox
from megatron_async.sampling.noise import UNIFORM_MAX

MOST_IDS = 2048
"""More ids take longer than operations take to begin, and PyTorch's have several threads."""

_Words = npt.NDArray[np.uint64]
_Floats = npt.NDArray[np.float32]
_MASK, _HALF = np.uint64(philox.MASK), np.uint64(32)
_MULTIPLIERS = np.array(philox.MULTIPLIERS, np.uint64)[:, None, None]
_WEYL = np.array(philox.WEYL_INCREMENTS, np.uint64)[:, None, None]
_STEPS = np.arange(philox.ROUNDS, dtype=np.uint64)[:, None, None, None] * _WEYL


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """``noise.gumbel`` of CPU tensors: int64 ``[R]``, ``[R]`` to float32 ``[R, vocab_size]``."""
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    lanes = _token_blocks(_words(seed)[:, None], _words(position)[:, None], blocks[None])
    bits = lanes.transpose(1, 2, 0).reshape(len(seed), -1)[:, :vocab_size]
    return torch.from_numpy(gumbel_from_bits(bits))


def gumbel_at(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """``noise.gumbel_at`` of CPU tensors: int64 ``[N]`` to float32 ``[N]``."""
    ids = _words(token_id)
    lanes = _token_blocks(_words(seed)[None], _words(position)[None], (ids >> np.uint64(2))[None])
    bits = lanes[ids & np.uint64(3), 0, np.arange(len(ids))]
    return torch.from_numpy(gumbel_from_bits(bits))


def _words(values: Tensor) -> _Words:
    return values.numpy().view(np.uint64)


def _token_blocks(seed: _Words, position: _Words, block: _Words) -> _Words:
    """The four lanes ``[4, R, N]`` of the ids ``4 * block + lane``; what is given broadcasts."""
    shape: Sequence[int] = np.broadcast_shapes(seed.shape, block.shape)
    key = np.stack((seed & _MASK, seed >> _HALF))
    counter = np.empty((4, *shape), np.uint64)
    counter[0] = block
    counter[1] = position & _MASK
    counter[2] = position >> _HALF
    counter[3] = philox.TOKEN_STREAM
    even, odd = counter[0::2], counter[1::2]
    for round_key in (_STEPS + key) & _MASK:
        product = (even * _MULTIPLIERS)[::-1]
        even, odd = (product >> _HALF) ^ odd ^ round_key, product & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]))


def gumbel_from_bits(bits: _Words) -> _Floats:
    """``noise.gumbel_from_bits`` of uint64 of any shape, to float32."""
    v = (bits * np.uint64(2) + np.uint64(1)).view(np.int64).astype(np.float32)
    v *= 2.0**-33
    np.minimum(v, UNIFORM_MAX, out=v)
    return -_log(-_log1p(-v))


def _log(x: _Floats) -> _Floats:
    bits = x.view(np.int32)
    exponent = (bits - exact_math.SQRT_HALF_BITS) >> 23
    f: _Floats = (bits - (exponent << 23)).view(np.float32) - 1.0
    e = exponent.astype(np.float32)
    square = f * f
    q: _Floats = np.full_like(f, exact_math.LOG_COEFFICIENTS[0])
    for coefficient in exact_math.LOG_COEFFICIENTS[1:]:
        q *= f
        q += coefficient
    q *= f
    q *= square
    q += e * exact_math.LN2_LOW
    q -= square * 0.5
    q += f
    q += e * exact_math.LN2_HIGH
    return q


def _log1p(x: _Floats) -> _Floats:
    w = x + 1.0
    error = x - (w - 1.0)
    return _log(w) + error
