"""``common.pt``: what ``dist_checkpointing.save`` keeps once for all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoint.json_file import one_line
from megatron_async.checkpoint.pickle_reader import Record
from megatron_async.checkpoint.regular_files import read_file
from megatron_async.checkpoint.torch_archive import read_object
from megatron_async.errors import CheckpointError

COMMON_FILE = "common.pt"
MOST_COMMON_BYTES = 2**28


def read_common(directory: Path) -> Any:
    """Plain values, and records of all else. Nothing in it is executed.

    Raises:
        CheckpointError: it is missing, too large or corrupt, or holds what is not allowed.
    """
    path = directory / COMMON_FILE
    data = read_file(path, MOST_COMMON_BYTES)
    try:
        return read_object(data)
    except Exception as error:  # a corrupt archive can raise anything
        raise CheckpointError(f"{path}: content refused: {one_line(error)}") from error


def training_arguments(directory: Path) -> dict[str, Any]:
    """The arguments of Megatron-LM's training that ``directory`` was saved with, by name.

    Raises:
        CheckpointError: there are none, or as :func:`read_common`.
    """
    common = read_common(directory)
    stored = common.get("args") if isinstance(common, dict) else None
    state = stored.state if isinstance(stored, Record) else None
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{directory / COMMON_FILE}: has no args of Megatron-LM's training; describe the model "
            "in a config.json, which megatron_async.checkpoint.native.write_config writes"
        )
    return {name: value for name, value in state.items() if isinstance(name, str)}
