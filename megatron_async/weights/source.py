"""Where new weights come from: a directory, a file, a state dict, memory that is shared, a trainer
that sends them.

Tensors are under megatron-core's names, or under Hugging Face's for a model that was loaded from
such a directory. Whole tensors of which ranks have shares come by these ways too: rank 0 reads
them and ``broadcast`` hands them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from megatron_async.checkpoint.path import model_directory, random_shape
from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.checkpoint.reading.regular_files import is_directory, is_regular_file
from megatron_async.checkpoint.reading.stored_size import SLACK, least_parameters
from megatron_async.errors import CheckpointError
from megatron_async.models import parallel
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.kv_cache_spec import plain_parameter
from megatron_async.weights.announced import BUFFER_BYTES, Group, receive_announced
from megatron_async.weights.header import check_directory_size, check_file
from megatron_async.weights.shared_memory import open_weights
from megatron_async.weights.tensor_info import TensorInfo

if TYPE_CHECKING:
    from megatron_async.checkpoint.reading.files import SafetensorsWeights
    from megatron_async.models.gpt import GPTModel
    from megatron_async.weights.group import WeightGroup

# Learned positions are compared by their shape; a table of rotations is the served model's own.
_MAY_DIFFER = {"max_sequence_length"}


@runtime_checkable
class WeightSource(Protocol):
    """Where new weights are.

    Attributes:
        each_rank_reads: each rank of a model reads its own share; else rank 0 reads whole tensors.
    """

    each_rank_reads: ClassVar[bool]

    @property
    def path(self) -> str | None:
        """The path from which a recorded run reads them again; None if they are in no file."""

    def read(self, model: GPTModel) -> Mapping[str, Any]:
        """The tensors, by name; raises CheckpointError for what cannot be read."""


@runtime_checkable
class ShareSource(Protocol):
    """Where each rank of a model finds its own share, without anything that is whole.

    Attributes:
        each_rank_reads: so it is.
    """

    each_rank_reads: ClassVar[bool]

    @property
    def path(self) -> str | None:
        """As that of :class:`WeightSource`."""

    def share(
        self, model: GPTModel, *, allow_non_finite_weights: bool, all_parameters: bool
    ) -> Callable[[], None]:
        """Check this rank's share, and return what copies it; see ``place.read_weights``."""

    def told(self) -> bytes:
        """What another rank finds its share by."""


AnySource: TypeAlias = WeightSource | ShareSource


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model directory, as :func:`load_pretrained` takes it."""

    path: str
    each_rank_reads: ClassVar[bool] = True

    def stored(self, model: GPTModel) -> SafetensorsWeights | None:
        """The files, whose tensors can be copied into ``model`` without another one; None where
        they have none of that kind, some are packed, or nobody knows what ``model`` was built from.

        Raises:
            CheckpointError: it is a directory of another model, by its config.json.
        """
        if model.model_config is None or random_shape(self.path) is not None:
            return None
        from megatron_async.checkpoint.load import ModelFiles

        check_directory_size(model, model_directory(self.path))
        found = ModelFiles.at(self.path)
        _check_config(self.path, found.config, model)
        if found.described.distributed is not None:
            return None
        weights = found.weights_of(model)
        in_place = all(each.may_be_filled_in_place() for each in weights.targets.values())
        return weights if in_place else None

    def cache_scales(self, model: GPTModel) -> Tensor | None:
        """The scales that it has for an FP8 KV cache of ``model``, as
        :attr:`~megatron_async.models.gpt.Inference.stored_cache_scales`.

        Raises:
            CheckpointError: one is no scale.
        """
        if random_shape(self.path) is not None:
            return None
        from megatron_async.checkpoint.load import ModelFiles

        return ModelFiles.at(self.path).cache_scales(model)

    def read(self, model: GPTModel) -> Mapping[str, Any]:
        """The state dict of this rank's share, in the dtype of ``model``. A directory of another
        model is refused by its config.json and its headers."""
        # Elements that are not finite are looked for with all the rest.
        device, dtype = torch.device("cpu"), plain_parameter(model).dtype
        shape = random_shape(self.path)
        if shape is not None:
            from megatron_async.models.build import build_random_model

            _check_config(self.path, shape, model)
            made: Mapping[str, Any] = build_random_model(
                shape, device=device, dtype=dtype
            ).state_dict()
            return made
        from megatron_async.checkpoint.load import ModelFiles

        check_directory_size(model, model_directory(self.path))
        found = ModelFiles.at(self.path)
        _check_config(self.path, found.config, model)
        if model.model_config is not None:
            found.check_headers(model)
        state: Mapping[str, Any] = found.load(device, dtype).state_dict()
        return state


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A ``.safetensors`` file."""

    path: str
    each_rank_reads: ClassVar[bool] = False

    def read(self, model: GPTModel | None = None) -> Mapping[str, Any]:
        """Its tensors; raises CheckpointError for another file."""
        if Path(self.path).suffix != ".safetensors":
            raise CheckpointError(
                f"{self.path}: not a .safetensors file; give one, or a model directory"
            )
        try:
            if model is not None:
                check_file(model, Path(self.path))
            return safetensors.torch.load_file(self.path)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: cannot be read: {one_line(error)}") from error


