"""Experts that a model keeps as MXFP4: the stored numbers and scales, or the nearest of other
weights, without a second copy of any.

Each rank takes whole blocks of 32 neighbours. Where its share of a row is none, the layer's experts
are multiplied out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_async.checkpoint.quantized.mxfp4 import BLOCK, Kind, Mxfp4Target
from megatron_async.checkpoint.reading.files import SafetensorsWeights
from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError
from megatron_async.kernels.moe.mxfp4 import arrange, pack
from megatron_async.models.quantized import linear, mxfp4
from megatron_async.models.quantized.linear import quantizable
from megatron_async.models.quantized.values import meant_shape

logger = logging.getLogger(__name__)

LARGEST = 6.0
"""The largest number of MXFP4."""
BIAS = 127
"""What is added to the exponents of scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTarget(Target):
    """Where stored numbers go in the order of kernels, or scales as they are; ``select`` is of an
    expert's rows.

    Args:
        kind: which of the two. ``view`` is of these alone.
        first: see :class:`~.mxfp4.Mxfp4Target`.
        served: what numbers are multiplied out to.
    """

    kind: Kind
    first: int
    served: torch.dtype = torch.float32
    dtypes: ClassVar[tuple[str, ...]] = ("U8",)

    def check(self, name: str, stored: Tensor) -> None:
        """Raises CheckpointError if products with scales may be infinite."""
        if self.kind == "scales":
            check_scales(name, stored, self.served)

    @property
    def dtype(self) -> torch.dtype:
        """Scales may not be NaN; each number is one."""
        return mxfp4.SCALE_DTYPE if self.kind == "scales" else self.view.dtype

    def copy_from(self, stored: Tensor) -> None:
        """Fill the view."""
        with torch.no_grad():
            for view, rows in self._experts(stored):
                view.copy_(self._as_kept(rows.to(view.device)))

    def equals(self, stored: Tensor) -> bool:
        """Whether the view holds ``stored``."""
        return all(
            torch.equal(view, self._as_kept(rows.to(view.device)))
            for view, rows in self._experts(stored)
        )

    def _as_kept(self, rows: Tensor) -> Tensor:
        return arrange(rows) if self.kind == "blocks" else rows

    def _experts(self, stored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each expert's part of the view, and of what is stored."""
        for expert, view in enumerate(self.view, self.first):
            rows = stored[expert]
            yield view, self.select(rows.flatten(-2) if self.kind == "blocks" else rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingTarget(Target):
    """Where a weight of 16 or 32 bits goes that is kept as MXFP4.

    Args:
        scales: those of the view.
    """

    scales: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """What values are before they are packed."""
        return torch.float32

    def copy_from(self, stored: Tensor) -> None:
        """Pack it into the view."""
        with torch.no_grad():
            for view, scales, values in self._experts(stored):
                for mine, made in zip((view, scales), pack(values), strict=True):
                    mine.copy_(made)

    def equals(self, stored: Tensor) -> bool:
        """Whether ``stored``, packed, is what the view holds."""
        return all(
            torch.equal(mine, made)
            for view, scales, values in self._experts(stored)
            for mine, made in zip((view, scales), pack(values), strict=True)
        )

    def _experts(self, stored: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Numbers and scales of one expert after the other, since packing takes copies in fp32, and
        its new values."""
        values = self.select(stored).reshape(meant_shape(self.view))
        parts = self.view, self.scales, values
        for view, scales, of_expert in zip(*parts, strict=True) if values.dim() > 2 else (parts,):
            yield view, scales, of_expert.to(view.device)


def check_scales(name: str, scales: Tensor, served: torch.dtype) -> None:
    """Raises CheckpointError if one of ``scales``, uint8, makes 6 infinite in ``served``."""
    largest = int(scales.max()) if scales.numel() else 0
    if not bool(torch.tensor(LARGEST * 2.0 ** (largest - BIAS)).to(served).isfinite()):
        raise CheckpointError(
            f"{name}: a scale of 2^{largest - BIAS} makes numbers of up to {LARGEST:g} infinite as "
            f"{str(served).removeprefix('torch.')}; quantize the model again"
        )


def kept_target(target: Target, layer: Any, served: torch.dtype) -> Target:
    """``target``, whose view is of a layer that keeps MXFP4, with the layer's scales."""
    scales = mxfp4.scales_at(target.view, layer.weight, layer.weight_scale)
    if isinstance(target, Mxfp4Target):
        view = scales if target.kind == "scales" else target.view
        return PackedTarget(
            view, target.shape, target.select, kind=target.kind, first=target.first, served=served
        )
    return PackingTarget(target.view, target.shape, target.select, scales=scales)


def keep_packed(model: Any, weights: SafetensorsWeights) -> None:
    """Give those layers of ``model`` memory that are stored as MXFP4: for packed numbers, or where
    a share of a row is no whole blocks for what they stand for.

    Args:
        weights: of the model's directory, for ``model`` as it was built.
    """
    views = [target.view for target in weights.targets.values() if isinstance(target, Mxfp4Target)]
    stored = {view.untyped_storage()._cdata for view in views}
    of_experts: dict[str, list[Any]] = {}
    for name, layer in quantizable(model).items():
        if layer.weight.untyped_storage()._cdata in stored:
            of_experts.setdefault(name.rpartition(".")[0], []).append(layer)
    left_out = 0
    for layers in of_experts.values():
        if all(layer.weight.shape[-1] % BLOCK == 0 for layer in layers):
            for layer in layers:
                mxfp4.keep(layer)
            continue
        left_out += 1  # kernels want both of one dtype
        for layer in layers:
            linear.keep(layer, None)
    if left_out:
        logger.warning(
            "%s: experts of %d layers are multiplied out, not kept as MXFP4: this rank's share of "
            "a row is no multiple of %d columns",
            weights.directory,
            left_out,
            BLOCK,
        )


def keep_others(model: Any) -> None:
    """Give the layers that have no memory yet that of what they were built with."""
    for layer in quantizable(model).values():
        if layer.weight.is_meta:
            linear.keep(layer, None)
