"""From a transformers model object to a megatron-core one, without a file in between."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.huggingface.huggingface import family_of
from megatron_async.checkpoint.huggingface.huggingface_weights import weight_targets
from megatron_async.checkpoint.reading.finite import check_finite
from megatron_async.checkpoint.targets import Target, TensorParallel
from megatron_async.device.memory import GIB
from megatron_async.errors import CheckpointError
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig

logger = logging.getLogger(__name__)

WAYS = ("copy", "take")


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """``model``: a ``GPTModel`` in evaluation mode. ``new_bytes``: what its weights take beside
    those of the transformers model; ``freed_bytes``: what that model has given up for them."""

    model: Any
    config: ModelConfig
    new_bytes: int
    freed_bytes: int


def config_values(model: Any) -> dict[str, Any]:
    """What ``config.json`` of ``model`` says."""
    values: dict[str, Any] = json.loads(model.config.to_json_string())
    values["architectures"] = [type(model).__name__]
    return values


def convert_model(model: Any, way: str = "copy", *, allow_non_finite: bool = False) -> Converted:
    """A megatron-core model with the weights of a transformers model, on its device, in its dtype.

    Args:
        way: ``"copy"`` leaves ``model`` as it is. ``"take"`` shares the tensors whose layout is
            the same and frees each of the others once it is copied: ``model`` is used up. Until
            the last is copied both take memory.

    Raises:
        ValueError: ``way`` is neither.
        CheckpointError: the model is of a type, or has a feature or tensor, that is not supported.
    """
    if way not in WAYS:
        raise ValueError(f"weights is {way!r}; use one of {', '.join(WAYS)}")
    values = config_values(model)
    family = family_of(values)
    config = family.convert(values)
    parameter = next(model.parameters())
    ours = build_model(config, device=parameter.device, dtype=parameter.dtype, initialize=False)
    parameters: dict[str, Tensor] = dict(ours.named_parameters())
    targets = weight_targets(
        config, parameters, TensorParallel.current(), family.names, model.state_dict().keys()
    )
    stored = checked_tensors(model, targets, family, tied=config.tie_word_embeddings)
    by_address = {p.data_ptr(): p for p in parameters.values()}
    shared = freed = 0
    for name, tensor in stored.items():
        target = targets[name]
        mine = by_address.get(target.view.data_ptr())
        if way == "take" and mine is not None and is_same_layout(target, mine, tensor):
            mine.data = tensor.data
            shared += tensor.nbytes
            continue
        target.copy_from(tensor)
        if way == "take":
            freed += tensor.nbytes
            tensor.data = tensor.data.new_empty(0)
    if not allow_non_finite:
        check_finite(type(model).__name__, ((n, p, p.dtype) for n, p in parameters.items()))
    total = sum(p.nbytes for p in parameters.values())
    logger.info(
        "weights of the engine: %.3f GiB, %.3f of them shared with the transformers model, which "
        "has freed %.3f GiB",
        total / GIB,
        shared / GIB,
        freed / GIB,
    )
    return Converted(
        model=ours.eval().requires_grad_(False),
        config=config,
        new_bytes=total - shared,
        freed_bytes=freed,
    )


def checked_tensors(
    model: Any, targets: dict[str, Target], family: Family, *, tied: bool
) -> dict[str, Tensor]:
    """The tensors of ``model`` by the names of ``targets``; all that there are, and no others.

    Raises:
        CheckpointError: one is missing, unexpected, or of another shape.
    """
    kind, names = type(model).__name__, family.names
    head = f"{names.head}.weight"
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in targets:
            if tuple(tensor.shape) != tuple(targets[name].shape):
                raise CheckpointError(
                    f"{kind}: {name} has shape {list(tensor.shape)}, expected "
                    f"{list(targets[name].shape)}"
                )
            found[name] = tensor
        elif not (tied and names.in_file(name) == head) and not name.endswith(names.ignored):
            raise CheckpointError(f"{kind}: unexpected tensor {name}")
    if missing := set(targets) - set(found):
        raise CheckpointError(f"{kind}: tensor {min(missing)} is missing")
    return found


def is_same_layout(target: Target, mine: Tensor, tensor: Tensor) -> bool:
    """Whether our parameter is the stored tensor as it is."""
    return (
        target.view.shape == mine.shape == tensor.shape
        and mine.dtype == tensor.dtype
        and mine.device == tensor.device
        and tensor.is_contiguous()
        and target.select(tensor) is tensor
    )
