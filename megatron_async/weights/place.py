"""New weights are checked as a whole, and copied into the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.checkpoint.native import stored_dtype
from megatron_async.checkpoint.quantized.state_dicts import ScalesTarget, check_scales, scales_first
from megatron_async.checkpoint.reading.files import weight_files
from megatron_async.checkpoint.reading.finite import check_finite
from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.checkpoint.reading.regular_files import Watched
from megatron_async.checkpoint.targets import EMBEDDING, OUTPUT, Target, check_has_values
from megatron_async.errors import CheckpointError, IntegrityError
from megatron_async.models.description.kv_cache_spec import plain_parameter
from megatron_async.weights.shared_memory import OpenedWeights
from megatron_async.weights.source import (
    AnySource,
    ModelDirectory,
    ShareSource,
    WeightsFile,
    source_of,
)
from megatron_async.weights.targets import Names, Shares, are_the_same
from megatron_async.weights.tensor_info import TensorInfo, infos_of

if TYPE_CHECKING:
    from megatron_async.checkpoint.reading.files import SafetensorsWeights
    from megatron_async.models.gpt import GPTModel


def read_weights(
    model: GPTModel,
    source: str | Path | Mapping[str, Any] | AnySource,
    *,
    allow_non_finite_weights: bool = False,
    all_parameters: bool = False,
) -> Callable[[], None]:
    """Read and check new weights as a whole. Calling the result copies them into the parameters of
    ``model``, whose addresses stay. The caller may be in inference mode or not; the model and the
    new weights may have been built in it or not. A directory's files must stay as they are until
    the result has been called: their memory is mapped, and is read once more then.

    Args:
        source: a model directory; a ``.safetensors`` file with megatron-core's parameter names; a
            state dict with these; or another :class:`WeightSource`. Experts may be stacked, as the
            model has them, or each by itself. For a model that was loaded from a directory of
            Hugging Face's the names may be those of its tensors. Weights of e4m3 have their scales
            beside them, see
            ``checkpoint/quantized/state_dicts.py``.
        allow_non_finite_weights: take tensors with NaN or infinite elements as they are.
        all_parameters: some may not be missing.

    Raises:
        CheckpointError: a name, a shape, a dtype or a directory's config.json does not fit,
            elements of a tensor are not finite in the model's dtype, the first of the copies fails,
            or a file has changed since it was checked; the model is unchanged.
    """
    found = source_of(source)
    if isinstance(found, ShareSource):
        share = found.share(
            model,
            allow_non_finite_weights=allow_non_finite_weights,
            all_parameters=all_parameters,
        )
        return partial(_copy_share, share, model)
    scales = None
    if isinstance(found, ModelDirectory):
        stored, scales = found.stored(model), found.cache_scales(model)
        if stored is not None:
            placement, watched = _place_stored(
                stored, allow_non_finite_weights=allow_non_finite_weights
            )
            return WeightCopy(placement, watched, model, scales)
    given = found.read(model)
    watched = Watched([Path(found.path)] if isinstance(found, WeightsFile) else [])
    placement = place(
        model,
        given,
        whole=False,
        allow_non_finite_weights=allow_non_finite_weights,
        all_parameters=all_parameters,
    )
    return WeightCopy(placement, watched, model, scales)


def _copy_share(copy: Callable[[], None], model: GPTModel) -> None:
    """Copy a share of a trainer's weights, which come without scales for an FP8 KV cache."""
    copy()
    model.stored_cache_scales = None


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """Copies checked weights into a model's parameters when it is called, and what came with them
    of scales for an FP8 KV cache."""

    placement: Placement
    watched: Watched
    model: GPTModel
    cache_scales: Tensor | None

    def __call__(self) -> None:
        self.watched.check()
        self.placement.copy()
        self.model.stored_cache_scales = self.cache_scales

    def check(self) -> None:
        """Read all that was copied once more; raises IntegrityError where a parameter does not have
        the new values."""
        if self.placement.opened is not None:
            self.placement.opened.check()  # before its mapping is touched
        with torch.inference_mode():
            for name, tensor, share in self.placement.copied():
                if not share.equals(tensor):
                    raise IntegrityError(f"{name} does not have the new values after the copy")


