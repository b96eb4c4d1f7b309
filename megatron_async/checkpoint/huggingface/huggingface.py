"""Hugging Face directories: ``config.json`` to :class:`ModelConfig`, by the model's family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoint.families import families
from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.huggingface.generation_config import GENERATION_FILE
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.checkpoint.reading.files import Description, parse_dtype, parse_token_ids
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.errors import CheckpointError
from megatron_async.models.description.config import ModelConfig


def family_of(values: dict[str, Any]) -> Family:
    """The family that ``model_type`` names, or ``architectures`` where there is none.

    Raises:
        CheckpointError: there is none of that name, or the two contradict each other.
    """
    fields, known = Fields(values), families()
    supported, types = ", ".join(f.architecture for f in known.values()), ", ".join(known)
    architectures, model_type = values.get("architectures"), values.get("model_type")
    if model_type is None and isinstance(architectures, list):
        names = (f.model_type for f in known.values() if architectures == [f.architecture])
        model_type = next(names, None)
        if model_type is None:
            raise fields.unsupported("architectures", supported)
    if not isinstance(model_type, str) or model_type not in known:
        raise fields.unsupported("model_type", types)
    if architectures not in (None, []) and architectures != [known[model_type].architecture]:
        raise fields.unsupported("architectures", supported)
    return known[model_type]


def convert_config(path: Path, values: dict[str, Any]) -> ModelConfig:
    """:class:`ModelConfig` of the ``config.json`` at ``path`` with content ``values``.

    Raises:
        CheckpointError: a field is missing or asks for something this package cannot do; the
            message names the field, its value and what is supported.
    """
    try:
        return family_of(values).convert(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def describe(directory: Path, values: dict[str, Any]) -> Description:
    """Architecture, end-of-sequence ids and dtype; ``values`` is the content of config.json."""
    path = directory / "config.json"
    config = convert_config(path, values)
    dtype = values["dtype"] if values.get("dtype") is not None else values.get("torch_dtype")
    eos_path, eos = path, values.get("eos_token_id")
    generation_path = directory / GENERATION_FILE
    if is_regular_file(generation_path):
        generation_eos = read_json(generation_path).get("eos_token_id")
        if generation_eos is not None:
            eos_path, eos = generation_path, generation_eos
    eos_ids = parse_token_ids(eos_path, "eos_token_id", eos, config.vocab_size)
    return Description(config, eos_ids, parse_dtype(path, dtype))
