"""The folder of compiled kernels and tuned tile configs."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def cache_directory() -> Path:
    """``$MEGATRON_ASYNC_CACHE``, or ``~/.cache/megatron_async``."""
    own = os.environ.get("MEGATRON_ASYNC_CACHE")
    return Path(own) if own else Path.home() / ".cache" / "megatron_async"


def keep(path: Path, content: bytes) -> None:
    """Write a file as a whole: readers and other writers see the one before or this one.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
