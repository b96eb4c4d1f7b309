"""How fast a GPU's memory delivers."""

from __future__ import annotations

from functools import partial

import torch

from megatron_async.device.cuda_timeline import mean_us

COPY_BANDWIDTH = {"NVIDIA H200": 4.3e12, "NVIDIA H100 80GB HBM3": 3.03e12}
"""Bytes per second of a large copy, read and written, as measured, by the GPU's name. So reports of
two such machines have the same floor."""
_COPY_BYTES = 1 << 28
"""At least twice the L2 cache of any GPU."""
_COPIES = 10


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes on a GPU: of :data:`COPY_BANDWIDTH`, or
    measured now where the GPU is another.

    Raises:
        torch.OutOfMemoryError: for the copy 512 MiB must be free.
    """
    known = COPY_BANDWIDTH.get(torch.cuda.get_device_name(device))
    return _measured(device) if known is None else known


def _measured(device: torch.device) -> float:
    with torch.cuda.device(device):
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        target.copy_(source)
        seconds = 1e-6 * mean_us(partial(target.copy_, source), _COPIES)
        del source, target
        torch.cuda.empty_cache()
        return 2 * _COPY_BYTES / seconds