@dataclass(frozen=True, slots=True)
class Placement:
    """Checked tensors, each value once, and where this rank's shares of them go.

    ``opened`` are tensors of a file; with ``is_read`` it is read, and its mapping is not touched.
    """

    tensors: dict[str, Tensor]
    shares: Shares
    opened: OpenedWeights | None = None
    is_read: bool = False

    def copy(self) -> None:
        """Copy all that is this rank's.

        Raises:
            CheckpointError: the first copy failed, and nothing was copied.
        """
        shares = {name: (tensor, share) for name, tensor, share in self.copied()}
        # Only in inference mode may inference tensors be written to; others may be as well.
        with torch.inference_mode():
            read = self._read(shares)
            has_begun = bool(read)
            for name, (tensor, share) in shares.items():
                if name in read:
                    continue
                try:
                    share.copy_from(tensor)
                except RuntimeError as error:
                    if has_begun:
                        raise
                    raise CheckpointError(
                        f"the new {name} cannot be copied, and nothing was: {one_line(error)}"
                    ) from error
                has_begun = has_begun or not isinstance(share, ScalesTarget)

    def copied(self) -> Iterator[tuple[str, Tensor, Target]]:
        """Tensors by name, of which this rank has a share, and where that goes."""
        for (name, tensor), share in zip(self.tensors.items(), self.shares, strict=True):
            if share is not None:
                yield name, tensor, share

    def _read(self, shares: Mapping[str, tuple[Tensor, Target]]) -> Collection[str]:
        """Read what is to be read from a file; the names of these tensors."""
        if self.opened is None:
            return ()
        self.opened.check()
        if not self.is_read:
            return ()
        opened = self.opened
        read = {name: share for name, (t, share) in shares.items() if opened.get(name) is t}
        opened.copy_into(read)
        return read


def _place_stored(
    stored: SafetensorsWeights, *, allow_non_finite_weights: bool
) -> tuple[Placement, Watched]:
    """Check the tensors of a model's files, all of which are there, and find where each goes.

    Raises:
        CheckpointError: see :func:`read_weights`.
    """
    tensors = stored.tensors()
    watched = Watched(weight_files(stored.directory)[0])
    targets = [stored.targets[name] for name in tensors]
    if not allow_non_finite_weights:
        pairs = zip(tensors.items(), targets, strict=True)
        each = ((name, tensor, target.dtype) for (name, tensor), target in pairs)
        check_finite("the new weights", each)
        for (name, tensor), target in zip(tensors.items(), targets, strict=True):
            target.check(name, tensor)
    return Placement(tensors, list(targets)), watched


def place(
    model: GPTModel,
    given: Any,
    *,
    whole: bool,
    allow_non_finite_weights: bool = False,
    all_parameters: bool = False,
) -> Placement:
    """Check the tensors of a state dict, and find where each goes in ``model``.

    Args:
        whole: ``model`` is a rank's share, and the tensors are the whole model's, as far as they
            have megatron-core's names. Rank 0 checks values, and what concerns itself.
        allow_non_finite_weights, all_parameters: see :func:`read_weights`.

    Raises:
        CheckpointError: see :func:`read_weights`.
    """
    tensors = _with_values(given)
    names = Names.of(model, tensors, whole=whole)
    tensors = scales_first(names.without_doubles(tensors))
    infos = [
        TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    shares = names.shares(infos, all_parameters=all_parameters)
    if whole:
        infos_of(tensors)  # dtypes that can be sent
    check_scales(tensors, model.config.params_dtype)
    dtype = plain_parameter(model).dtype
    if not allow_non_finite_weights:
        each = (
            (name, tensor, stored_dtype(name, dtype) if share is None else share.dtype)
            for (name, tensor), share in zip(tensors.items(), shares, strict=True)
        )
        check_finite("the new weights", each)
    if model.share_embeddings_and_output_weights and {OUTPUT, EMBEDDING} <= tensors.keys():
        if not are_the_same(tensors[OUTPUT], tensors[EMBEDDING], dtype):
            raise CheckpointError(
                f"the new {OUTPUT} differs from the new {EMBEDDING}, to which the model ties it"
            )
        del shares[list(tensors).index(OUTPUT)], tensors[OUTPUT]
    opened = given if isinstance(given, OpenedWeights) else None
    # A look at the values makes a mapping's pages. Where they are, a copy is faster than a read.
    is_read = opened is not None and allow_non_finite_weights and not opened.has_pages
    return Placement(_apart(model, tensors, shares), shares, opened, is_read)


def _with_values(given: Any) -> dict[str, Tensor]:
    """The tensors of a state dict: megatron-core's layers have an extra state each, which holds no
    weights.

    Raises:
        CheckpointError: it is none, has no tensors, or one without values.
    """
    if not isinstance(given, Mapping):
        raise CheckpointError(f"the new weights are a {type(given).__name__}; give a state dict")
    if isinstance(given, OpenedWeights):
        given.check()  # before a look at values, which would end the process
    tensors = {k: v for k, v in given.items() if not str(k).endswith("_extra_state")}
    if not tensors:
        raise CheckpointError("the new weights are empty; give parameters by their names")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"the new weights hold {name!r}, which is no name; give parameters by their names"
            )
        check_has_values(name, tensor)
    return tensors


def _apart(model: GPTModel, tensors: dict[str, Tensor], shares: Shares) -> dict[str, Tensor]:
    """``tensors`` with a copy of each that lies in the model's own memory, and goes to another
    place there: it would be overwritten before it is read."""
    served = {each.untyped_storage().data_ptr() for each in model.parameters()}
    served |= {each.untyped_storage().data_ptr() for each in model.buffers()}
    apart = dict(tensors)
    for (name, tensor), share in zip(tensors.items(), shares, strict=True):
        moves = share is None or tensor.data_ptr() != share.view.data_ptr()
        if moves and tensor.untyped_storage().data_ptr() in served:
            apart[name] = tensor.detach().clone()
    return apart
