"""FP8 weights (e4m3) with scales, multiplied out when they are read.

A weight ``[out, in]`` comes with one scale, with one for each of its rows, or with one for each
block of it. What a model is loaded with is their product, rounded to the model's dtype once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from megatron_async.checkpoint.reading.files import FP8
from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_async.checkpoint.reading.files import StoredTensor

STORED = FP8
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
SUFFIXES = ("_scale_inv", "_scale")
"""Behind the name of a weight, that of its scales. Both are factors of it."""
BLOCK = (128, 128)
"""The rows and columns that share a scale of the first name, where nothing says how many."""
NEUTRAL = (
    "input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale",
    "prob_scale",
)  # fmt: skip
"""Scales of what is computed and not stored: activations and KV caches stay as they are."""


def multiply_out(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """fp32 ``[out, in]``, or with experts in front: e4m3 ``weight`` times ``scale``, see
    :func:`scale_of_each`."""
    return weight.float() * scale_of_each(scale, weight.shape, block)


def scale_of_each(scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None) -> Tensor:
    """fp32 of ``shape``, the scales of a weight's elements; expanded where rows have one each.

    Args:
        scale: one number, or ``[..., out]`` or ``[..., out, 1]`` without ``block``, else
            ``[..., out / block rows, in / block columns]``, rounded up.
    """
    *lead, rows, columns = shape
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(()).expand(*shape)
    if block is None:
        return scale.reshape(*lead, rows, 1).expand(*shape)
    of_rows = scale.repeat_interleave(block[0], -2)[..., :rows, :]
    return of_rows.repeat_interleave(block[1], -1)[..., :columns]


def by_block(scale: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales without what ModelOpt has in it for a block's own rows and columns."""
    is_modelopts = len(scale) == 4 and scale[1] == scale[3] == 1
    return (scale[0], scale[2]) if is_modelopts else scale


