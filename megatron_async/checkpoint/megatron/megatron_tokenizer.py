"""The tokenizer that Megatron-LM's training names in its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoint.reading.common_file import training_arguments
from megatron_async.checkpoint.reading.regular_files import is_directory, is_regular_file
from megatron_async.errors import CheckpointError
from megatron_async.tokenizer.tokenizer import TOKENIZER_FILE


def stored_tokenizer(directory: Path) -> Path | None:
    """The directory of the ``tokenizer.json`` that the arguments of the training name: a directory,
    a file in one, or a model that Hugging Face's cache has. Nothing is downloaded. None if they
    name none that is there.
    """
    try:
        name: Any = training_arguments(directory).get("tokenizer_model")
    except CheckpointError:
        return None
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 4096:
        return None
    try:
        for place in (Path(name), Path(name).parent):
            if is_directory(place) and is_regular_file(place / TOKENIZER_FILE):
                return place
    except CheckpointError:
        return None
    return _cached(name)


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, TOKENIZER_FILE)
    except ValueError:  # not the name of a model
        return None
    return Path(found).parent if isinstance(found, str) else None
