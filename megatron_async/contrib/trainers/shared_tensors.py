"""Tensors of this process for ``/update_weights_from_tensor``: handles of their memory."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

CUDA_ARGUMENTS, DEVICE = 15, 6
"""How many a handle of CUDA's has, and which of them is the device."""


@contextlib.contextmanager
def serialized(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The handles, in base64, of tensors that stay where they are inside. CUDA's go by IPC to the
    same GPU; those of the CPU are copied into files in memory."""
    kept = [(name, tensor.detach()) for name, tensor in tensors.items()]
    before = torch.multiprocessing.get_sharing_strategy()
    if any(tensor.device.type == "cpu" for _, tensor in kept):
        # A descriptor reaches children alone; a file is found by its name.
        torch.multiprocessing.set_sharing_strategy("file_system")
        kept = [(n, t.clone() if t.device.type == "cpu" else t) for n, t in kept]
    try:
        stream = io.BytesIO()
        ForkingPickler(stream).dump(kept)
        yield base64.b64encode(stream.getvalue()).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class _Reduced:
    """Is pickled as a handle says."""

    def __init__(self, handle: tuple[Any, tuple[Any, ...]]) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._handle


def serialized_handle(name: str, handle: tuple[Any, tuple[Any, ...]], gpu: str) -> str:
    """One tensor that a trainer has reduced, in base64.

    Args:
        handle: what ``reduce_tensor`` has given.
        gpu: the UUID of its GPU, which has another number elsewhere.
    """
    function, given = handle
    if len(given) == CUDA_ARGUMENTS:
        given = (*given[:DEVICE], gpu, *given[DEVICE + 1 :])
    stream = io.BytesIO()
    ForkingPickler(stream).dump([(name, _Reduced((function, given)))])
    return base64.b64encode(stream.getvalue()).decode()
