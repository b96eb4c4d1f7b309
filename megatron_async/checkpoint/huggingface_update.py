"""New weights under Hugging Face's names for a model that was loaded from such a directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async.checkpoint.finite import check_finite
from megatron_async.checkpoint.huggingface_weights import Targets, weight_targets
from megatron_async.checkpoint.targets import (
    FLOATS,
    Stage,
    Target,
    TensorParallel,
    check_has_values,
    same_values,
)
from megatron_async.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel


def targets_of(model: GPTModel, names: Collection[str]) -> Targets | None:
    """Where tensors of Hugging Face's ``names`` go in ``model``; None if it was not loaded from
    such a directory, or none of the names is known."""
    family = getattr(model, "huggingface_names", None)
    if family is None or model.model_config is None:
        return None
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    targets = weight_targets(
        model.model_config, parameters, TensorParallel.current(), family, names, Stage.of(model)
    )
    return None if (targets.keys() | targets.elsewhere).isdisjoint(names) else targets


def check_complete(targets: Mapping[str, Target], names: Collection[str]) -> None:
    """Raises CheckpointError unless ``names`` are all of ``targets``."""
    if missing := targets.keys() - set(names):
        raise CheckpointError(
            f"the new weights lack {min(missing)}, and the old ones were discarded; give all of "
            "them"
        )


def replacement(
    model: GPTModel,
    targets: Mapping[str, Target],
    tensors: Mapping[str, Tensor],
    *,
    allow_non_finite_weights: bool,
    all_parameters: bool,
) -> Callable[[], None]:
    """Check tensors under Hugging Face's names, and return what copies them into ``model``.

    Raises:
        CheckpointError: a name, a shape or a dtype does not fit, or elements are not finite.
    """
    family, config = model.huggingface_names, model.model_config
    assert family is not None and config is not None
    kept = {k: tensor for k, tensor in tensors.items() if not str(k).endswith(family.ignored)}
    for name, tensor in kept.items():
        check_has_values(name, tensor)
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    if config.tie_word_embeddings and head in kept:
        tied = kept.pop(head)
        other = kept.setdefault(embedding, tied)
        if other is not tied and not same_values(tied, other.to(tied)):
            raise CheckpointError(f"the new {head} differs from the tied {embedding}")
    for name, tensor in kept.items():
        if name not in targets:
            raise CheckpointError(f"the new weights hold {name}, which the model does not have")
        if tuple(tensor.shape) != tuple(targets[name].shape):
            raise CheckpointError(
                f"the new {name} has shape {tuple(tensor.shape)}, the model's has "
                f"{tuple(targets[name].shape)}"
            )
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"the new {name} has dtype {tensor.dtype}; give a float of "
                f"{', '.join(map(str, FLOATS))}"
            )
    if all_parameters:
        check_complete(targets, kept)
    if not allow_non_finite_weights:
        each = ((name, tensor, targets[name].view.dtype) for name, tensor in kept.items())
        check_finite("the new weights", each)

    def copy() -> None:
        with torch.inference_mode():
            for name, tensor in kept.items():
                targets[name].copy_from(tensor)

    return copy
