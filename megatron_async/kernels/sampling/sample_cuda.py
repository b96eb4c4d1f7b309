"""How ``sample.cu`` is built and called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import kernel
from megatron_async.kernels.compile_ahead import rehearsing
from megatron_async.kernels.shared_memory import HOPPER_BYTES, gpu_limit

THREADS = 512
BLOCKS = 8
"""CTAs of a cluster: the most that every GPU of this capability runs."""
DTYPES = (torch.bfloat16, torch.float32)
EXCHANGE_BYTES = 4096
"""What a block takes of shared memory, at most, besides its part of a row."""


class Taken(NamedTuple):
    """Where the token of each row goes; 0 where none could be sampled.

    Args:
        tokens: int64 ``[R]``, may be strided.
        by_slot: int64 ``[slots]``, may be strided: it goes there too, to the row's slot.
        slots: int64 ``[R]``, contiguous.
        arrivals: int32 ``[R]`` at least, zeros between launches on one stream.
    """

    tokens: Tensor
    by_slot: Tensor
    slots: Tensor
    arrivals: Tensor


def pieces(vocabulary: int, blocks: int = BLOCKS, threads: int = THREADS) -> int:
    """Pieces of eight logits that a thread has."""
    return -(-vocabulary // (blocks * threads * 8))


def shared_bytes(vocabulary: int, element_size: int) -> int:
    """What a block takes of shared memory, at most."""
    return pieces(vocabulary) * THREADS * 8 * element_size + EXCHANGE_BYTES


def fits(vocabulary: int, element_size: int, limit: int = HOPPER_BYTES) -> bool:
    """Whether a cluster holds a row, of blocks that have ``limit`` bytes of shared memory."""
    return shared_bytes(vocabulary, element_size) <= limit


def why_not(logits: Tensor, index: Tensor | None) -> str | None:
    """Why :func:`best_of_rows` may not be called; None if it may."""
    if not logits.is_cuda:
        return "the logits are not on a GPU"
    if logits.dtype not in DTYPES:
        return f"logits of {logits.dtype} are not covered"
    if index is not None and index.dtype != torch.int32:
        return f"an index of {index.dtype} is not covered"
    if not fits(logits.shape[1], logits.element_size(), gpu_limit(logits.device.index or 0)):
        return f"a row of {logits.shape[1]} logits does not fit into a cluster's shared memory"
    return cuda.unavailable(logits.device.index or 0)


def best_of_rows(
    logits: Tensor,
    parameters: Sequence[Tensor],
    index: Tensor | None = None,
    *,
    window: int = 1,
    clusters: int | None = None,
    blocks: int = BLOCKS,
    threads: int = THREADS,
    taken: Taken | None = None,
) -> Tensor:
    """The best ids of each row, int64 ``[R, blocks of a row]``, packed for
    ``kernels.sample.best_token``.

    Args:
        logits: ``[R, V]`` of one of ``DTYPES``; rows may be strided.
        parameters: inverse temperature, top-k, top-p, seed and position, as for
            ``sampling.sample_tokens``, contiguous.
        index: int32 ``[R / window]``, may be strided: row r's parameters are those at
            ``index[r // window]``, at ``r // window`` without it.
        window: rows of an entry of ``index``; row r's position is ``r % window`` further.
        clusters: that share a row without a filter; None fills the GPU.
        blocks, threads: of a cluster.
        taken: where tokens go, if this launch is to find them too.
    """
    rows, vocabulary = logits.shape
    own = pieces(vocabulary, blocks, threads)
    if clusters is None:
        # As many as run at once. More of them with less work each are faster for rows without a
        # filter, up to four a row (an H200, 128,256 and 151,936 ids).
        at_once = 2 * cuda.sm_count(logits.device.index or 0) // BLOCKS
        clusters = min(own, 4 if rows * 4 <= at_once else 2 if rows <= at_once else 1)
    best = torch.empty((rows, clusters * blocks), dtype=torch.int64, device=logits.device)
    defines = {
        "WIDE": int(logits.dtype == torch.float32), "VECTORS": own, "G": clusters, "C": blocks,
        "THREADS": threads, "WINDOW": window, "TAKE": int(taken is not None),
    }  # fmt: skip
    into: tuple[Tensor | int, ...] = ()
    if taken is not None:
        tokens, by_slot, slots, arrivals = taken
        into = arrivals, tokens, tokens.stride(0), slots, by_slot, by_slot.stride(0)
    if rehearsing.ahead is not None:
        rehearsing.ahead.compile([("sample", defines)])
        return best
    kernel("sample", defines, logits.device).launch(
        (best.numel(), 1, 1), logits, logits.stride(0), vocabulary, *parameters, index,
        0 if index is None else index.stride(0), best, *into,
    )  # fmt: skip
    return best
