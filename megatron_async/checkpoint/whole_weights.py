"""New weights as whole tensors, for a model of which each rank has a share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_async.checkpoint import huggingface_update
from megatron_async.checkpoint.finite import check_finite
from megatron_async.checkpoint.native import stored_dtype
from megatron_async.checkpoint.targets import (
    EMBEDDING,
    FLOATS,
    OUTPUT,
    Stage,
    Target,
    TensorParallel,
    check_has_values,
    same_values,
)
from megatron_async.checkpoint.update import check_complete, check_given_once, without_extra_states
from megatron_async.errors import CheckpointError
from megatron_async.weight_transfer.tensor_info import TensorInfo, infos_of

if TYPE_CHECKING:
    from megatron_async.models.gpt import GPTModel

Shares = list[Target | None]
"""Where this rank's share of each tensor goes; None where it has none."""

_NUMBERED = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=weight|.{2}bias)\d+$")
"""An expert's number, in the names of both of megatron-core's classes."""


def check_whole(
    model: GPTModel,
    source: Any,
    *,
    allow_non_finite_weights: bool,
    all_parameters: bool,
) -> tuple[dict[str, Tensor], Shares]:
    """Check a state dict as far as rank 0 can, whose share ``model`` is: values, and what concerns
    this rank. Returns what is to be sent, each value once, and this rank's shares of it.

    Raises:
        CheckpointError: as :func:`~megatron_async.checkpoint.update.read_weights`.
    """
    tensors = without_extra_states(source)
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(f"the new weights hold {name!r}; give parameters by their names")
        check_has_values(name, tensor)
    tensors = _without_tied(model, tensors)
    shares = shares_of(model, infos_of(tensors), all_parameters=all_parameters)
    if not allow_non_finite_weights:
        dtype = next(model.parameters()).dtype
        check_finite(
            "the new weights",
            (
                (name, tensor, stored_dtype(name, dtype) if share is None else share.view.dtype)
                for (name, tensor), share in zip(tensors.items(), shares, strict=True)
            ),
        )
    # One that lies in the model's own memory may be overwritten before it is sent.
    served = {each.untyped_storage().data_ptr() for each in model.parameters()}
    for (name, tensor), share in zip(list(tensors.items()), shares, strict=True):
        moves = share is None or tensor.data_ptr() != share.view.data_ptr()
        if moves and tensor.untyped_storage().data_ptr() in served:
            tensors[name] = tensor.detach().clone()
    return tensors, shares


def shares_of(model: GPTModel, infos: Sequence[TensorInfo], *, all_parameters: bool) -> Shares:
    """Where the shares of whole tensors go in a rank's ``model``.

    Args:
        infos: of the tensors, under names of the whole model: megatron-core's, or Hugging Face's
            where it was loaded from such a directory.
        all_parameters: none of this rank's may be missing.

    Raises:
        CheckpointError: a name, a shape or a dtype does not fit.
    """
    names = [info.name for info in infos]
    stage = Stage.of(model)
    own = _own_targets(model, stage)
    theirs = None
    if not own.keys() >= set(names):
        theirs = huggingface_update.targets_of(model, names)
    if theirs is not None:
        targets: Mapping[str, Target] = theirs
        is_elsewhere: Callable[[str], bool] = theirs.elsewhere.__contains__
    else:
        targets = own
        is_elsewhere = _is_elsewhere(model, own, stage)
    shares: Shares = []
    for info in infos:
        share = targets.get(info.name)
        if share is not None:
            _check_fits(info, share)
        elif not is_elsewhere(info.name):
            raise CheckpointError(
                f"the new weights hold {info.name}, which the model does not have"
            )
        shares.append(share)
    given = {info.name: share.view for info, share in zip(infos, shares, strict=True) if share}
    if theirs is not None:
        if all_parameters:
            huggingface_update.check_complete(theirs, names)
        return shares
    check_given_once(given)
    if all_parameters:
        parameters = {stage.whole(name): p for name, p in model.named_parameters()}
        check_complete(parameters, list(given.values()))
    return shares


def _own_targets(model: GPTModel, stage: Stage) -> dict[str, Target]:
    """Under megatron-core's names; experts stacked, and each by itself."""
    from megatron_async.models.moe.names import expert_views

    parallel, gated = TensorParallel.current(), model.config.gated_linear_unit
    targets = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        groups = 2 if gated and ".linear_fc1." in name else 1
        view = tensor.detach()
        targets[stage.whole(name)] = parallel.target(name, view, list(view.shape), groups)
    for name, view in expert_views(model, parallel.expert_rank).items():
        targets[stage.whole(name)] = Target(view, tuple(view.shape))
    return targets


def _is_elsewhere(
    model: GPTModel, own: Mapping[str, Target], stage: Stage
) -> Callable[[str], bool]:
    """Whether a name that this rank does not have is another rank's."""
    parallel, experts = TensorParallel.current(), model.config.num_moe_experts or 0
    here = max(experts // parallel.expert_ranks, 1)
    first = parallel.expert_rank * here

    def is_elsewhere(name: str) -> bool:
        if stage.is_elsewhere(name, model.config.num_layers):
            return True
        found = _NUMBERED.search(name)
        if found is None or int(found[0]) >= experts:
            return False
        own_number = first + int(found[0]) % here
        return f"{name[: found.start()]}{own_number}{name[found.end() :]}" in own

    return is_elsewhere


def _check_fits(info: TensorInfo, share: Target) -> None:
    if info.shape != tuple(share.shape):
        raise CheckpointError(
            f"the new {info.name} has shape {info.shape}, the whole model's has "
            f"{tuple(share.shape)}"
        )
    floats = info.dtype in FLOATS and share.view.is_floating_point()
    if info.dtype != share.view.dtype and not floats:
        raise CheckpointError(
            f"the new {info.name} has dtype {info.dtype}, the model's has {share.view.dtype}; "
            f"supported are {', '.join(map(str, FLOATS))}"
        )


def _without_tied(model: GPTModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` without an output layer that is tied to the embedding, whose values go under the
    embedding's name.

    Raises:
        CheckpointError: both are given and differ.
    """
    if not model.share_embeddings_and_output_weights:
        return tensors
    names, family = [(OUTPUT, EMBEDDING)], model.huggingface_names
    if family is not None:
        names.append((f"{family.head}.weight", f"{family.embedding}.weight"))
    for output, embedding in names:
        if output not in tensors:
            continue
        tied = tensors.pop(output)
        other = tensors.setdefault(embedding, tied)
        dtype = next(model.parameters()).dtype
        if other is not tied and not same_values(tied.to(dtype), other.to(tied.device, dtype)):
            raise CheckpointError(
                f"the new {output} differs from the new {embedding}, to which the model ties it"
            )
    return tensors
