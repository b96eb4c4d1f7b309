"""What ``dist_checkpointing.save`` keeps once for all ranks: in ``common.pt``, since 0.19 beside
the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoint.reading.distributed_metadata import common_object
from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.checkpoint.reading.pickle_reader import Record
from megatron_async.checkpoint.reading.regular_files import (
    file_size,
    is_regular_file,
    read_file,
    read_range,
)
from megatron_async.checkpoint.reading.torch_archive import read_object
from megatron_async.errors import CheckpointError
from megatron_async.megatron_compat import checkpoints
from megatron_async.megatron_compat.checkpoints import COMMON_OBJECT

COMMON_FILE = checkpoints.COMMON_FILE
MOST_COMMON_BYTES = 2**28


def read_common(directory: Path) -> Any:
    """Plain values, and records of all else. Nothing in it is executed.

    Raises:
        CheckpointError: it is missing, too large or corrupt, or holds what is not allowed.
    """
    path = directory / COMMON_FILE
    stored = None if is_regular_file(path) else common_object(directory)
    if stored is None:
        data = read_file(path, MOST_COMMON_BYTES)
    else:
        path, start, length = stored
        if length > MOST_COMMON_BYTES or start + length > file_size(path):
            raise CheckpointError(f"{path}: {COMMON_OBJECT} is not complete, or too large")
        data = read_range(path, start, length)
    try:
        found = read_object(data)
        return found if stored is None else found[0]
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
