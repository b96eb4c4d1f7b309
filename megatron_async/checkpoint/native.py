"""This package's own format: megatron-core state-dict names in one safetensors file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_async.checkpoint.megatron.padded_vocabulary import PaddedVocabulary
from megatron_async.checkpoint.quantized import check_whole, kept_weights, shape_of
from megatron_async.checkpoint.reading.files import (
    SINGLE_FILE,
    Description,
    SafetensorsWeights,
    dtype_name,
    parse_dtype,
    parse_token_ids,
    stored_shapes,
)
from megatron_async.checkpoint.targets import Stage, TensorParallel
from megatron_async.errors import CheckpointError, shown
from megatron_async.models.description.config import ModelConfig

FORMAT = "megatron_async"
FORMAT_VERSION = 1

_FIELDS = {
    "format", "format_version", "model", "eos_token_ids", "bos_token_id", "dtype", "token_count",
}  # fmt: skip


def write_config(
    path: str | Path,
    config: ModelConfig,
    *,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    token_count: int | None = None,
) -> None:
    """Write the ``config.json`` that native and ``dist_checkpointing`` directories need.

    Args:
        token_count: ids that are tokens, where the rest of the vocabulary is padding; None for all.
    """
    values = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": config.to_dict(),
        "eos_token_ids": list(eos_token_ids),
        "bos_token_id": bos_token_id,
        "dtype": dtype_name(dtype),
        **({} if token_count is None else {"token_count": token_count}),
    }
    (Path(path) / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def token_count_of(model: torch.nn.Module) -> int | None:
    """The ids of a model that are tokens; None for all."""
    from megatron_async.models.gpt import Inference

    return model.token_count if isinstance(model, Inference) else None


def copy_tokenizer_files(path: str | Path, tokenizer_files: Iterable[str | Path]) -> None:
    """Copy ``tokenizer.json`` and its like beside the weights, under their own names."""
    for file in map(Path, tokenizer_files):
        shutil.copyfile(file, Path(path) / file.name)


def save_native(
    path: str | Path,
    model: torch.nn.Module,
    config: ModelConfig,
    *,
    tokenizer_files: Iterable[str | Path] = (),
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Save ``model``, built from ``config``, as a native directory; it is made if need be.

    Args:
        tokenizer_files: copied beside the weights (tokenizer.json, tokenizer_config.json).
        dtype: of the stored weights; the first parameter's if None.

    Raises:
        CheckpointError: the model is split over tensor-parallel processes, or keeps FP8 weights.
    """
    if TensorParallel.current().size > 1:
        raise CheckpointError(
            f"{path}: a tensor-parallel model is in no process as a whole; use save_distributed"
        )
    check_whole(path, model)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    # Parameters shared between modules appear once in named_parameters.
    parameters = dict(model.named_parameters())
    dtype = dtype or next(iter(parameters.values())).dtype
    tensors = {
        name: parameter.detach().to("cpu", stored_dtype(name, dtype)).contiguous()
        for name, parameter in parameters.items()
    }
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    copy_tokenizer_files(directory, tokenizer_files)
    # Last: a directory with a config.json is a whole one.
    write_config(
        directory,
        config,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        dtype=dtype,
        token_count=token_count_of(model),
    )


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a stored parameter of a model in ``dtype``; a router's bias of experts is
    always in fp32."""
    return torch.float32 if name.endswith(".expert_bias") else dtype


def describe(directory: Path, values: dict[str, Any]) -> Description:
    """Architecture, end-of-sequence ids and dtype; ``values`` is the content of config.json.

    Raises:
        CheckpointError: the format, its version or a field is unknown, or a value is invalid.
    """
    path = directory / "config.json"
    if values.get("format") != FORMAT or values.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format={values.get('format')!r}, "
            f"format_version={values.get('format_version')!r} is not supported; supported: "
            f"{FORMAT!r}, {FORMAT_VERSION}"
        )
    unknown = sorted(set(values) - _FIELDS)
    if unknown:
        raise CheckpointError(f"{path}: unknown field {unknown[0]}")
    if not isinstance(values.get("model"), dict):
        raise CheckpointError(f"{path}: model must be an object")
    try:
        config = ModelConfig.from_dict(values["model"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    size = config.vocab_size
    parse_token_ids(path, "bos_token_id", values.get("bos_token_id"), size)
    eos_token_ids = parse_token_ids(path, "eos_token_ids", values.get("eos_token_ids"), size)
    dtype = parse_dtype(path, values.get("dtype"))
    return Description(config, eos_token_ids, dtype, _vocabulary(path, values, size))


def _vocabulary(path: Path, values: dict[str, Any], rows: int) -> PaddedVocabulary | None:
    count = values.get("token_count")
    if count is None:
        return None
    if type(count) is not int or not 0 < count <= rows:
        raise CheckpointError(
            f"{path}: token_count={shown(count)} must be an integer of 1 to {rows}"
        )
    return PaddedVocabulary(count, multiple=1)


def weights_of(directory: Path, config: ModelConfig, model: torch.nn.Module) -> SafetensorsWeights:
    """The weights of a native directory, for ``model``, which was built from ``config``.

    Raises:
        CheckpointError: a file is corrupt, or has nothing for a parameter.
    """
    parallel, stage = TensorParallel.current(), Stage.of(model)
    gated = config.gated
    here = {
        name: parallel.target(
            name,
            parameter.detach(),
            shape_of(parameter),
            groups=2 if gated and ".linear_fc1." in name else 1,
        )
        for name, parameter in model.named_parameters()
    }
    if stage.stages == 1:
        return kept_weights(SafetensorsWeights(directory, here, {}, lambda name: False), model)
    names = {name: stage.local(name) for name in stored_shapes(directory)}
    targets = {name: here[local] for name, local in names.items() if local in here}
    if missing := here.keys() - set(names.values()):
        raise CheckpointError(f"{directory}: nothing fills {min(missing)} of this rank's stage")
    weights = SafetensorsWeights(directory, targets, {}, lambda name: names[name] is None)
    return kept_weights(weights, model)
