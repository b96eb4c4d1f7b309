"""Weights of e4m3 in a state dict, with their scales beside them: as a trainer has them that
quantizes what it sends (slime, verl, NeMo RL).

The scales of ``NAME`` are ``NAME_scale_inv`` or ``NAME_scale``, both factors of it. Trainers use
the names for scales of any shape, so what scales are of, their shape says. They are copied first,
to memory beside the model, and then each weight is placed with its own: in a model that keeps e4m3
numbers and scales as they are where those fit its own, else multiplied out and quantized as a
directory's are; elsewhere multiplied out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_async.checkpoint.quantized.fp8 import (
    BLOCK,
    SUFFIXES,
    Fp8Target,
    by_block,
    check_scale,
    scale_of_each,
)
from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.values import E4M3, LARGEST

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)

Blocks = tuple[int, int] | None
"""Rows and columns that share a scale; None where rows have one each, or all have one."""


class TensorInfo(Protocol):
    """What is said of a tensor, as ``weights/tensor_info.py`` has it."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class ScalesTarget(Target):
    """Scales on their way: ``view`` has them beside the model until their weight is placed."""


def scales_among(names: Collection[str]) -> dict[str, str]:
    """The names of scales, each with that of its weight, which is there too."""
    known = set(names)
    return {
        name: weight
        for name in names
        for suffix in SUFFIXES
        if name.endswith(suffix) and (weight := name.removesuffix(suffix)) in known
    }


