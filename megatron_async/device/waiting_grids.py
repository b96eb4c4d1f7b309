"""Decides which engine may launch grids whose CTAs wait for each other, one a device.

All CTAs of such a grid must run at once. The grid of one engine does: what is before it on its
stream ends without it, what is behind it starts when all its CTAs run (a dependent launch) or have
ended, and kernels on other streams end as well. Two such grids next to each other might have half
of the SMs each, and wait for ever. So might kernels of other ranks that wait for ones of this rank.
The ranks of one model do not, where each launches the same kernels in the same order on one stream.
What a grid waits for was launched before it, or is the same launch on another rank. So of all
launches that have not ended the oldest one ends: its grids run at once on all ranks, as what was in
front of them is over. NCCL's kernels have a place in that order too, since torch lets the engine's
stream and NCCL's wait for each other. A rank that chooses another kernel than the others for a
launch breaks it, or reads words that mean something else. How many clusters a GPU has room for may
differ among GPUs of one name, so ranks agree which grids run at once (``rank_sums.py``).
Processes that share a GPU have it in turns, but for those under MPS.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist

_owners: dict[int, weakref.ref[object]] = {}
_lock = threading.Lock()


class Ranks(Protocol):
    """The ranks of a model, see ``ModelParallel``."""

    is_given: bool
    layout: Any


def claim(device: torch.device, owner: object, ranks: Ranks | None = None) -> str | None:
    """Let ``owner`` launch them on a device until :func:`release`, or its own end.

    Args:
        ranks: those of its model; None for one.

    Returns:
        None, or why it must not.
    """
    index = device.index or 0
    if device.type != "cuda":
        return f"{device} is no GPU"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if ranks is None or ranks.is_given:
            return "this program has other ranks, whose kernels may wait for its own"
        if ranks.layout.pipeline > 1:
            return "stages wait for each other's messages"
    if _uses_mps(index):
        return f"processes that share cuda:{index} under MPS run kernels at the same time"
    with _lock:
        held = _owners.get(index)
        if held is not None and held() not in (None, owner):
            return f"another engine of this process on cuda:{index} launches such kernels"
        _owners[index] = weakref.ref(owner)
    return None


def release(owner: object) -> None:
    """``owner`` launches no more of them."""
    with _lock:
        for index, held in list(_owners.items()):
            if held() is owner:
                del _owners[index]


def _uses_mps(index: int) -> bool:
    from cuda.bindings import driver

    torch.cuda.init()
    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if attribute is None:  # before CUDA 12.4
        return False
    error, value = driver.cuDeviceGetAttribute(attribute, index)
    return error != driver.CUresult.CUDA_SUCCESS or bool(value)
