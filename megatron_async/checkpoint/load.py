"""One call from a path to a model that is ready to serve."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_async.checkpoint import native
from megatron_async.checkpoint.megatron.megatron_root import BACKEND_FILE
from megatron_async.checkpoint.path import (
    CONFIG_FILE,
    EMBEDDED,
    SUPPORTED,
    load_tokenizer,
    model_directory,
    random_shape,
    tokenizer_directory,
)
from megatron_async.checkpoint.quantized import PACKED_END
from megatron_async.checkpoint.reading.files import (
    SINGLE_FILE,
    Description,
    SafetensorsWeights,
    stored_shapes,
    weight_files,
)
from megatron_async.checkpoint.reading.finite import check_finite
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.checkpoint.reading.stored_size import check_stored_size
from megatron_async.config.engine_config import NEEDS_QUANTIZATION, QUANTIZATIONS
from megatron_async.device import parse_device
from megatron_async.errors import CheckpointError, ConfigError, shown
from megatron_async.models.description.config import ModelConfig
from megatron_async.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_async.checkpoint.reading.distributed_metadata import StoredTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A model in evaluation mode, without gradients, and what is needed to use it.

    ``model`` is a megatron-core ``GPTModel`` built from ``config``. ``tokenizer`` is None where
    the directory has none: token ids alone can be served then.
    """

    model: Any
    config: ModelConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str