def scales_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` in the order in which they are copied."""
    scales = scales_among(tensors)
    return {name: tensors[name] for name in scales} | dict(tensors)


def scaled_targets(
    targets: Mapping[str, Target], infos: Sequence[TensorInfo], own_block: Blocks
) -> dict[str, Target]:
    """Targets of weights of e4m3 and of their scales, of those that have one in ``targets``.

    Args:
        targets: of weights without scales.
        own_block: of the directory that the model was loaded from.

    Raises:
        CheckpointError: scales are missing, of another shape or dtype than they can have, or of a
            weight that is not e4m3; or the weight is one that has none in this model.
    """
    by_name = {info.name: info for info in infos}
    scales_of: dict[str, list[TensorInfo]] = defaultdict(list)
    for name, weight in scales_among(by_name).items():
        scales_of[weight].append(by_name[name])
    for info in infos:
        if info.dtype == E4M3 and info.name in targets and info.name not in scales_of:
            raise _without_scales(info.name)
    found: dict[str, Target] = {}
    for name, scales in scales_of.items():
        _check_pair(by_name[name], scales)
        target = targets.get(name)
        if target is None:
            continue
        (scale,) = scales
        shape, block = _meaning(by_name[name], scale, own_block)
        room = torch.empty(scale.shape, dtype=torch.float32, device=target.view.device)
        found[scale.name] = ScalesTarget(room, scale.shape)
        found[name] = _with_scales(name, target, room.view(shape), block)
    return found


def check_scales(tensors: Mapping[str, Tensor], served: torch.dtype) -> None:
    """Check the values of all scales of ``tensors``; a device is waited for once.

    Raises:
        CheckpointError: some are zero, negative, subnormal or not finite, or so large that products
            with e4m3 may be infinite in ``served``.
    """
    of_device: dict[torch.device, list[str]] = defaultdict(list)
    for name in scales_among(tensors):
        if tensors[name].numel():
            of_device[tensors[name].device].append(name)
    for names in of_device.values():
        extremes = [torch.stack(torch.aminmax(tensors[name].float())) for name in names]
        least, largest = torch.stack(extremes).cpu().unbind(1)
        fits = (largest * LARGEST).to(served).isfinite()  # not of a NaN, which both have
        good = fits & (least >= torch.finfo(torch.float32).tiny)
        for name, is_good in zip(names, good.tolist(), strict=True):
            if not is_good:
                from megatron_async.checkpoint.quantized.kept import check_product

                check_scale(f"the new {name}", tensors[name])
                check_product(f"the new {name}", tensors[name], served)


def scales_of_rows(weight: TensorInfo, scale: TensorInfo, values: Tensor) -> Tensor:
    """fp32 ``[..., rows, groups]``: ``values``, the scales of a weight in any of their shapes, as
    one for each row and as many of its columns. So they are cut and joined as the weight is.

    Raises:
        CheckpointError: they have another shape or dtype than scales can have.
    """
    _check_pair(weight, [scale])
    shape, block = _meaning(weight, scale, None)
    *rows, columns = weight.shape
    values = values.float().view(shape)
    if block is None:
        return scale_of_each(values, (*rows, 1), None)
    width = math.gcd(columns, block[1])
    return scale_of_each(values, (*rows, columns // width), (block[0], block[1] // width))


def _without_scales(name: str) -> CheckpointError:
    names = " or ".join(name + suffix for suffix in SUFFIXES)
    return CheckpointError(
        f"the new {name} has dtype {E4M3} and no scales: give {names} in the same update, give a "
        "float of 16 or 32 bits in its place, or a model directory in FP8"
    )


def _check_pair(weight: TensorInfo, scales: Sequence[TensorInfo]) -> None:
    """Raise unless a weight is e4m3, and has scales of one name and of a dtype that they have."""
    names = ", ".join(scale.name for scale in scales)
    if weight.dtype != E4M3:
        raise CheckpointError(
            f"the new {weight.name} has dtype {weight.dtype} and has scales, {names}: send it as "
            f"{E4M3}, or leave the scales out"
        )
    if len(scales) > 1:
        raise CheckpointError(f"the new {weight.name} has scales of two names, {names}: send one")
    if scales[0].dtype not in SCALE_DTYPES:
        supported = ", ".join(map(str, SCALE_DTYPES))
        raise CheckpointError(
            f"the new {names} has dtype {scales[0].dtype}; supported are {supported}"
        )


def _meaning(
    weight: TensorInfo, scale: TensorInfo, own_block: Blocks
) -> tuple[tuple[int, ...], Blocks]:
    """What a scale of this shape is of: its shape as ``scale_of_each`` wants it, and the block."""
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(
            f"the new {weight.name} has dtype {E4M3} and {len(weight.shape)} dimensions: only "
            "matrices, and those of stacked experts, have scales; send it in 16 or 32 bits"
        )
    *lead, rows, columns = weight.shape
    shape = by_block(scale.shape)
    if shape in ((), (1,), (1,) * len(weight.shape)):
        return shape, None
    if lead and shape in ((*lead,), (*lead, 1, 1)):
        return (*lead, 1, 1), (rows, columns)
    if shape in ((*lead, rows), (*lead, rows, 1)):
        return (*lead, rows, 1), None
    has_rows = len(shape) == len(weight.shape) and shape[:-1] == (*lead, rows)
    if has_rows and shape[-1] and columns % shape[-1] == 0:  # as a model that keeps e4m3 has them
        return shape, (1, columns // shape[-1])
    blocks = dict.fromkeys(block for block in (own_block, BLOCK) if block is not None)
    for block in blocks:
        if shape == (*lead, -(-rows // block[0]), -(-columns // block[1])):
            return shape, block
    meant = ", ".join(
        f"{[*lead, -(-rows // r), -(-columns // c)]} for blocks of {r} x {c}" for r, c in blocks
    )
    raise CheckpointError(
        f"the new {scale.name} has shape {list(scale.shape)}; scales of {list(weight.shape)} have "
        f"[1] for all, {[*lead, rows, 1]} for each row, {meant}: quantize it so"
    )


def _with_scales(name: str, target: Target, scale: Tensor, block: Blocks) -> Target:
    from megatron_async.checkpoint.quantized.kept import QuantizedTarget, kept_fp8

    if type(target) not in (Target, QuantizedTarget) or not target.dtype.is_floating_point:
        raise CheckpointError(
            f"the new {name} has dtype {E4M3}, which the model does not take for it: send it in 16 "
            "or 32 bits, without scales"
        )
    plain = Fp8Target(target.view, target.shape, target.select, scale=scale, block=block)
    return kept_fp8(plain, target.scales) if isinstance(target, QuantizedTarget) else plain
