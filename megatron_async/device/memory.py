"""Whether the cache and the slots fit into a device, checked before and after it is tried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_async.errors import CacheTooLargeError

GIB = 1024**3


def memory_bytes(device: torch.device) -> int | None:
    """All memory that ``device`` has, or the machine for a CPU; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is how PyTorch says that a device or the machine has no memory left."""
    said = str(error).lower()
    names_it = "out of memory" in said or "can't allocate memory" in said
    return isinstance(error, RuntimeError) and names_it


@contextmanager
def must_fit(device: torch.device, size: int, what: str, lower: str) -> Iterator[None]:
    """Allocate ``size`` bytes on ``device`` in this scope, once they can be there at all.

    A CPU is asked first because it promises memory that it does not have, and is killed when it
    is used.

    Raises:
        CacheTooLargeError: they do not fit; ``what`` they are for and what to ``lower``.
    """
    total = memory_bytes(device)
    reason = f"{what} takes {size / GIB:,.1f} GiB, and device {device} has "
    if total is not None and size > total:
        raise CacheTooLargeError(f"{reason}{total / GIB:,.1f} GiB; lower {lower}")
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise CacheTooLargeError(f"{reason}less free; lower {lower}") from None
        raise
