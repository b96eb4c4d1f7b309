"""Sampling defaults of a Hugging Face directory: its ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.errors import CheckpointError, RequestError
from megatron_async.sampling_params import SamplingParams

GENERATION_FILE = "generation_config.json"


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Fields of :class:`SamplingParams` that the file sets: ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, ``repetition_penalty`` and ``num_tokens_to_generate`` (its ``max_new_tokens``).

    As in transformers, without ``"do_sample": true`` the likeliest token is taken.

    Raises:
        CheckpointError: there is no such file, or a value is of a wrong type or out of range.
    """
    path = directory / GENERATION_FILE
    if not is_regular_file(path):
        raise CheckpointError(
            f"{directory}: has no {GENERATION_FILE}; leave --generation-config out"
        )
    fields = Fields(read_json(path))
    found: dict[str, Any] = {}
    try:
        if fields.read("do_sample", bool, False):
            kinds = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
            # A 0 is off, which is no number above 0 to Fields.
            given = {
                name: kind for name, kind in kinds.items() if fields.get(name) not in (None, 0)
            }
            found |= {name: fields.read(name, kind) for name, kind in given.items()}
            found.setdefault("temperature", 1.0)
        else:
            found["temperature"] = 0.0
        for theirs, ours, kind in (
            ("repetition_penalty", "repetition_penalty", float),
            ("max_new_tokens", "num_tokens_to_generate", int),
        ):
            if fields.get(theirs) is not None:
                found[ours] = fields.read(theirs, kind)
        SamplingParams(**found).checked()
    except (CheckpointError, RequestError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return found
