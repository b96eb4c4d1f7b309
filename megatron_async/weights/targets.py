"""Where new tensors go in the parameters of a model, or of a rank's share of it."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async.checkpoint.quantized import PACKED_END, kept_targets
from megatron_async.checkpoint.quantized.fp8 import NEUTRAL, SUFFIXES, Fp8Target
from megatron_async.checkpoint.quantized.state_dicts import (
    ScalesTarget,
    scaled_targets,
    scales_among,
)
from megatron_async.checkpoint.targets import (
    EMBEDDING,
    FLOATS,
    OUTPUT,
    Stage,
    Target,
    TensorParallel,
    same_values,
)
from megatron_async.errors import CheckpointError
from megatron_async.models.description.kv_cache_spec import plain_parameter
from megatron_async.models.quantized.values import E4M3, meant_shape
from megatron_async.weights.tensor_info import TensorInfo

if TYPE_CHECKING:
    from megatron_async.checkpoint.huggingface.family import Names as StoredNames
    from megatron_async.checkpoint.huggingface.huggingface_weights import Targets
    from megatron_async.models.gpt import GPTModel

logger = logging.getLogger(__name__)

DRAFTING = "mtp."
"""How the names of parameters of layers for multi-token prediction begin."""
Shares = list[Target | None]
"""Where this rank's share of each tensor goes; None where it has none."""

SCALES = ".weight_scale"
"""Behind the name of a layer that keeps e4m3 or MXFP4; they follow from its new weight."""
_OF_PACKED = ("_scales", PACKED_END)
"""How names of packed numbers, and of their scales, end in a directory."""
_NUMBERED = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=weight|.{2}bias)\d+$")
"""An expert's number, in the names of both of megatron-core's classes."""


def blocks_of(name: str, *, gated: bool) -> int:
    """Blocks of a parameter's rows of which each rank has a share: gate and up projection."""
    return 2 if gated and ".linear_fc1." in name else 1


def is_of_one_expert(name: str) -> bool:
    """Whether megatron-core's ``name`` is of one of a layer's experts, which it numbers."""
    return ".experts." in name and _NUMBERED.search(name) is not None


def with_expert_number(name: str, number_of: Callable[[int], int]) -> str:
    """The name of one expert with another number, a function of its own."""
    return _NUMBERED.sub(lambda found: str(number_of(int(found[0]))), name, count=1)


def huggingface_targets(model: GPTModel, names: Collection[str]) -> Targets | None:
    """Where tensors of Hugging Face's ``names`` go in ``model``; None if it was not loaded from
    such a directory, or none of the names is known."""
    family = getattr(model, "huggingface_names", None)
    if family is None or model.model_config is None:
        return None
    from megatron_async.checkpoint.huggingface.huggingface_weights import weight_targets

    parameters: dict[str, Tensor] = dict(model.named_parameters())
    targets = weight_targets(
        model.model_config, parameters, TensorParallel.current(), family, names, Stage.of(model)
    )
    known = targets.keys() | targets.elsewhere
    if model.share_embeddings_and_output_weights:
        known |= {_of_output(family, names)[0]}
    is_known = any(name in known or name.endswith(family.ignored) for name in names)
    return targets if is_known else None


def covers(model: GPTModel, names: Collection[str]) -> bool:
    """Whether weights of these names, megatron-core's or Hugging Face's, are all of the model's."""
    if {name for name, _ in model.named_parameters()} <= set(names):
        return True
    theirs = huggingface_targets(model, names)
    return theirs is not None and theirs.keys() <= set(names)


