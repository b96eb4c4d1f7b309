"""Attention of prefill chunks on Hopper: how ``prefill_attention.cu`` is built and called."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.attention.tiles import heads_at_once
from megatron_async.kernels.compile import Bf16, Int32, Int64, TensorMap, kernel
from megatron_async.kernels.compile_ahead import rehearsing

logger = logging.getLogger(__name__)

ROWS = 128
"""Queries of a tile."""
MOST_HEADS = 16
"""Query heads of a tile."""
MOST_HEAD_DIM = 256
LOG2_E = 1.4426950408889634
ALIGNED = 8
"""Elements that a thread copies at once: 16 bytes."""
MOST_STRIDE = 1 << 40
"""Bytes of a tensor that TMA reads are less apart."""
MOST_MAPS = 4096
"""Caches of which it is remembered how TMA finds their tiles, at most."""

Halves = Annotated[Tensor, torch.bfloat16, torch.float16]

_maps: dict[tuple[Any, ...], TensorMap] = {}


class PrefillArguments(NamedTuple):
    """Parameters of ``prefill_attention.cu``, in order."""

    query: Halves
    block_table: Int64
    chunks: Int32
    out: Halves
    chunk_count: int
    parts: int
    query_row: int
    query_head: int
    out_row: int
    out_head: int
    table_row: int
    scale: float
    cap: float
    window: int
    key_map: TensorMap
    value_map: TensorMap


class SinkArguments(NamedTuple):
    """With ``SINKS``, behind the others."""

    sinks: Bf16


class Form(NamedTuple):
    """What the kernel is compiled for.

    Args:
        group: query heads that share a KV head.
        cache: the dtype of keys and values.
    """

    head_dim: int
    group: int
    block_size: int
    cache: torch.dtype = torch.bfloat16
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False

    def defines(self) -> dict[str, int]:
        """Its macros."""
        padded = -(-self.head_dim // 64) * 64
        heads = heads_at_once(self.group, MOST_HEADS)
        return {
            "D": self.head_dim,
            "PADDED": padded,
            "HEADS": heads,
            "SHARES": self.group // heads,
            "BLOCK": self.block_size,
            "KEYS": 128 if padded <= 128 else 64,
            "ST": 2,
            "QUERY_TILES": 1 if padded > 192 else 2,
            "SLIDING_WINDOW": int(self.window),
            "SOFT_CAP": int(self.soft_cap),
            "SINKS": int(self.sinks),
            "E4M3": int(self.cache == E4M3),
            "HALF": int(self.cache != torch.bfloat16),
        }


def why_not(
    query: Tensor, key_cache: Tensor, *, latent: int | None = None, sinks: Tensor | None = None
) -> str | None:
    """Why the kernel does not take ``query`` [T, Hq, D] over a cache [blocks, bs, Hkv, D]; None if
    it does: on GPUs with wgmma, in bfloat16, also over e4m3, and in float16 without sinks; nothing
    latent."""
    if not query.is_cuda:
        return "it runs on a GPU"
    if latent is not None:
        return "the cache is latent"
    dtypes = query.dtype, key_cache.dtype
    if dtypes not in (
        (torch.bfloat16, torch.bfloat16), (torch.bfloat16, E4M3), (torch.float16, torch.float16),
    ):  # fmt: skip
        return f"queries are {query.dtype}, and the cache {key_cache.dtype}"
    if sinks is not None and {sinks.dtype, query.dtype} != {torch.bfloat16}:
        return f"sinks are {sinks.dtype}, and queries {query.dtype}"
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    step = ALIGNED if key_cache.dtype != E4M3 else 2 * ALIGNED
    if head_dim % step or head_dim > MOST_HEAD_DIM:
        return f"the head dimension {head_dim} is no multiple of {step} up to {MOST_HEAD_DIM}"
    if block_size % 16 or query.shape[1] % kv_heads:
        return f"blocks of {block_size} tokens, {query.shape[1]} heads and {kv_heads} KV heads"
    if not has_map(key_cache):
        return "TMA does not take the strides of the cache"
    index = query.device.index or 0
    return cuda.unavailable(index) or (None if cuda.has_wgmma(index) else "the GPU has no wgmma")


@functools.cache
def log_once(reason: str) -> None:
    """Say that another kernel attends."""
    logger.info("prompts take Triton's attention: %s", reason)


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    chunks: Tensor,
    scale: float,
    out: Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """``paged_prefill.paged_mixed_attention`` for what :func:`why_not` has nothing against.

    Nothing waits for the device, and the launch depends on shapes alone.

    Raises:
        ValueError: the last dimension of a table or of ``out`` is strided, the kernel does
            not find all of it (:func:`is_addressed`), or TMA does not read a cache
            (:func:`has_map`).
    """
    if any(x.stride(-1) != 1 for x in (block_table, out)):
        raise ValueError("the last dimensions of block table and out must be contiguous")
    if not (has_map(key_cache) and has_map(value_cache)):
        raise ValueError(
            "tokens and heads of a cache must be contiguous and begin at multiples of 16 bytes"
        )
    if not chunks.is_contiguous():
        raise ValueError("the chunk table must be contiguous")
    if not is_addressed(out):
        raise ValueError(
            "heads of out must begin at multiples of 16 bytes, less than 2^31 elements apart"
        )
    tokens, query_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    count = chunks.shape[0]
    if not tokens or not count:
        return
    if query.stride(2) != 1 or not is_addressed(query):
        query = query.clone(memory_format=torch.contiguous_format)
    if scale <= 0:
        # The largest score must be that of the largest product.
        query, scale = query * (-1.0 if scale else 0.0), -scale or 1.0
    if window is not None:
        # No token has more in front of it, and differences of positions stay below 2^31.
        window = min(window, block_table.shape[1] * block_size)
    macros = Form(
        head_dim, query_heads // kv_heads, block_size, key_cache.dtype,
        window is not None, soft_cap is not None, sinks is not None,
    ).defines()  # fmt: skip
    if rehearsing.ahead is not None:
        rehearsing.ahead.compile([("prefill_attention", macros)])
        return
    parts = query_heads // macros["HEADS"]
    arguments = PrefillArguments(
        query, block_table, chunks, out, count, parts,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        scale * LOG2_E, (soft_cap or 0.0) * LOG2_E, window or 0,
        _map_of(key_cache), _map_of(value_cache),
    )  # fmt: skip
    records = (arguments,) if sinks is None else (arguments, SinkArguments(sinks.contiguous()))
    most_tiles = tokens // (ROWS // macros["HEADS"]) + min(count, tokens)
    ctas = min(parts * most_tiles, cuda.sm_count(query.device.index or 0))
    kernel("prefill_attention", macros, query.device).launch((ctas, 1, 1), *records)


def is_addressed(heads: Tensor) -> bool:
    """Whether the kernel finds all of ``heads`` [T, H, D]: each begins at 16 bytes, and strides,
    and what lies between two heads of a token, are less than 2^31 elements."""
    tokens, count = heads.shape[:2]
    row, head = heads.stride(0) * (tokens > 1), heads.stride(1) * (count > 1)
    most = max(row, (count - 1) * head)
    return heads.data_ptr() % 16 == 0 and row % ALIGNED == head % ALIGNED == 0 and most < 1 << 31


def has_map(cache: Tensor) -> bool:
    """Whether TMA can read tokens of one block and head of a cache [blocks, bs, Hkv, D]: heads are
    contiguous, and all addresses and strides multiples of 16 bytes."""
    return cache.stride(3) == 1 and cache.data_ptr() % 16 == 0 and all(map(_fits, _strides(cache)))


def _fits(stride: int) -> bool:
    return 0 < stride < MOST_STRIDE and stride % 16 == 0


def _strides(cache: Tensor) -> list[int]:
    """Bytes between tokens, heads and blocks; where there is only one, some that TMA takes."""
    found = []
    for n in (1, 2, 0):
        stride = cache.stride(n) * cache.element_size()
        found.append(stride if cache.shape[n] > 1 or _fits(stride) else 16)
    return found


def _map_of(cache: Tensor) -> TensorMap:
    """How TMA finds tokens of one block and head of a cache [blocks, bs, Hkv, D]."""
    key = cache.data_ptr(), cache.dtype, cache.shape, cache.stride()
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= MOST_MAPS:
            _maps.clear()
        blocks, block_size, kv_heads, head_dim = cache.shape
        element = cache.element_size()
        tokens = next(n for n in (64, 32, 16) if block_size % n == 0)
        found = _maps[key] = cuda.tensor_map(
            cache,
            (head_dim, block_size, kv_heads, blocks),
            _strides(cache),
            (128 // element, tokens, 1, 1),
        )
    return found
