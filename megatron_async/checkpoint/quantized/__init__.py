"""Weights that are stored in fewer bits than they are served in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_async.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_async.checkpoint.reading.files import SafetensorsWeights
    from megatron_async.checkpoint.targets import Target

FIELD = "quantization_config"
FORMER_FIELD = "compression_config"
"""What compressed-tensors wrote before."""
MODELOPT_FILE = "hf_quant_config.json"
PACKED_END = "_blocks"
"""How the names of numbers end that are stored as MXFP4."""
_KEPT = ("torch.float8_e4m3fn", "torch.uint8")
"""FP8, and packed MXFP4."""

Targets = TypeVar("Targets", bound="Mapping[str, Target]")


def quantization_of(values: Mapping[str, Any]) -> Any:
    """What a ``config.json`` with ``values`` says of quantized weights; None for nothing."""
    found = values.get(FIELD)
    return values.get(FORMER_FIELD) if found is None else found


def is_plain(directory: Path, values: Mapping[str, Any]) -> bool:
    """Whether nothing says that weights of ``directory`` are quantized, whose ``config.json`` has
    ``values``."""
    return quantization_of(values) is None and not (directory / MODELOPT_FILE).exists()


def kept_weights(weights: SafetensorsWeights, model: Any) -> SafetensorsWeights:
    """``weights``, with targets for those that ``model`` keeps as e4m3 or as MXFP4."""
    if not _keeps_any(model):
        return weights
    from megatron_async.checkpoint.quantized.kept import with_kept_weights

    return with_kept_weights(weights, model)


def kept_targets(targets: Targets, model: Any) -> Targets | dict[str, Target]:
    """``targets``, with others for weights that ``model`` keeps as e4m3 or as MXFP4."""
    if not _keeps_any(model):
        return targets
    from megatron_async.checkpoint.quantized.kept import with_kept

    return with_kept(targets, model)


def shape_of(parameter: Any) -> list[int]:
    """The shape of what a parameter stands for: its own, unless it keeps MXFP4."""
    if str(parameter.dtype) not in _KEPT:
        return list(parameter.shape)
    from megatron_async.models.quantized.values import meant_shape

    return meant_shape(parameter)


def check_whole(path: str | Path, model: Any) -> None:
    """Raises CheckpointError for a model that keeps e4m3 or MXFP4: nothing that is saved has
    scales."""
    if _keeps_any(model):
        raise CheckpointError(
            f"{path}: a model that keeps FP8 or MXFP4 weights is not saved; load it without "
            "quantization, which multiplies them out, and save that"
        )


def _keeps_any(model: Any) -> bool:
    return any(str(parameter.dtype) in _KEPT for parameter in model.parameters())
