"""Tilings that ``megatron-async tune`` found on this machine: a file beside the compiled kernels.

They come before those of ``measured_tilings.py``, and before estimates.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_async.errors import ConfigError
from megatron_async.kernels.cuda.compile import cache_directory
from megatron_async.kernels.cuda.tilings import Tiling

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
    """What was found on a GPU of this name; empty if nothing was, or if the file cannot be read."""
    return _load(cache_directory() / FILE, device_name)


@functools.cache
def _load(path: Path, device_name: str) -> Mapping[Case, Tiling]:
    try:
        entries = json.loads(path.read_text()).get(device_name, [])
        found = {Case(**entry["case"]): Tiling(**entry["tiling"]) for entry in entries}
        return {case: tiling for case, tiling in found.items() if _is_sound(case, tiling)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        logger.warning(
            "the tilings in %s are not used: %s: %s; delete the file, or run 'megatron-async tune' "
            "again",
            path,
            type(error).__name__,
            error,
        )
        return {}


def _is_sound(case: Case, tiling: Tiling) -> bool:
    """Whether a kernel can be built so: a file may be old, or edited."""
    numbers = [*case, *tiling[:5]]
    if any(type(value) is not int or value < 0 for value in numbers) or 0 in tiling[:5]:
        raise ValueError(f"{tiling} of {case} are not all positive integers")
    if any(type(value) is not bool for value in tiling[5:]):
        raise ValueError(f"{tiling} of {case}: true or false is expected")
    return tiling.fits(case.n, case.k, case.rows, case.norm, case.epilogue)


def save(device_name: str, found: Mapping[Case, Tiling]) -> Path:
    """Keep what was found, beside what was found before; the path of the file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = cache_directory() / FILE
    _load.cache_clear()
    merged = {**load(device_name), **found}
    entries = [
        {"case": case._asdict(), "tiling": tiling._asdict()}
        for case, tiling in sorted(merged.items())
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_others(path, device_name), device_name: entries}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text + "\n")
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; set MEGATRON_ASYNC_CACHE to a directory "
            "that can be written to"
        ) from None
    _load.cache_clear()
    return path


def _others(path: Path, device_name: str) -> dict[str, Any]:
    """What the file has of other GPUs, as it is."""
    try:
        values = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: entries for name, entries in values.items() if name != device_name}