def check_shape(
    name: str, weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> None:
    """Raises :class:`CheckpointError` unless ``scale`` is the shape of scales of a ``weight``: one
    number, one for each row, or with ``block`` one for each block of that size."""
    if len(weight) != 2:
        raise CheckpointError(f"{name}: FP8 weights have two dimensions, this one {list(weight)}")
    rows, columns = weight
    if block is None:
        several, meant = [(rows, 1), (rows,)], "each row"
    else:
        several = [(-(-rows // block[0]), -(-columns // block[1]))]
        meant = f"each block of {block[0]} x {block[1]}"
    if scale not in [(), (1,), (1, 1), *several]:
        raise CheckpointError(
            f"{name}: scales have shape {list(scale)}; one for {meant} of {list(weight)} is "
            f"{list(several[0])}, one for all is [1]"
        )


def check_scale(name: str, scale: Tensor) -> None:
    """Raises :class:`CheckpointError` unless all scales are positive, normal and finite."""
    wide = scale.float()
    smallest = torch.finfo(torch.float32).tiny
    bad = ~(wide.isfinite() & (wide >= smallest))
    if bool(bad.any()):
        first = float(wide[bad].flatten()[0])
        raise CheckpointError(
            f"{name} has {int(bad.sum()):,} of {wide.numel():,} scales that are no positive normal "
            f"numbers, such as {first}; quantize the model again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Target(Target):
    """Where a weight of e4m3 goes, times its scales.

    Args:
        scale: of the whole stored tensor.
        block: rows and columns that share a scale; None where rows have one each.
    """

    scale: Tensor
    block: tuple[int, int] | None
    dtypes: ClassVar[tuple[str, ...]] = (STORED,)

    def may_be_filled_in_place(self) -> bool:
        """Whether no product is too large for the view."""
        largest = self.scale.float().max() * torch.finfo(torch.float8_e4m3fn).max
        return bool(largest.to(self.view.dtype).isfinite())

    def copy_from(self, stored: Tensor) -> None:
        """Fill the view."""
        # Names the class, since slots=True makes another one than super() knows.
        Target.copy_from(self, self.product(stored))

    def equals(self, stored: Tensor) -> bool:
        """Whether ``stored`` times the scales is what the view holds."""
        return Target.equals(self, self.product(stored))

    def product(self, stored: Tensor) -> Tensor:
        """``stored`` times the scales, fp32 on the view's device."""
        on = self.view.device
        return multiply_out(stored.to(on), self.scale.to(on), self.block)


@dataclass(frozen=True, slots=True)
class ScaleTarget(Target):
    """Scales of a weight, which have been read: nothing is filled with them."""

    dtypes: ClassVar[tuple[str, ...]] = SCALE_DTYPES

    def copy_from(self, stored: Tensor) -> None:
        """Nothing is to be done."""


def fp8_targets(
    targets: Mapping[str, Target],
    stored: Mapping[str, StoredTensor],
    block: tuple[int, int] | None,
) -> dict[str, Target]:
    """``targets`` for weights some of which are stored as e4m3 and have scales beside them.

    Args:
        stored: all tensors of the files.
        block: rows and columns that share a scale, where the configuration says so.

    Raises:
        CheckpointError: scales are missing, or of another shape or dtype than they can have, or
            are zero, negative, subnormal or not finite.
    """
    found = dict(targets)
    scales = {name: _scale_name(name, stored) for name in targets if _is_fp8(name, stored)}
    for name in targets:
        if name not in scales:
            _check_plain(name, stored)
    blocks = {
        name: block or (BLOCK if scale_name.endswith(SUFFIXES[0]) else None)
        for name, scale_name in scales.items()
    }
    for name, scale_name in scales.items():  # before any is read: they may be as large as a file
        check_shape(name, stored[name].shape, by_block(stored[scale_name].shape), blocks[name])
    values = read_tensors(scales.values(), stored)
    for name, scale_name in scales.items():
        of_name, scale = blocks[name], values[scale_name]
        check_scale(scale_name, scale)
        target = targets[name]
        found[scale_name] = ScaleTarget(scale, tuple(scale.shape))
        scale = scale.reshape(by_block(tuple(scale.shape)))
        found[name] = Fp8Target(
            target.view, target.shape, target.select, scale=scale, block=of_name
        )
    return found


def or_scales_of(ignore: Callable[[str], bool]) -> Callable[[str], bool]:
    """Ignore the scales of weights that ``ignore`` does besides, and those of what is computed."""

    def ignores(name: str) -> bool:
        if ignore(name) or name.endswith(NEUTRAL):
            return True
        return any(name.endswith(x) and ignore(name.removesuffix(x)) for x in SUFFIXES)

    return ignores


def _is_fp8(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    return name in stored and stored[name].dtype == STORED


def _scale_name(name: str, stored: Mapping[str, StoredTensor]) -> str:
    file, found = stored[name].file, _scales_of(name, stored)
    if len(found) != 1:
        names = " or ".join(name + suffix for suffix in SUFFIXES)
        fault = f"is {STORED} and has no scales: {names} is missing"
        if found:
            fault = f"has scales of two names: leave out {names}"
        raise CheckpointError(f"{file}: {name} {fault}")
    (scale,) = found
    if stored[scale].dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{stored[scale].file}: {scale} has dtype {stored[scale].dtype}; supported are "
            f"{', '.join(SCALE_DTYPES)}"
        )
    return scale


def _scales_of(name: str, stored: Mapping[str, StoredTensor]) -> list[str]:
    return [scale for suffix in SUFFIXES if (scale := f"{name}{suffix}") in stored]


def _check_plain(name: str, stored: Mapping[str, StoredTensor]) -> None:
    """Raise where a weight of another dtype, or none, has scales."""
    scales = _scales_of(name, stored)
    if scales and name not in stored:
        raise CheckpointError(f"{stored[scales[0]].file}: has {scales[0]}, and {name} is missing")
    if scales:
        file, _, dtype = stored[name]
        raise CheckpointError(
            f"{file}: {name} is {dtype} and has scales, {scales[0]}: store it as {STORED}, or "
            "leave its scales out"
        )


def read_tensors(names: Iterable[str], stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read whole tensors, each file once."""
    from safetensors import SafetensorError, safe_open

    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    found: dict[str, Tensor] = {}
    for file, theirs in by_file.items():
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in theirs}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: was changed meanwhile: {one_line(error)}") from error
    return found
