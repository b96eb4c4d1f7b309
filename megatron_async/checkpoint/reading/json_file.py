"""Reading a JSON file of a model directory, with every way it can be broken as one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_async.checkpoint.reading.regular_files import read_file
from megatron_async.errors import CheckpointError

MOST_BYTES = 2**25


def one_line(error: Exception) -> str:
    """The message of a library's error on one line; its class where there is no message."""
    return " ".join(str(error).split()) or type(error).__name__


def json_fault(error: Exception) -> str:
    """What is wrong with a text that ``json`` could not read, on one line and without a word about
    the parser itself."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not {error.encoding.upper()}"
    if isinstance(error, RecursionError):
        return "lists or objects lie too deep inside each other"
    if "integer string conversion" in str(error):
        return "an integer has too many digits"
    return one_line(error)


def read_json(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in ``path``, of at most ``most`` bytes.

    Raises:
        CheckpointError: the file is missing, unreadable, too large, or not a JSON object in UTF-8.
    """
    data = read_file(path, most)
    try:  # UTF-8 alone, as transformers reads it: json.loads would guess the encoding of bytes
        values = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {json_fault(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return values
