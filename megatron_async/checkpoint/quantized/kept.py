"""Weights that a model keeps as e4m3: as they are stored, or quantized when they are read.

Scales of a whole tensor or of rows become one for each row. Those of blocks become one for each row
and as many columns as a block and this rank's share have in common, so each stored number and each
stored scale is kept as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_async.checkpoint.quantized.fp8 import Fp8Target, scale_of_each
from megatron_async.checkpoint.quantized.packed import check_scales, kept_target
from megatron_async.checkpoint.reading.files import SafetensorsWeights
from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.linear import keep, quantizable, quantized
from megatron_async.models.quantized.values import (
    E4M3,
    LARGEST,
    columns_of,
    is_packed,
    quantize,
    scales_at,
)

Names = TypeVar("Names", bound=Mapping[str, Target])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTarget(Target):
    """Where a weight of 16 or 32 bits goes that is kept as e4m3.

    Args:
        scales: those of the view, fp32 ``[..., groups]``.
        served: what values are multiplied out to.
    """

    scales: Tensor
    served: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """That the values must be finite in: no product of what is kept is larger."""
        return self.served

    def copy_from(self, stored: Tensor) -> None:
        """Quantize it into the view, each group by its own largest value."""
        _quantize_into(self, stored, self.view, self.scales)

    def equals(self, stored: Tensor) -> bool:
        """Whether ``stored``, quantized, is what the view holds."""
        made = _like(self.view), torch.empty_like(self.scales)
        _quantize_into(self, stored, *made)
        return _holds(self, *made, self.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequantizedTarget(Fp8Target):
    """Where a stored weight of e4m3 goes whose scales are of others than the model's groups.

    Args:
        scales: those of the view, fp32 ``[..., groups]``.
    """

    scales: Tensor

    def may_be_filled_in_place(self) -> bool:
        """As values are not rounded to 16 bits, it may."""
        return True

    def copy_from(self, stored: Tensor) -> None:
        """Multiply it out, and quantize it into the view."""
        _quantize_into(self, self.product(stored), self.view, self.scales)

    def equals(self, stored: Tensor) -> bool:
        """Whether ``stored``, multiplied out and quantized, is what the view holds."""
        made = _like(self.view), torch.empty_like(self.scales)
        _quantize_into(self, self.product(stored), *made)
        return _holds(self, *made, self.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTarget(Fp8Target):
    """Where a stored weight of e4m3 goes as it is, with its scales.

    Args:
        scales: those of the view, fp32 ``[..., groups]``.
    """

    scales: Tensor

    def may_be_filled_in_place(self) -> bool:
        """As nothing is multiplied out, it may."""
        return True

    def copy_from(self, stored: Tensor) -> None:
        """Fill the view and its scales."""
        with torch.no_grad():
            numbers, scales = self._numbers_and_scales(stored)
            self.view.view(torch.uint8).copy_(numbers)
            self.scales.copy_(scales)

    def equals(self, stored: Tensor) -> bool:
        """Whether the view holds ``stored`` with these scales."""
        numbers, scales = self._numbers_and_scales(stored)
        return _holds(self, numbers.to(self.view.device).view(E4M3), scales, self.scales)

    def _numbers_and_scales(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """As bytes, and fp32, of the view's shape and its scales'."""
        as_bytes = self.select(stored.view(torch.uint8)).reshape(self.view.shape)
        scale, block = self.scale.to(self.view.device), self.block
        columns = self.view.shape[-1] // self.scales.shape[-1]
        if not self.takes_all:
            of_each = self.select(scale_of_each(scale, self.shape, block))
            return as_bytes, of_each.reshape(self.view.shape)[..., ::columns]
        of_groups = None if block is None else (block[0], block[1] // columns)
        *rows, k = self.shape
        each = scale_of_each(scale, (*rows, k // columns), of_groups)
        return as_bytes, each.reshape(self.scales.shape)


def keep_as_stored(model: Any, weights: SafetensorsWeights) -> None:
    """Give each layer of ``model`` that may keep e4m3 memory for its weight: e4m3 where all that is
    stored for it is e4m3, or nothing at all is, so that all are quantized with a scale a row; else
    the dtype that it was built with.

    Args:
        weights: of the model's directory, for ``model`` as it was built.
    """
    targets = [target for target in weights.targets.values() if target.view.numel()]
    of_storage: dict[int, list[Target]] = {}
    for target in targets:
        of_storage.setdefault(_storage(target.view), []).append(target)
    stored = any(isinstance(target, Fp8Target) for target in targets)
    for layer in quantizable(model).values():
        if not layer.weight.is_meta:  # it keeps MXFP4, see ``packed.py``
            continue
        found = of_storage.get(_storage(layer.weight), [])
        groups = _groups(layer.weight.shape[-1], found)
        if groups is None and not stored and _are_rows(layer.weight, found):
            groups = 1
        keep(layer, groups)


def keep_rows(model: Any) -> None:
    """Give each layer of ``model`` that may keep e4m3 memory for it, with a scale a row: for
    weights of 16 or 32 bits, which are quantized while they are read."""
    for layer in quantizable(model).values():
        keep(layer, 1)


def with_kept(targets: Names, model: Any) -> Names | dict[str, Target]:
    """``targets``, with others for weights that ``model`` keeps as e4m3 or as MXFP4.

    Raises:
        CheckpointError: scales are so large that products with them may be infinite.
    """
    layers, served = quantized(model), model.config.params_dtype
    if not layers:
        return targets
    found = dict(targets)
    spans = [(layer.weight.data_ptr(), name) for name, layer in layers.items()]
    for name, target in targets.items():
        if target.view.dtype != E4M3 and not is_packed(target.view):
            continue
        at = target.view.data_ptr()
        layer = layers[max(span for span in spans if span[0] <= at)[1]]
        if is_packed(target.view):
            found[name] = kept_target(target, layer, served)
            continue
        scales = scales_at(target.view, layer.weight, layer.weight_scale)
        assert scales is not None, f"{name}: parts of rows were to be kept"
        if isinstance(target, Fp8Target):
            check_product(name, target.scale, served)
        found[name] = _kept(target, scales, served)
    return found


def check_products(where: str, model: Any) -> None:
    """Raises CheckpointError, which begins with ``where``, if a layer of ``model`` keeps e4m3 or
    MXFP4 with scales so large that products with them may be infinite."""
    for name, layer in quantized(model).items():
        if is_packed(layer.weight):
            served = model.config.params_dtype
            check_scales(f"{where}: {name}.weight_scale", layer.weight_scale, served)
        if layer.weight.dtype == E4M3:
            check_product(f"{where}: {name}.weight", layer.weight_scale, model.config.params_dtype)


def check_product(name: str, scale: Tensor, served: torch.dtype) -> None:
    """Raises CheckpointError, which begins with ``name``, if products of e4m3 with the largest of
    ``scale`` may be infinite in ``served``."""
    largest = scale.float().max()
    if not bool((largest * LARGEST).to(served).isfinite()):
        raise CheckpointError(
            f"{name}: a scale of {float(largest):g} makes numbers of up to {LARGEST:g} NaN or "
            f"infinite as {str(served).removeprefix('torch.')}; quantize the model again"
        )


def with_kept_weights(weights: SafetensorsWeights, model: Any) -> SafetensorsWeights:
    """``weights``, some of which ``model`` keeps as e4m3."""
    return replace(weights, targets=dict(with_kept(weights.targets, model)))


def _kept(target: Target, scales: Tensor, served: torch.dtype) -> Target:
    if isinstance(target, Fp8Target):
        return kept_fp8(target, scales)
    return QuantizedTarget(target.view, target.shape, target.select, scales=scales, served=served)


def kept_fp8(target: Fp8Target, scales: Tensor) -> Fp8Target:
    """Target of a stored weight of e4m3 whose view keeps e4m3 too, with ``scales [..., groups]``:
    as it is where the stored scales fit these groups."""
    fits = have_one_scale(target, target.view.shape[-1] // scales.shape[-1])
    return (KeptTarget if fits else RequantizedTarget)(
        target.view, target.shape, target.select, scale=target.scale, block=target.block,
        scales=scales,
    )  # fmt: skip


def _groups(k: int, targets: Iterable[Target]) -> int | None:
    """The scales of a row that all of ``targets`` can be kept with; None if they cannot."""
    columns = k
    found = list(targets)
    for target in found:
        if not isinstance(target, Fp8Target) or not _has_whole_rows(target.view, k):
            return None
        if target.scale.numel() > 1 and target.block is not None:
            fewer = columns_of(k, target.block[1])
            if fewer is None:
                return None
            columns = math.gcd(columns, fewer)
    fit = all(isinstance(each, Fp8Target) and have_one_scale(each, columns) for each in found)
    return k // columns if found and fit else None


def have_one_scale(target: Fp8Target, columns: int) -> bool:
    """Whether ``columns`` neighbours in a row of the view have one of the stored scales: not where
    the stored weight is transposed, unless a matrix has one scale for all."""
    *_, rows, k = target.shape
    block = target.block
    if target.scale.numel() == 1 or (block and block[0] >= rows and block[1] >= k):
        return True
    numbers = torch.arange(rows, dtype=torch.int32)[:, None].expand(target.shape)
    if not _are_same(target.select(numbers), columns):
        return False
    if target.block is None:
        return True
    numbers = (torch.arange(k, dtype=torch.int32) // target.block[1]).expand(target.shape)
    return _are_same(target.select(numbers), columns)


def _are_same(numbers: Tensor, columns: int) -> bool:
    """Whether each ``columns`` neighbours of ``numbers [..., k]``, which may be expanded, are."""
    if numbers.stride(-1) == 0:
        return True
    for dimension in range(numbers.dim() - 1):
        if numbers.stride(dimension) == 0:
            numbers = numbers.narrow(dimension, 0, 1)
    groups = numbers.unflatten(-1, (-1, columns))
    return bool((groups == groups[..., :1]).all())


def _are_rows(weight: Tensor, targets: Iterable[Target]) -> bool:
    found = [_has_whole_rows(target.view, weight.shape[-1]) for target in targets]
    return bool(found) and all(found)


def _has_whole_rows(view: Tensor, k: int) -> bool:
    *rows, last = view.stride()
    offset = view.storage_offset()
    return view.shape[-1] == k and last == 1 and not any(n % k for n in (offset, *rows))


def _storage(tensor: Tensor) -> int:
    """Which memory it is of, also where that has none yet."""
    return int(tensor.untyped_storage()._cdata)


def _quantize_into(target: Target, stored: Tensor, view: Tensor, scales: Tensor) -> None:
    with torch.no_grad():
        values = target.select(stored).reshape(target.view.shape)
        quantize_into(values.to(target.view.device), view, scales)


def quantize_into(values: Tensor, view: Tensor, scales: Tensor) -> None:
    """Fill e4m3 ``view [..., n, k]`` and ``scales [..., n, groups]`` with the nearest of floats."""
    if values.dim() > 2:  # one expert at a time, since it takes copies in fp32
        for each in zip(values, view, scales, strict=True):
            quantize_into(*each)
        return
    numbers, found = quantize(values, scales.shape[-1])
    view.view(torch.uint8).copy_(numbers.view(torch.uint8))
    scales.copy_(found)


def _like(view: Tensor) -> Tensor:
    return torch.empty(view.shape, dtype=view.dtype, device=view.device)


def _holds(target: Target, numbers: Tensor, scales: Tensor, own: Tensor) -> bool:
    as_bytes = (each.view(torch.uint8) for each in (numbers, target.view))
    return torch.equal(*as_bytes) and torch.equal(scales.to(own.device), own)
