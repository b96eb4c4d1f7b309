"""How much a file says before its first tensor: a header is parsed in one go, while all other
threads stand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_async.checkpoint.reading.regular_files import file_size, read_range
from megatron_async.errors import CheckpointError

_LENGTH_BYTES = 8


def header_bytes(file: Path) -> int:
    """Bytes of the header of a safetensors file, as it says itself; raises CheckpointError."""
    file_size(file)
    return int.from_bytes(read_range(file, 0, _LENGTH_BYTES), "little")


def check_header_bytes(files: Iterable[Path], most: int) -> None:
    """Raises CheckpointError if the headers of safetensors ``files`` have more than ``most`` bytes
    together."""
    total = 0
    for file in files:
        total += header_bytes(file)
        if total > most:
            raise CheckpointError(
                f"{file}: its header, with those of the files before it, has {total:,} bytes; the "
                f"most for this model is {most:,}"
            )


def check_file_bytes(file: Path, most: int) -> None:
    """Raises CheckpointError if ``file`` is there and has more than ``most`` bytes."""
    if file.exists() and file_size(file) > most:
        raise CheckpointError(f"{file}: has {file_size(file):,} bytes; the most is {most:,}")