class _Described(NamedTuple):
    """What a directory's files say: the model, whether in this package's own words, and its stored
    tensors where they are spread over files of dist_checkpointing."""

    model: Description
    own: bool
    distributed: Mapping[str, StoredTensor] | None

    def shapes(self, directory: Path) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the stored tensors of ``directory``, by name."""
        if self.distributed is None:
            return stored_shapes(directory)
        return {name: tensor.shape for name, tensor in self.distributed.items()}


def _describe(directory: Path) -> _Described:
    config_file = directory / CONFIG_FILE
    if not is_regular_file(config_file):
        if is_regular_file(directory / BACKEND_FILE):
            from megatron_async.checkpoint.megatron import megatron_args
            from megatron_async.checkpoint.reading.distributed_metadata import read_metadata

            stored = read_metadata(directory)
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            return _Described(megatron_args.describe(directory, shapes), True, stored)
        weight_files(directory)
        raise CheckpointError(f"{directory}: has no config.json; {SUPPORTED}")
    values = read_json(config_file)
    own = "format" in values
    if own:
        description = native.describe(directory, values)
        if is_regular_file(directory / SINGLE_FILE):
            return _Described(description, own, None)
        from megatron_async.checkpoint.reading.common_file import COMMON_FILE
        from megatron_async.checkpoint.reading.distributed_metadata import (
            METADATA_FILE,
            read_metadata,
        )

        files = (BACKEND_FILE, METADATA_FILE, COMMON_FILE)
        is_distributed = any((directory / file).exists() for file in files)
        return _Described(description, own, read_metadata(directory) if is_distributed else None)
    if "model_type" in values or "architectures" in values:
        from megatron_async.checkpoint.huggingface import huggingface

        return _Described(huggingface.describe(directory, values), own, None)
    raise CheckpointError(
        f"{config_file}: has neither format nor model_type nor architectures; {SUPPORTED}"
    )


def describe_pretrained(path: str | Path) -> Description:
    """What a model directory, or an embedded model, says of its model; no weights are read.

    Raises:
        CheckpointError: as :func:`load_pretrained`.
    """
    return _describe(model_directory(path)).model


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model directory whose description was compared with what is stored, by headers alone."""

    directory: Path
    described: _Described

    @classmethod
    def at(cls, path: str | Path) -> ModelFiles:
        """The files of a directory or an embedded model; raises CheckpointError."""
        directory = model_directory(path)
        described = _describe(directory)
        check_stored_size(directory, described.model.config, described.shapes(directory))
        return cls(directory, described)

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.described.model.config

    def check_headers(self, model: Any) -> None:
        """Raises CheckpointError unless what is stored fits ``model``, which has the same
        architecture: names, shapes and dtypes. No tensor is read."""
        if self.described.distributed is not None:
            from megatron_async.checkpoint.megatron.distributed import check_weights

            check_weights(self.directory, model, self.described.distributed)
            return
        self.weights_of(model).check()

    def weights_of(self, model: Any) -> SafetensorsWeights:
        """The safetensors files, for ``model``, which has the same architecture. A distributed
        checkpoint has none."""
        if self.described.own:
            return native.weights_of(self.directory, self.config, model)
        from megatron_async.checkpoint.huggingface.huggingface_weights import weights_of

        return weights_of(self.directory, self.config, model)

    def cache_scales(self, model: Any) -> Tensor | None:
        """Scales of keys and values that the directory has for ``model``; None without."""
        if self.described.own or self.described.distributed is not None:
            return None
        from megatron_async.checkpoint.quantized.cache_scales import cache_scales_of

        return cache_scales_of(self.directory, self.config, model)

    @property
    def is_packed(self) -> bool:
        """Whether some weights are stored as MXFP4."""
        if self.described.distributed is not None:
            return False
        return any(name.endswith(PACKED_END) for name in self.described.shapes(self.directory))

    def load(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str | None = None,
        quantize_activations: bool = False,
        built: Callable[[Any], None] | None = None,
    ) -> Any:
        """Build the model and fill it; raises CheckpointError. See :func:`load_pretrained`."""
        # Importing megatron takes seconds: not before all that can fail without it has passed.
        from megatron_async.models.build import build_model
        from megatron_async.models.description.memory_traffic import MXFP4_BYTES

        config = self.config
        is_packed = quantization is not None and self.is_packed
        if quantization == "mxfp4" and not is_packed:
            raise CheckpointError(
                f"{self.directory}: quantization='mxfp4' keeps weights that are stored as MXFP4, "
                "and none are; leave it out, or give 'fp8'"
            )
        model = build_model(
            config,
            device=device,
            dtype=dtype,
            initialize=False,
            may_be_quantized=quantization is not None,
            expert_itemsize=MXFP4_BYTES if is_packed else None,
        )
        if quantization is not None:
            self._decide(model, quantization)
        if quantize_activations:
            self._quantize_activations(model)
        if built is not None:
            built(model)
        if self.described.distributed is not None:
            from megatron_async.checkpoint.megatron.distributed import load_weights

            load_weights(self.directory, model, self.described.distributed)
        elif self.described.own:
            native.weights_of(self.directory, config, model).load()
        else:
            from megatron_async.checkpoint.huggingface import huggingface_weights

            huggingface_weights.load_weights(self.directory, config, model)
        return model

    def _decide(self, model: Any, quantization: str) -> None:
        """Give the layers of ``model`` memory for what they keep."""
        from megatron_async.checkpoint.quantized.kept import keep_as_stored, keep_rows
        from megatron_async.checkpoint.quantized.packed import keep_others, keep_packed

        self.check_headers(model)
        if self.described.distributed is not None:
            keep_rows(model)
            return
        weights = self.weights_of(model)
        keep_packed(model, weights)
        if quantization == "mxfp4":
            keep_others(model)
        else:
            keep_as_stored(model, weights)

    def _quantize_activations(self, model: Any) -> None:
        """Before anything is loaded, by scales that are stored if so."""
        from megatron_async.checkpoint.quantized.input_scales import read_input_scales
        from megatron_async.models.quantized.activations import quantize_activations

        described = self.described
        has_none = described.own or described.distributed is not None
        quantize_activations(
            model, None if has_none else read_input_scales(self.weights_of(model), model)
        )


