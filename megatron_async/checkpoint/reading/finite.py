"""Weights that are NaN or infinite are refused by name, before they serve anybody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_async.errors import CheckpointError

HINT = "allow_non_finite_weights takes them as they are"


class _Checked(NamedTuple):
    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    """That it is to be served in."""


def check_finite(where: str, tensors: Iterable[tuple[str, torch.Tensor, torch.dtype]]) -> None:
    """Check that all elements of ``tensors`` are finite, each in the dtype given with it.

    Each tensor is read once where it lies, without a copy, and a device is waited for once.

    Args:
        where: what the message begins with.
        tensors: name, tensor, and the dtype that it is to be served in. Integers are left out, but
            for bytes that are e8m0.

    Raises:
        CheckpointError: some are not; it names the first of them, and counts its bad elements.
    """
    of_device: dict[torch.device, list[_Checked]] = {}
    for name, tensor, dtype in tensors:
        if dtype == torch.float8_e8m0fnu and tensor.dtype == torch.uint8:
            tensor = tensor.view(dtype)
        if tensor.is_floating_point() and tensor.numel():
            one = _Checked(name, tensor.detach(), dtype)
            of_device.setdefault(tensor.device, []).append(one)
    for device, checked in of_device.items():
        marks = _marks(checked, device).tolist()
        bad = [one for one, mark in zip(checked, marks, strict=True) if mark]
        if bad:
            name, tensor, dtype = bad[0]
            wide = tensor.float() if dtype.itemsize == 1 else tensor.to(dtype)
            count = int((~wide.isfinite()).sum())
            more = f", and {len(bad) - 1} more tensors have some" if len(bad) > 1 else ""
            raise CheckpointError(
                f"{where}: {name} has {count:,} of {tensor.numel():,} elements that are NaN or "
                f"infinite as {str(dtype).removeprefix('torch.')}{more}; {HINT}"
            )


def _marks(checked: list[_Checked], device: torch.device) -> torch.Tensor:
    """int32, 1 for each tensor that has bad elements."""
    marks = torch.zeros(len(checked), dtype=torch.int32, device=device)
    if device.type != "cuda":
        for one, mark in zip(checked, marks.unbind(), strict=True):
            _mark_by_extremes(one, mark)
        return marks
    from megatron_async.kernels import finite

    with torch.cuda.device(device):
        for one, mark in zip(checked, marks.unbind(), strict=True):
            if finite.takes(one.tensor, one.dtype):
                finite.mark_not_finite(one.tensor, one.dtype, mark)
            else:
                _mark_by_extremes(one, mark)
    return marks


def _mark_by_extremes(one: _Checked, mark: torch.Tensor) -> None:
    """Minimum and maximum tell: both pass a NaN on, an infinity is one of them, and rounding to
    another dtype keeps their order."""
    if one.tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and a NaN of each sign
        mark.copy_(((one.tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
        return
    if one.tensor.dtype == torch.float8_e8m0fnu:  # has one NaN, and nothing else
        mark.copy_((one.tensor.view(torch.uint8) == 0xFF).any())
        return
    extremes = torch.stack(torch.aminmax(one.tensor)).to(one.dtype)
    mark.copy_(extremes.isfinite().logical_not().any())
