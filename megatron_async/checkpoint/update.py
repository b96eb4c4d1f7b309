"""New weights for a model that is being served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from megatron_async.checkpoint.finite import check_finite
from megatron_async.checkpoint.json_file import one_line
from megatron_async.checkpoint.regular_files import is_directory, is_regular_file
from megatron_async.checkpoint.targets import (
    EMBEDDING,
    FLOATS,
    OUTPUT,
    check_has_values,
    same_values,
)
from megatron_async.errors import CheckpointError
from megatron_async.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

# Learned positions are compared by their shape; a table of rotations is the served model's own.
_MAY_DIFFER = {"max_sequence_length"}


def read_weights(
    model: GPTModel,
    source: str | Path | Mapping[str, Any],
    *,
    allow_non_finite_weights: bool = False,
    all_parameters: bool = False,
) -> Callable[[], None]:
    """Read and check new weights as a whole. Calling the result copies them into the parameters of
    ``model``, whose addresses stay. The caller may be in inference mode or not; the model and the
    new weights may have been built in it or not.

    Args:
        source: a model directory, as :func:`load_pretrained` takes it; a ``.safetensors`` file
            with megatron-core's parameter names; or a state dict with these. Experts may be
            stacked, as the model has them, or each by itself. For a model that was loaded from a
            directory of Hugging Face's the names may be those of its tensors.
        allow_non_finite_weights: take tensors with NaN or infinite elements as they are.
        all_parameters: some may not be missing.

    Raises:
        CheckpointError: a name, a shape, a dtype or a directory's config.json does not fit,
            elements of a tensor are not finite in the model's dtype, or the first of the copies
            fails; the model is unchanged.
    """
    loaded = _read(model, source) if isinstance(source, (str, Path)) else source
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # The last of several pipeline stages has a copy, and no embedding.
    tied = model.share_embeddings_and_output_weights and EMBEDDING in targets
    if tied:
        targets[OUTPUT] = targets[EMBEDDING]
    tensors = without_extra_states(loaded)
    if not tensors.keys() <= targets.keys():
        from megatron_async.checkpoint import huggingface_update

        theirs = huggingface_update.targets_of(model, tensors)
        if theirs is not None:
            return huggingface_update.replacement(
                model,
                theirs,
                tensors,
                allow_non_finite_weights=allow_non_finite_weights,
                all_parameters=all_parameters,
            )
        from megatron_async.models.moe.names import expert_views

        targets |= expert_views(model)
    for name, tensor in tensors.items():
        if name not in targets:
            raise CheckpointError(f"the new weights hold {name}, which the model does not have")
        _check_tensor(name, tensor, targets[name])
    check_given_once({name: targets[name] for name in tensors})
    if all_parameters:
        check_complete(dict(model.named_parameters()), [targets[name] for name in tensors])
    if not allow_non_finite_weights:
        check_finite("the new weights", ((k, v, targets[k].dtype) for k, v in tensors.items()))
    if tied and {OUTPUT, EMBEDDING} <= tensors.keys():
        shared = targets[EMBEDDING]
        if not same_values(tensors[OUTPUT].to(shared), tensors[EMBEDDING].to(shared)):
            raise CheckpointError(
                f"the new {OUTPUT} differs from the new {EMBEDDING}, to which the model ties it"
            )
    # A parameter given for another one would be overwritten before it is read.
    served = {target.untyped_storage().data_ptr() for target in targets.values()}
    for name, tensor in tensors.items():
        moves = tensor.data_ptr() != targets[name].data_ptr()
        if moves and tensor.untyped_storage().data_ptr() in served:
            tensors[name] = tensor.detach().clone()

    def copy() -> None:
        # Only in inference mode may inference tensors be written to; others may be as well.
        with torch.inference_mode():
            for number, (name, tensor) in enumerate(tensors.items()):
                try:
                    targets[name].copy_(tensor)
                except RuntimeError as error:
                    if number:
                        raise
                    raise CheckpointError(
                        f"the new {name} cannot be copied, and nothing was: {one_line(error)}"
                    ) from error

    return copy


def without_extra_states(loaded: Any) -> dict[str, Any]:
    """The tensors of a state dict: megatron-core's layers have an extra state each, which holds no
    weights.

    Raises:
        CheckpointError: it is none, or has no tensors.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"the new weights are a {type(loaded).__name__}; give a model directory, a "
            ".safetensors file or a state dict"
        )
    tensors = {k: v for k, v in loaded.items() if not str(k).endswith("_extra_state")}
    if not tensors:
        raise CheckpointError("the new weights are empty; give parameters by their names")
    return tensors


def _check_tensor(name: str, new: Any, target: torch.Tensor) -> None:
    """Raise where ``new`` cannot be copied to ``target`` as it is."""
    check_has_values(name, new)
    if target.shape != new.shape:
        raise CheckpointError(
            f"the new {name} has shape {tuple(new.shape)}, the model's has {tuple(target.shape)}"
        )
    if new.dtype != target.dtype and not (new.dtype in FLOATS and target.is_floating_point()):
        raise CheckpointError(
            f"the new {name} has dtype {new.dtype}, the model's has {target.dtype}; supported are "
            f"{', '.join(map(str, FLOATS))}"
        )


def check_given_once(targets: Mapping[str, torch.Tensor]) -> None:
    """Raise where two names are of the same parameter, or one of a part of another's: the last one
    would win. The caller compares the tied ones."""
    last, end = "", 0
    for name, target in sorted(targets.items(), key=lambda item: item[1].data_ptr()):
        if target.data_ptr() < end and {name, last} != {OUTPUT, EMBEDDING}:
            raise CheckpointError(
                f"the new weights hold {last} and {name}, which are the same values of the model; "
                "give one of them"
            )
        if target.data_ptr() + target.nbytes > end:
            last, end = name, target.data_ptr() + target.nbytes


def check_complete(parameters: Mapping[str, torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Raise unless ``targets``, parameters or views of them, are all of ``parameters``."""
    sizes = {target.data_ptr(): target.numel() for target in targets}
    for name, parameter in parameters.items():
        start, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        if sum(size for at, size in sizes.items() if start <= at < end) != parameter.numel():
            raise CheckpointError(
                f"the new weights lack {name}, and the old ones were discarded; give all of them"
            )


def _read(model: GPTModel, path: str | Path) -> Mapping[str, Any]:
    if not is_file(path):
        from megatron_async.checkpoint.load import load_pretrained

        dtype = next(model.parameters()).dtype
        # What is read here is checked with all the rest.
        loaded = load_pretrained(path, device="cpu", dtype=dtype, allow_non_finite_weights=True)
        if model.model_config is not None:
            _check_same_architecture(path, loaded.config, model.model_config)
        state: Mapping[str, Any] = loaded.model.state_dict()
        return state
    return read_file(path)


def is_file(source: str | Path) -> bool:
    """Whether new weights are in one file, and not a model directory."""
    path = Path(source)
    return not is_directory(path) and is_regular_file(path)


def read_file(path: str | Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a ``.safetensors`` file; raises CheckpointError for another."""
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
