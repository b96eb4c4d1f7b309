"""Hugging Face ``generate`` without its host waits (README.md beside this file).

Needs torch and transformers 4.57 or later. Only ``engine/`` uses our engine, and it is imported
when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "AsyncContinuousBatchingManager": "engine.manager",
    "AsyncGenerate": "stopping.generate",
    "AsyncStoppingCriteriaList": "stopping.criteria",
    "CapturedGenerate": "captured.generate",
    "alternating_streams": "stopping.streams",
    "async_generate": "stopping.generate",
    "async_generate_batch": "engine.batch",
    "async_stopping": "stopping.generate",
    "generate_captured": "captured.generate",
    "reads_on_host": "stopping.criteria",
}
"""Where each name lives; ``__init__.pyi`` has the same for type checkers."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
