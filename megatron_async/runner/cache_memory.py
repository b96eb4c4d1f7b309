"""How many blocks a KV cache has, and where its memory comes from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron_async.config import MAX_COUNT, check_buffer_size, check_integer
from megatron_async.device.memory import GIB, must_fit
from megatron_async.device.releasable import Region
from megatron_async.errors import ConfigError


class CacheSize(NamedTuple):
    """The size of a KV cache.

    Args:
        block_count: usable blocks, the null block not counted.
        paused_block_count: of them those that waiting requests may keep; None is all.
        asked: the argument that says so, as ``name=value``.
    """

    block_count: int
    paused_block_count: int | None
    asked: str


def cache_size(
    block_bytes: int,
    block_size_tokens: int,
    block_count: int | None,
    buffer_size_gb: float | None,
    paused_buffer_size_gb: float | None,
    enough: int,
) -> CacheSize:
    """The size that a context's arguments ask for.

    Args:
        block_bytes: of a block, in caches beside this one too; without any no layer attends, and
            blocks count tokens alone.
        enough: blocks for all requests, which such a cache has.

    Raises:
        ConfigError: a value is out of range, or the buffer holds no block.
    """
    asked = f"block_count={block_count}"
    if block_bytes == 0 and block_count is None:
        block_count = enough
    if block_count is None:
        asked = f"buffer_size_gb={buffer_size_gb}"
        block_count = _blocks_of_buffer(buffer_size_gb, block_bytes, block_size_tokens)
    else:
        block_count = check_integer("block_count", block_count, 1, MAX_COUNT)
    paused = None
    if paused_buffer_size_gb is not None and block_bytes:
        paused = int(paused_buffer_size_gb * GIB) // block_bytes
    return CacheSize(block_count, paused, asked)


def _blocks_of_buffer(
    buffer_size_gb: float | None, block_bytes: int, block_size_tokens: int
) -> int:
    if buffer_size_gb is None:
        raise ConfigError("give buffer_size_gb or block_count")
    check_buffer_size(buffer_size_gb)
    block_count = int(buffer_size_gb * GIB) // block_bytes - 1
    if block_count < 1:
        raise ConfigError(
            f"buffer_size_gb={buffer_size_gb} holds no KV block: a block of "
            f"{block_size_tokens} tokens takes {block_bytes / GIB:.6f} GiB and one more "
            "is kept for padding; raise it or lower block_size_tokens"
        )
    return block_count


class CacheMemory:
    """Where caches and recurrent states get their memory.

    Args:
        releasable: it can be given back and had again (sleep mode).

    Attributes:
        regions: what can be given back.
    """

    def __init__(self, device: torch.device, *, releasable: bool) -> None:
        self.regions: list[Region] = []
        self._device = device
        self._releasable = releasable

    def kv_cache(
        self, shape: tuple[int, ...], dtype: torch.dtype, what: str, lower: str
    ) -> torch.Tensor:
        """A KV cache of zeros.

        Raises:
            CacheTooLargeError: it does not fit; ``what`` it is and what to ``lower``.
        """
        with must_fit(self._device, torch.Size(shape).numel() * dtype.itemsize, what, lower):
            return self.zeros(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if not self._releasable or not size:
            if size and self._device.type == "cpu":
                return _untouched_zeros(size).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=self._device)
        region = Region(size, self._device)
        self.regions.append(region)
        return region.part(0, shape, dtype).zero_()


def _untouched_zeros(size: int) -> torch.Tensor:
    """Bytes whose pages take memory when they are first touched; ``torch.zeros`` writes all."""
    try:
        return torch.from_numpy(np.zeros(size, np.uint8))
    except MemoryError as error:
        raise torch.OutOfMemoryError(f"out of memory: {error}") from None
