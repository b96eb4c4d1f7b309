"""Tilings that ``megatron-async tune`` found on this machine: a file beside the compiled kernels.

They come before those of ``measured_tilings.py``, and before estimates.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_async.errors import ConfigError
from megatron_async.kernels.compile import cache_directory, keep
from megatron_async.kernels.gemm.tilings import MAX_ROWS, Tiling

logger = logging.getLogger(__name__)

FILE = "tilings.json"


class Case(NamedTuple):
    """A product ``[rows, k] x [n, k]`` with what is inside it, for padded ``rows``."""

    rows: int
    n: int
    k: int
    norm: int
    epilogue: int


def load(device_name: str) -> Mapping[Case, Tiling]:
    """What was found on a GPU of this name; empty if nothing was, or if the file cannot be read,
    which is warned of."""
    path = path_of_file()
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        _warn(path, error)
        return {}
    return _load(path, device_name, (status.st_mtime_ns, status.st_size))


def path_of_file() -> Path:
    """Where tilings are kept; without the file those of this package are used."""
    return cache_directory() / FILE


@functools.lru_cache(maxsize=8)
def _load(path: Path, device_name: str, version: tuple[int, int]) -> Mapping[Case, Tiling]:
    try:
        entries = _read(path).get(device_name, [])
        if not isinstance(entries, list):
            raise ValueError(f"{device_name}: a list is expected")
    except (OSError, ValueError) as error:
        _warn(path, error)
        return {}
    found: dict[Case, Tiling] = {}
    errors: list[Exception] = []
    for entry in entries:
        try:
            case, tiling = _entry(entry)
        except (ValueError, TypeError, KeyError) as error:
            errors.append(error)
        else:
            found[case] = tiling
    if errors:
        _warn(path, errors[0])
    return found


def _warn(path: Path, error: Exception) -> None:
    logger.warning(
        "%s: not all tilings are used (%s: %s); delete the file, or make it readable, and run "
        "'megatron-async tune' again",
        path,
        type(error).__name__,
        error,
    )


def _read(path: Path) -> dict[str, Any]:
    """The file, by GPU.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what this module writes.
    """
    try:
        values = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("too many brackets") from None
    if not isinstance(values, dict):
        raise ValueError("an object is expected")
    return values


def _entry(entry: Any) -> tuple[Case, Tiling]:
    """Of a file that may be old, or edited.

    Raises:
        ValueError, TypeError, KeyError: it is no tiling that can be used.
    """
    case, tiling = Case(**entry["case"]), Tiling(**entry["tiling"])
    numbers = [*case, *tiling[:5]]
    if any(type(value) is not int or not 0 <= value < 2**31 for value in numbers):
        raise ValueError(f"{tiling} of {case}: integers are expected")
    if not 0 < case.rows <= MAX_ROWS or 0 in (case.n, case.k) or 0 in tiling[:5]:
        raise ValueError(f"{tiling} of {case}: numbers are out of range")
    if any(type(value) is not bool for value in tiling[5:]):
        raise ValueError(f"{tiling} of {case}: true or false is expected")
    if not tiling.fits(case.n, case.k, case.rows, case.norm, case.epilogue):
        raise ValueError(f"{tiling} of {case}: no kernel can be built so")
    return case, tiling


def save(device_name: str, found: Mapping[Case, Tiling]) -> Path:
    """Keep what was found, beside what was found before; the path of the file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = path_of_file()
    merged = {**load(device_name), **found}
    entries = [
        {"case": case._asdict(), "tiling": tiling._asdict()}
        for case, tiling in sorted(merged.items())
    ]
    try:
        others = _read(path)
    except (OSError, ValueError):
        others = {}
    try:
        keep(path, (json.dumps({**others, device_name: entries}, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; set MEGATRON_ASYNC_CACHE to a directory "
            "that can be written to"
        ) from None
    return path
