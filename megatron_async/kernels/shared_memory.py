"""Shared memory: what a block of threads may have on a device, and how tiles are chosen by it.

Choosers of tiles bound what a kernel takes, before it is compiled, and take what fits the device.
The bounds hold for what Triton's compiler gives (``tests/unit/kernels/test_tiles_fit.py``); where
one should not, ``fitting.py`` takes smaller tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # the command line knows tile configs, and its help waits for no torch
    import torch

Config = TypeVar("Config")

HOPPER_BYTES = 227 * 1024
"""What a block may have on an H100, H200 or B200. On an A100 it has 163 KiB, on an L40S 99 KiB, on
a T4 64 KiB."""

STATIC_BYTES = 1024
"""Left free by kernels that take shared memory to keep others away: for what a compiler places."""


def block_limit(device: torch.device) -> int:
    """Bytes that a block may have on a GPU; on other devices, which have none, as many as on an
    H100."""
    return gpu_limit(device.index or 0) if device.type == "cuda" else HOPPER_BYTES


@functools.cache
def gpu_limit(index: int) -> int:
    """:func:`block_limit` of a GPU, which is asked once."""
    import torch

    if not torch.cuda.is_available():
        return HOPPER_BYTES
    properties = torch.cuda.get_device_properties(index)
    return int(
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    )


def has_async_products(limit: int) -> bool:
    """Whether a device with such a limit has instructions that read both operands of a product from
    shared memory while the next ones come in: Hopper's wgmma, Blackwell's tcgen05. GPUs with less
    shared memory have none."""
    return limit >= HOPPER_BYTES


def loop_buffers(stages: int, *, indirect: bool = False) -> int:
    """Buffers that Triton's software pipeline keeps of what a loop loads. One of the stages is in
    registers; an asynchronous product takes a buffer more.

    Args:
        indirect: addresses are loaded, too, and come some stages before.
    """
    ahead = -(-(stages - 2) // 2) if indirect else 0
    return max(1, stages - 1 - max(0, ahead))


def first_that_fits(
    configs: Iterable[Config], shared_bytes: Callable[[Config], int], limit: int
) -> Config:
    """The first of ``configs`` whose bound is within the limit, else the last one, of which only
    the compiler can tell."""
    config: Config | None = None
    for config in configs:
        if shared_bytes(config) <= limit:
            break
    assert config is not None
    return config
