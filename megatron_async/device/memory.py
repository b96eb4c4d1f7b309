"""Whether the cache and the slots fit into a device, checked before and after it is tried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_async.errors import CacheTooLargeError, ModelTooLargeError

GIB = 1024**3
FREE_IT = "free what others hold"


def memory_bytes(device: torch.device) -> int | None:
    """All memory that ``device`` has, or the machine for a CPU; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def free_bytes(device: torch.device) -> int | None:
    """Memory that ``device`` has left, or the machine for a CPU, beside what others hold; None
    where that is not known. What PyTorch keeps for its next tensors is left."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            (available,) = (line for line in file if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, ValueError):
        return memory_bytes(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is how PyTorch says that a device or the machine has no memory left, or
    what came of it: the capture of a graph ends in an error of its own."""
    at: BaseException | None = error
    while at is not None:
        said = str(at).lower().replace("_", " ")
        names_it = "out of memory" in said or "can't allocate memory" in said
        if isinstance(at, RuntimeError) and names_it:
            return True
        at = at.__cause__ or at.__context__
    return False


@contextmanager
def must_fit(device: torch.device, size: int, what: str, lower: str) -> Iterator[None]:
    """Allocate ``size`` bytes on ``device`` in this scope, once they can be there at all.

    A CPU is asked first because it promises memory that it does not have, and is killed when it
    is used. Its caches take memory when they are first touched, so all of it counts, and not what
    is free now.

    Raises:
        CacheTooLargeError: they do not fit; ``what`` they are for and what to ``lower``.
    """
    total = memory_bytes(device)
    reason = f"{what} takes {size / GIB:,.1f} GiB, and device {device} has "
    if total is not None and size > total:
        raise CacheTooLargeError(f"{reason}{total / GIB:,.1f} GiB; lower {lower}")
    free = None if device.type == "cpu" else free_bytes(device)
    if free is not None and size > free:
        raise CacheTooLargeError(f"{reason}{_free_of(free, total)}; lower {lower}, or {FREE_IT}")
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise CacheTooLargeError(f"{reason}less free; lower {lower}") from None
        raise


@contextmanager
def weights_must_fit(device: torch.device, size: int, dtype: torch.dtype) -> Iterator[None]:
    """Build and fill a model on ``device`` in this scope, once its weights can be there at all.

    Args:
        size: bytes of the weights in ``dtype``, or fewer.

    Raises:
        ModelTooLargeError: they do not fit; what they take and what is free.
    """
    total, free = memory_bytes(device), free_bytes(device)
    takes = f"the weights take {size / GIB:,.1f} GiB in {str(dtype).removeprefix('torch.')}"
    reason = f"{takes}, and device {device} has "
    advice = f"take a smaller model or dtype, more ranks, another device, or {FREE_IT}"
    if free is not None and size > free:
        raise ModelTooLargeError(f"{reason}{_free_of(free, total)}; {advice}")
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        left = free_bytes(device)
        said = "no room for all of it" if left is None else f"{left / GIB:,.1f} GiB left of it"
        raise ModelTooLargeError(f"{reason}{said}; {advice}") from None


@contextmanager
def steps_must_fit(device: torch.device, cache_bytes: int, lower: str) -> Iterator[None]:
    """Make all of an engine in this scope: its cache, what steps need beside it, and their graphs.

    Raises:
        CacheTooLargeError: they do not fit; what is free and what to ``lower``.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free, total = free_bytes(device), memory_bytes(device)
        has = "no memory left" if free is None else _free_of(free, total)
        raise CacheTooLargeError(
            f"beside a KV cache of {cache_bytes / GIB:,.1f} GiB the engine's steps do not fit: "
            f"device {device} had {has} when more was asked for; lower {lower}, or {FREE_IT}"
        ) from None


def _free_of(free: int, total: int | None) -> str:
    """What is free, and of what."""
    of = "" if total is None else f" of {total / GIB:,.1f} GiB"
    return f"{free / GIB:,.1f} GiB free{of}"
