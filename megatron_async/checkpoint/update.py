"""New weights for a model that is being served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from megatron_async.checkpoint.files import one_line
from megatron_async.errors import CheckpointError
from megatron_async.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

# Learned positions are compared by their shape; a table of rotations is the served model's own.
_MAY_DIFFER = {"max_sequence_length"}


def update_weights(model: GPTModel, source: str | Path | Mapping[str, Any]) -> None:
    """Copy new weights into the parameters of ``model``, whose addresses stay.

    Args:
        source: a model directory, as :func:`load_pretrained` takes it; a ``.safetensors`` file
            with megatron-core's parameter names; or a state dict with these. It is read and checked
            as a whole first.

    Raises:
        CheckpointError: a name, a shape or a directory's config.json does not fit; the model is
            unchanged.
    """
    loaded = _read(model, source) if isinstance(source, (str, Path)) else source
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError("the new weights are empty; give parameters by their names")
    for name, tensor in tensors.items():
        target = targets.get(name)
        if target is None and name != "output_layer.weight":
            raise CheckpointError(f"the new weights hold {name}, which the model does not have")
        if target is not None and target.shape != tensor.shape:
            raise CheckpointError(
                f"the new {name} has shape {tuple(tensor.shape)}, the model's has "
                f"{tuple(target.shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in targets:
                targets[name].copy_(tensor)


def _read(model: GPTModel, path: str | Path) -> Mapping[str, Any]:
    if not Path(path).is_file():
        from megatron_async.checkpoint.load import load_pretrained

        dtype = next(model.parameters()).dtype
        loaded = load_pretrained(path, device="cpu", dtype=dtype)
        if model.model_config is not None:
            _check_same_architecture(path, loaded.config, model.model_config)
        state: Mapping[str, Any] = loaded.model.state_dict()
        return state
    if Path(path).suffix != ".safetensors":
        raise CheckpointError(f"{path}: not a .safetensors file; give one, or a model directory")
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error


def _check_same_architecture(path: str | Path, new: ModelConfig, served: ModelConfig) -> None:
    differences = [
        f"{field.name}={getattr(new, field.name)!r} (served: {getattr(served, field.name)!r})"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in _MAY_DIFFER and getattr(new, field.name) != getattr(served, field.name)
    ]
    if differences:
        raise CheckpointError(
            f"{path}: config.json describes another model than the one that is served: "
            f"{', '.join(differences)}; serve it with an engine of its own"
        )