def load_pretrained(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    allow_non_finite_weights: bool = False,
    tokenizer_model: str | Path | None = None,
    quantization: str | None = None,
    quantize_activations: bool = False,
    built: Callable[[Any], None] | None = None,
) -> Pretrained:
    """Load a model directory; its format is recognised from its files. Of the root of a training of
    Megatron-LM its last iteration is taken.

    Only safetensors and tensors in ``torch.load(weights_only=True)`` are read: no code in a
    checkpoint ever runs. The weights are streamed, one tensor at a time. Where megatron's
    parallel state is initialised, each tensor-parallel rank takes its share.

    Args:
        path: a directory, "tiny" or another of :data:`EMBEDDED` for a model of the package, or
            "random:NAME" for random weights in one of :data:`SHAPES`.
        device: where the parameters go.
        dtype: of the parameters. None means float32 on the CPU, elsewhere the checkpoint's own
            (bfloat16 if it does not say).
        allow_non_finite_weights: take parameters with NaN or infinite elements as they are.
        tokenizer_model: a ``tokenizer.json``, or the directory of one. None takes the directory's
            own, or the one that Megatron-LM's training names, where it is there.
        quantization: "fp8" keeps linear layers and experts as e4m3: as they are stored, or of a
            model without such weights quantized while they are read; and experts that are stored
            as MXFP4 as they are. "mxfp4" keeps these alone. None multiplies all out.
        quantize_activations: what keeps e4m3 quantizes its inputs too, linear layers by scales that
            are stored for activations if the directory has such, else by token.
        built: called with the model when its modules are there, before its weights are read.

    Raises:
        ConfigError: there is no such device, or it has less memory free than the weights take.
        CheckpointError: the directory is missing, corrupt, of an unknown format, asks for something
            that is not supported, or has a parameter with elements that are not finite in
            ``dtype``; the message names it.
    """
    for name, value in (("path", path), ("tokenizer_model", tokenizer_model)):
        is_path = isinstance(value, str | os.PathLike)
        if not is_path and (name == "path" or value is not None):
            raise CheckpointError(f"{name}={shown(value)} must be the path of a directory")
    if not isinstance(allow_non_finite_weights, bool):
        raise CheckpointError(
            f"allow_non_finite_weights={shown(allow_non_finite_weights)} must be True or False"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={shown(dtype)} must be a torch.dtype")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={shown(quantization)} must be 'fp8', 'mxfp4' or None")
    if quantize_activations and quantization != "fp8":
        raise ConfigError(NEEDS_QUANTIZATION)
    device = parse_device(device)
    shape = random_shape(path)
    if shape is not None:
        options = quantization, quantize_activations, built
        if tokenizer_model is not None:
            given = load_tokenizer(path, tokenizer_model)
            return _random(str(path), shape, device, dtype, lambda: given, *options)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
            made_up = beside.submit(load_tokenizer, path)
            return _random(str(path), shape, device, dtype, made_up.result, *options)
    files = ModelFiles.at(path)
    directory, description = files.directory, files.described.model
    tokenizer = None
    place = tokenizer_directory(directory, tokenizer_model)
    if place is not None:
        tokenizer = Tokenizer.from_directory(place)
    eos_token_ids = description.eos_token_ids
    if not eos_token_ids and tokenizer is not None:
        eos_token_ids = tokenizer.eos_ids
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else description.dtype
    model = files.load(device, dtype, quantization, quantize_activations, built)
    if description.vocabulary is not None:
        model.token_count = description.vocabulary.token_count(
            description.config.vocab_size, None if tokenizer is None else tokenizer.vocab_size
        )
    if not allow_non_finite_weights:
        check_finite(str(path), ((n, p, p.dtype) for n, p in model.named_parameters()))
        if quantization is not None:
            from megatron_async.checkpoint.quantized.kept import check_products
            from megatron_async.models.quantized.mxfp4 import scales_of

            check_finite(str(path), scales_of(model))
            check_products(str(path), model)
    return Pretrained(
        model=model.eval().requires_grad_(False),
        config=description.config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        name=(directory if path in EMBEDDED else Path(path)).resolve().name,
    )


def _random(
    name: str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    tokenizer_made: Callable[[], Tokenizer],
    quantization: str | None,
    quantize_activations: bool,
    built: Callable[[Any], None] | None,
) -> Pretrained:
    from megatron_async.models.build import build_random_model
    from megatron_async.models.description.shapes import kept_of_shape

    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = build_random_model(
        config,
        device=device,
        dtype=dtype,
        quantize_activations=quantize_activations,
        **kept_of_shape(name, quantization),
    )
    if built is not None:
        built(model)
    tokenizer = tokenizer_made()
    return Pretrained(
        model=model,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_ids,
        name=name,
    )