@dataclass(frozen=True, slots=True)
class Names:
    """What a model knows of the names of new weights.

    Attributes:
        theirs: the names are Hugging Face's.
        is_elsewhere: whether another rank has what this one does not.
    """

    model: GPTModel
    targets: Mapping[str, Target]
    theirs: bool
    is_elsewhere: Callable[[str], bool]
    whole: bool

    @classmethod
    def of(cls, model: GPTModel, names: Collection[str], *, whole: bool) -> Names:
        """Find out whose ``names`` are; ``whole``: they are the whole model's, of which ``model``
        is a rank's share, and not that share's own."""
        names = set(names) - scales_among(names).keys()
        # Scales by themselves are of somebody's weights too, and their error names these.
        names |= {name.removesuffix(x) for name in names for x in SUFFIXES if name.endswith(x)}
        targets = _own_targets(model, whole=whole)
        if not targets.keys() >= names:
            theirs = huggingface_targets(model, names)
            if theirs is not None:
                kept = kept_targets(theirs, model)
                return cls(model, kept, True, theirs.elsewhere.__contains__, whole)
            targets |= _expert_targets(model, whole=whole)
        elsewhere = _elsewhere(model, targets, whole=whole)
        return cls(model, kept_targets(targets, model), False, elsewhere, whole)

    def without_doubles(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` without those that hold no weights, and with Hugging Face's tied output
        layer under the embedding's name.

        Raises:
            CheckpointError: both are given and differ, or :func:`check_tied` refuses them.
        """
        family = self.model.huggingface_names if self.theirs else None
        is_tied = self.model.share_embeddings_and_output_weights
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if family is None:
            if is_tied and EMBEDDING in tensors:
                check_tied(OUTPUT, EMBEDDING, dtypes)
            return dict(tensors)
        kept = {k: tensor for k, tensor in tensors.items() if not k.endswith(family.ignored)}
        head, embedding = _of_output(family, kept)
        if is_tied:
            check_tied(head, embedding, dtypes)
        if is_tied and head in kept:
            tied = kept.pop(head)
            other = kept.setdefault(embedding, tied)
            dtype = plain_parameter(self.model).dtype
            if other is not tied and not are_the_same(tied, other, dtype):
                raise CheckpointError(f"the new {head} differs from the tied {embedding}")
        return kept

    def weights_of(self, infos: Sequence[TensorInfo]) -> list[TensorInfo]:
        """What :meth:`without_doubles` leaves of tensors that are not read yet."""
        family = self.model.huggingface_names if self.theirs else None
        if family is None:
            return list(infos)
        kept = [info for info in infos if not info.name.endswith(family.ignored)]
        head, embedding = _of_output(family, {info.name for info in kept})
        if not self.model.share_embeddings_and_output_weights:
            return kept
        check_tied(head, embedding, {info.name: info.dtype for info in kept})
        return [info._replace(name=embedding) if info.name == head else info for info in kept]

    def shares(self, infos: Sequence[TensorInfo], *, all_parameters: bool) -> Shares:
        """Where each tensor, or this rank's share of it, goes. Scales of e4m3 must be copied in
        front of their weights.

        Args:
            all_parameters: none of this rank's may be missing.

        Raises:
            CheckpointError: a name, a shape or a dtype does not fit.
        """
        for info in infos:
            if self._is_packed(info):
                raise _packed(info.name)
        weight_of = scales_among([info.name for info in infos])
        scaled = scaled_targets(self.targets, infos, vars(self.model).get("stored_block"))
        shares: Shares = []
        for info in infos:
            share = scaled.get(info.name) or self.targets.get(info.name)
            if share is not None:
                _check_fits(info, share, "whole model" if self.whole else "model")
            elif not self.is_elsewhere(weight_of.get(info.name, info.name)):
                raise self._unknown(info.name)
            shares.append(share)
        given = {
            info.name: share.view
            for info, share in zip(infos, shares, strict=True)
            if share is not None and not isinstance(share, ScalesTarget)
        }
        if not all_parameters:
            _say_what_drafts_as_before(self.model, list(given.values()))
        if self.theirs:
            if all_parameters and (missing := self.targets.keys() - {info.name for info in infos}):
                raise _missing(min(missing))
            return shares
        _check_given_once(given)
        if all_parameters:
            stage = Stage.of(self.model) if self.whole else Stage()
            own = {stage.whole(name): p for name, p in self.model.named_parameters()}
            _check_complete(own, list(given.values()))
        return shares

    def _is_packed(self, info: TensorInfo) -> bool:
        """Whether a tensor is MXFP4's numbers, or their scales."""
        target = self.targets.get(info.name)
        if target is None:
            return False
        in_bytes = info.dtype == target.view.dtype == torch.uint8
        return info.name.endswith(_OF_PACKED) or (in_bytes and target.dtype.is_floating_point)

    def _unknown(self, name: str) -> CheckpointError:
        """What is said of a name that no rank has."""
        for suffix in SUFFIXES:
            weight = name.removesuffix(suffix)
            if weight != name and (weight in self.targets or self.is_elsewhere(weight)):
                return CheckpointError(
                    f"the new weights hold {name}, and {weight} is missing: send both in one update"
                )
        said = f"the new weights hold {name}"
        if name.endswith(NEUTRAL):
            return CheckpointError(
                f"{said}: scales of what is computed stay as they are; leave it out"
            )
        if name.endswith(_OF_PACKED):
            return _packed(name)
        return CheckpointError(f"{said}, which the model does not have")


def _packed(name: str) -> CheckpointError:
    return CheckpointError(
        f"the new weights hold {name}: a state dict has no packed numbers; give weights in 16 or "
        "32 bits, or a model directory"
    )


def _of_output(family: StoredNames, given: Collection[str]) -> tuple[str, str]:
    """What the output layer and the embedding are called among ``given`` names."""
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    return family.as_given(head, given), family.as_given(embedding, given)


def check_tied(head: str, embedding: str, dtypes: Mapping[str, torch.dtype]) -> None:
    """Check the names and dtypes of new weights of a model whose output layer is its embedding.

    Raises:
        CheckpointError: the output layer comes as e4m3 or has scales, or comes in more bits beside
            an embedding in e4m3: which of the two is meant, nothing says.
    """
    if dtypes.get(head) == E4M3:
        raise CheckpointError(
            f"the new {head} has dtype {E4M3}, and the model ties it to the embedding: leave it "
            "and its scales out, and send the embedding in 16 or 32 bits"
        )
    for scale in (f"{head}{suffix}" for suffix in SUFFIXES):
        if scale in dtypes:
            raise CheckpointError(
                f"the new weights hold {scale}, and the model ties {head} to the embedding: leave "
                "it out"
            )
    if head in dtypes and dtypes.get(embedding) == E4M3:
        raise CheckpointError(
            f"the new {head} has dtype {dtypes[head]}, and {embedding}, to which the model ties "
            f"it, {E4M3}: leave {head} out"
        )


def are_the_same(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors have the same values in ``dtype``."""
    same = one.shape == other.shape
    return same and same_values(one.to(dtype), other.to(one.device, dtype))


def _own_targets(model: GPTModel, *, whole: bool) -> dict[str, Target]:
    """Targets by megatron-core's names, experts stacked; a tied output layer is the embedding."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named = {name: each for name, each in named.items() if not name.endswith((SCALES, *NEUTRAL))}
    if not whole:
        targets = {name: Target(each, tuple(meant_shape(each))) for name, each in named.items()}
    else:
        stage, parallel = Stage.of(model), TensorParallel.current()
        gated, targets = model.config.gated_linear_unit, {}
        for name, tensor in named.items():
            groups = blocks_of(name, gated=gated)
            view = tensor.detach()
            targets[stage.whole(name)] = parallel.target(name, view, meant_shape(view), groups)
    # The last of several pipeline stages has a copy, and by itself no embedding.
    if model.share_embeddings_and_output_weights and EMBEDDING in targets:
        targets[OUTPUT] = targets[EMBEDDING]
    return targets


def _expert_targets(model: GPTModel, *, whole: bool) -> dict[str, Target]:
    """Each expert by itself, under the names of megatron-core's classes."""
    from megatron_async.models.moe.names import expert_views

    stage = Stage.of(model) if whole else Stage()
    parallel = TensorParallel.current() if whole else TensorParallel()
    gated, targets = model.config.gated_linear_unit, {}
    for name, view in expert_views(model, parallel.expert_rank).items():
        groups = blocks_of(name, gated=gated)
        targets[stage.whole(name)] = parallel.target(
            name, view, meant_shape(view), groups, of_one_expert=True
        )
    return targets


def _elsewhere(model: GPTModel, own: Mapping[str, Target], *, whole: bool) -> Callable[[str], bool]:
    """Whether a name that this rank does not have is another rank's."""
    if not whole:
        return lambda name: False
    parallel, experts = TensorParallel.current(), model.config.num_moe_experts or 0
    stage, here = Stage.of(model), max(experts // parallel.expert_ranks, 1)
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


def _check_fits(info: TensorInfo, target: Target, whose: str) -> None:
    """Raise where a tensor cannot be copied to ``target`` as it is."""
    if info.shape != tuple(target.shape):
        raise CheckpointError(
            f"the new {info.name} has shape {info.shape}, the {whose}'s has {tuple(target.shape)}"
        )
    if isinstance(target, Fp8Target | ScalesTarget):
        return  # dtypes are checked
    takes_floats = target.dtype.is_floating_point
    floats = info.dtype in FLOATS and takes_floats
    if not floats and (info.dtype != target.view.dtype or takes_floats):
        raise CheckpointError(
            f"the new {info.name} has dtype {info.dtype}, the model's has {target.view.dtype}; "
            f"give a float of {', '.join(map(str, FLOATS))}"
        )


def _check_given_once(targets: Mapping[str, Tensor]) -> None:
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


def _check_complete(parameters: Mapping[str, Tensor], targets: list[Tensor]) -> None:
    """Raise unless ``targets``, parameters or views of them, are all of ``parameters``."""
    if (name := next(_lacking(parameters, targets), None)) is not None:
        raise _missing(name)


def _lacking(parameters: Mapping[str, Tensor], targets: list[Tensor]) -> Iterator[str]:
    """The names of ``parameters`` that ``targets``, parameters or views, are not all of."""
    sizes = {target.data_ptr(): target.numel() for target in targets}
    places = sorted(sizes)
    for name, parameter in parameters.items():
        first = bisect_left(places, parameter.data_ptr())
        end = bisect_left(places, parameter.data_ptr() + parameter.nbytes)
        if sum(sizes[place] for place in places[first:end]) != parameter.numel():
            yield name


def _say_what_drafts_as_before(model: GPTModel, targets: list[Tensor]) -> None:
    """Log where new weights have all but layers for multi-token prediction, as a trainer's do that
    trains without these: they go on drafting what the old model would have said."""
    parameters = dict(model.named_parameters())
    drafting = {name: p for name, p in parameters.items() if name.startswith(DRAFTING)}
    others = {name: p for name, p in parameters.items() if name not in drafting}
    left = [*_lacking(drafting, targets)]
    if left and next(_lacking(others, targets), None) is None:
        logger.warning(
            "the new weights lack %d parameters of the layers for multi-token prediction, such as "
            "%s, which stay as they were: fewer of their drafts will be accepted",
            len(left),
            left[0],
        )


def _missing(name: str) -> CheckpointError:
    return CheckpointError(
        f"the new weights lack {name}; give all of them, or say that the update is partial, which "
        "is possible where the old ones were not discarded (partial_update=True; over HTTP "
        '{"partial": true} at its start)'
    )