class _InMemory:
    """A source that is no file, and is read once."""

    __slots__ = ()
    each_rank_reads: ClassVar[bool] = False
    path: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class StateDict(_InMemory):
    """Tensors of this process."""

    tensors: Mapping[str, Any]

    def read(self, model: GPTModel | None = None) -> Mapping[str, Any]:
        """The tensors."""
        return self.tensors


@dataclass(frozen=True, slots=True)
class SharedMemory(_InMemory):
    """Tensors that a trainer on this host shows, by the handles of its ``SharedWeights``."""

    handles: Mapping[str, Any]

    def read(self, model: GPTModel | None = None) -> Mapping[str, Tensor]:
        """Tensors over the trainer's memory."""
        return open_weights(self.handles)


@dataclass(frozen=True, slots=True)
class FromGroup(_InMemory):
    """What the trainer of a ``WeightGroup`` sends next."""

    group: WeightGroup

    def read(self, model: GPTModel | None = None) -> Mapping[str, Tensor]:
        """Tensors in memory of their own."""
        return self.group.receive()


@dataclass(frozen=True, slots=True)
class Announced(_InMemory):
    """Tensors that were announced, and come as plain broadcasts; see :func:`receive_announced`."""

    group: Group
    infos: Sequence[TensorInfo]
    packed: bool = False
    buffer_bytes: int = BUFFER_BYTES

    def read(self, model: GPTModel | None = None) -> Mapping[str, Tensor]:
        """Tensors in memory of their own."""
        return receive_announced(
            self.group, self.infos, packed=self.packed, buffer_bytes=self.buffer_bytes
        )


class GatheredWeights:
    """Tensors that come one by one, or in buckets: a source for ``update_weights``, which checks
    all of them and takes them together or not at all. One object for each update: it holds copies
    of all tensors.

    Args:
        manifest: names of all that will come; None for those of the model.

    Raises:
        CheckpointError: the manifest has no names.
    """

    each_rank_reads: ClassVar[bool] = False

    def __init__(self, manifest: Collection[str] | None = None) -> None:
        names = () if manifest is None else manifest
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("the manifest of new weights must be a list of their names")
        self._manifest = None if manifest is None else frozenset(manifest)
        self._tensors: dict[str, Tensor] = {}

    @property
    def path(self) -> None:
        """They are in no file."""
        return None

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        """Take copies of some tensors, whose memory may then be used for the next ones.

        Raises:
            CheckpointError: one has come before, is not in the manifest, or is no tensor; nothing
                of the bucket is taken.
        """
        if not isinstance(bucket, Mapping):
            raise CheckpointError(
                f"a bucket of new weights is a {type(bucket).__name__}; give tensors by their names"
            )
        for name, tensor in bucket.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"the new {name} is a {type(tensor).__name__}; give a torch.Tensor"
                )
            if name in self._tensors:
                said = "send each tensor once, and make a GatheredWeights for each update"
                raise CheckpointError(f"{name} has come before; {said}")
            if self._manifest is not None and name not in self._manifest:
                raise CheckpointError(f"{name} is not in the manifest of this update")
        self._tensors |= {name: tensor.detach().clone() for name, tensor in bucket.items()}

    def read(self, model: GPTModel) -> Mapping[str, Any]:
        """All that have come.

        Raises:
            CheckpointError: some of the manifest have not.
        """
        missing = sorted((self._manifest or frozenset()) - self._tensors.keys())
        if missing:
            said = f"{len(missing)} tensors of the manifest have not come, such as {missing[0]}"
            raise CheckpointError(f"{said}; send them before the update")
        return self._tensors


def source_of(given: object) -> AnySource:
    """The source that ``update_weights`` was given: a path, a state dict, or one of these classes.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(given, (str, Path)):
        path = Path(given)
        is_file = not is_directory(path) and is_regular_file(path)
        return WeightsFile(str(given)) if is_file else ModelDirectory(str(given))
    if isinstance(given, Mapping):
        return StateDict(given)
    if isinstance(given, (WeightSource, ShareSource)):
        return given
    raise CheckpointError(
        f"the new weights are a {type(given).__name__}; give a model directory, a "
        ".safetensors file or a state dict"
    )


def replaces_all(model: GPTModel, path: str) -> bool:
    """Whether new weights of ``path`` are all of the model's: a file may have some alone."""
    if not path.endswith(".safetensors") or not Path(path).is_file():
        return True
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = set(file.keys())
    except (OSError, safetensors.SafetensorError):
        return False
    return {name for name, _ in model.named_parameters()} <= names


def _check_config(path: str, new: ModelConfig, model: GPTModel) -> None:
    """Raise for another model than the one that is served. A model that its user built has no
    config to compare, so its size is."""
    if model.model_config is not None:
        _check_same_architecture(path, new, model.model_config)
        return
    stored, least = sum(each.numel() for each in model.parameters()), least_parameters(new)
    if parallel.current() is None and least > SLACK * stored:
        raise CheckpointError(
            f"{path}: config.json describes a model of at least {least:,} parameters, and the one "
            f"that is served has {stored:,}"
        )


def _check_same_architecture(path: str, new: ModelConfig, served: ModelConfig) -> None:
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
