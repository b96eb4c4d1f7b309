"""Weights that are NaN or infinite are refused by name, before they serve anybody."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megatron_async.errors import CheckpointError

HINT = "allow_non_finite_weights takes them as they are"


def check_finite(where: str, tensors: Iterable[tuple[str, torch.Tensor, torch.dtype]]) -> None:
    """Check that all elements of ``tensors`` are finite, each in the dtype given with it.

    Each tensor is read once where it lies, without a copy, and a device is waited for once. The
    extremes tell: they pass a NaN on, an infinity is one of them, and rounding to another dtype
    keeps their order. A GPU finds the largest magnitudes of all its tensors together, and looks
    at each only if one is bad.

    Args:
        where: what the message begins with.
        tensors: name, tensor, and the dtype that it is to be served in. Integers are left out.

    Raises:
        CheckpointError: some are not; it names the first of them, and counts its bad elements.
    """
    of_device: dict[torch.device, list[tuple[str, torch.Tensor, torch.dtype]]] = {}
    for name, tensor, dtype in tensors:
        if tensor.is_floating_point() and tensor.numel():
            of_device.setdefault(tensor.device, []).append((name, tensor.detach(), dtype))
    for device, checked in of_device.items():
        if device.type == "cuda" and _all_finite(checked):
            continue
        extremes = torch.stack(
            [
                torch.stack(torch.aminmax(tensor)).to(dtype).to(torch.float64)
                for _, tensor, dtype in checked
            ]
        )
        finite = extremes.isfinite().all(dim=1).tolist()
        bad = [one for one, is_finite in zip(checked, finite, strict=True) if not is_finite]
        if bad:
            name, tensor, dtype = bad[0]
            count = int((~tensor.to(dtype).isfinite()).sum())
            more = f", and {len(bad) - 1} more tensors have some" if len(bad) > 1 else ""
            raise CheckpointError(
                f"{where}: {name} has {count:,} of {tensor.numel():,} elements that are NaN or "
                f"infinite as {str(dtype).removeprefix('torch.')}{more}; {HINT}"
            )


def _all_finite(tensors: list[tuple[str, torch.Tensor, torch.dtype]]) -> bool:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, tensor, dtype in tensors:
        by_dtype.setdefault(dtype, []).append(tensor)
    magnitudes = [
        torch.nn.utils.get_total_norm(each, norm_type=math.inf).to(dtype).to(torch.float64)
        for dtype, each in by_dtype.items()
    ]
    return bool(torch.stack(magnitudes).isfinite().all())
