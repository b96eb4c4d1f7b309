"""Scales of activations that a checkpoint brings: an ``input_scale`` beside each weight of a model
whose activations were quantized statically (compressed-tensors, ModelOpt, AutoFP8), or an
``activation_scale`` (transformers)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoint.quantized import FIELD
from megatron_async.checkpoint.quantized.fp8 import SCALE_DTYPES, check_scale, read_tensors
from megatron_async.checkpoint.quantized.scheme import read_scheme
from megatron_async.checkpoint.reading.files import (
    SafetensorsWeights,
    StoredTensor,
    stored_headers,
)
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.activations import linears_in_e4m3

SUFFIXES = ("input_scale", "activation_scale")


def read_input_scales(weights: SafetensorsWeights, model: Any) -> dict[str, Tensor] | None:
    """Fp32 ``[1]`` for each linear layer of ``model`` that keeps e4m3, by its name: the largest of
    those of its stored parts. None where scales of activations are chosen by token.

    Args:
        weights: of a Hugging Face directory, for ``model`` with the memory that it keeps.

    Raises:
        CheckpointError: one is missing, or zero, negative, subnormal or not finite, or not one for
            all; or some layers have static ones and others not.
    """
    scheme = read_scheme(weights.directory, read_json(weights.directory / "config.json"))
    if scheme is None or scheme.static_activations is False:
        return None
    if scheme.static_activations is None:
        raise CheckpointError(
            f"{FIELD}: config_groups quantize activations in part dynamically and in part "
            "statically, which quantize_activations does not; leave it out"
        )
    stored = stored_headers(weights.directory)
    names = {
        _scale_of(name, stored): layer for name, layer in _stored_parts(weights, model) if layer
    }
    found: dict[str, Tensor] = {}
    for name, value in read_tensors(names, stored).items():
        check_scale(name, value)
        scale, layer = value.float().reshape(1), names[name]
        found[layer] = torch.maximum(found[layer], scale) if layer in found else scale
    return found


def _stored_parts(weights: SafetensorsWeights, model: Any) -> Iterator[tuple[str, str | None]]:
    """Names of stored weights, and of the layers that they are of; None for those of others."""
    ends = sorted(
        (layer.weight.data_ptr(), layer.weight.data_ptr() + layer.weight.nbytes, name)
        for name, layer in linears_in_e4m3(model).items()
    )
    for name, target in weights.targets.items():
        at = target.view.data_ptr()
        found = (layer for begin, end, layer in ends if begin <= at < end)
        yield name, next(found, None)


def _scale_of(name: str, stored: dict[str, StoredTensor]) -> str:
    """The name of the scale of a weight's inputs."""
    scale, other = (name.removesuffix("weight") + suffix for suffix in SUFFIXES)
    if (scale in stored) == (other in stored):
        fault = f"is missing, and {FIELD} says that activations are quantized statically"
        if scale in stored:
            fault = f"and {other} are there, of which one is to be"
        raise CheckpointError(
            f"{stored[name].file}: {scale} {fault}; quantize the model again, or leave "
            "quantize_activations out"
        )
    scale = scale if scale in stored else other
    file, shape, dtype = stored[scale]
    if dtype not in SCALE_DTYPES or shape not in ((), (1,), (1, 1)):
        raise CheckpointError(
            f"{file}: {scale} has shape {list(shape)} and dtype {dtype}; one number is read, of "
            f"{', '.join(SCALE_DTYPES)}"
        )
    return scale
