"""Philox4x32-10 in torch integers: the noise bits of a token as a pure function of its indices.

The generator is from Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
Words are unsigned 32-bit values held in int64 tensors; products wrap modulo 2**64.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

TOKEN_STREAM = 0x746F6B65
"""Fourth counter word of the noise that samples tokens; other uses of a seed take another."""


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """The ten-round Philox4x32 block function.

    Args:
        counter: int64 ``[4, ...]``, each word in ``[0, 2**32)``.
        key: int64 ``[2, ...]``, each word in ``[0, 2**32)``, broadcastable to ``counter[:2]``.

    Returns:
        int64 ``[4, ...]``, each word in ``[0, 2**32)``.
    """
    ones = (1,) * (counter.dim() - 1)
    multiplier = _words(MULTIPLIERS, counter.device).view(2, *ones)
    weyl = _words(WEYL_INCREMENTS, counter.device).view(1, 2, *ones)
    rounds = torch.arange(ROUNDS, device=counter.device).view(-1, 1, *ones)
    round_keys = (rounds * weyl + key).bitwise_and_(MASK)
    even, odd = counter[0::2], counter[1::2]
    for round_key in round_keys.unbind():
        # Words 0 and 2 swap their products every round. Bits above 32 of `odd` are garbage
        # that the mask on `even` removes before they can reach a product.
        product = (even * multiplier).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(MASK)
        odd = product
    odd = odd & MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def noise_bits(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """32 noise bits for every token id of every row.

    Args:
        seed, position: int64 ``[R]``, any value (two's complement for negative ones).
        vocab_size: number of ids.

    Returns:
        int64 ``[R, vocab_size]`` in ``[0, 2**32)``; element ``[r, i]`` equals
        ``noise_bits_at(seed[r], position[r], i)``.
    """
    rows, blocks = seed.shape[0], (vocab_size + 3) // 4
    block = torch.arange(blocks, device=seed.device)
    lanes = _token_blocks(seed[:, None], position[:, None], block.expand(rows, blocks))
    return lanes.permute(1, 2, 0).reshape(rows, 4 * blocks)[:, :vocab_size]


def noise_bits_at(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """32 noise bits for single ``(seed, position, token_id)`` triples, all int64 ``[N]``."""
    lanes = _token_blocks(seed, position, token_id >> 2)
    return lanes.gather(0, (token_id & 3)[None])[0]


def _token_blocks(seed: Tensor, position: Tensor, block: Tensor) -> Tensor:
    """The four lanes ``[4, *block.shape]`` of the ids ``4 * block + lane``."""
    key = torch.stack((seed & MASK, (seed >> 32) & MASK))
    counter = torch.empty((4, *block.shape), dtype=torch.int64, device=block.device)
    counter[0] = block
    counter[1] = position & MASK
    counter[2] = (position >> 32) & MASK
    counter[3].fill_(TOKEN_STREAM)
    return philox4x32(counter, key)


def _words(values: tuple[int, int], device: torch.device) -> Tensor:
    """A constant int64 ``[2]`` written by kernels, so that a CUDA graph can capture it."""
    out = torch.empty(2, dtype=torch.int64, device=device)
    out[0].fill_(values[0])
    out[1].fill_(values[1])
    return out
