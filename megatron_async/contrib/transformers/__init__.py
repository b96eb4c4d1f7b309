"""Hugging Face ``generate`` without its host waits (README.md beside this file).

Needs torch and transformers 4.57 or later. Only ``engine/`` uses our engine, and it is imported
when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.contrib.transformers.captured.generate import (
        CapturedGenerate,
        generate_captured,
    )
    from megatron_async.contrib.transformers.engine.batch import async_generate_batch
    from megatron_async.contrib.transformers.engine.manager import AsyncContinuousBatchingManager
    from megatron_async.contrib.transformers.stopping.criteria import (
        AsyncStoppingCriteriaList,
        reads_on_host,
    )
    from megatron_async.contrib.transformers.stopping.generate import (
        AsyncGenerate,
        async_generate,
        async_stopping,
    )
    from megatron_async.contrib.transformers.stopping.streams import alternating_streams

HOMES = {
    "AsyncContinuousBatchingManager": "engine.manager",
    "AsyncGenerate": "stopping.generate",
    "CapturedGenerate": "captured.generate",
    "AsyncStoppingCriteriaList": "stopping.criteria",
    "async_generate": "stopping.generate",
    "async_generate_batch": "engine.batch",
    "async_stopping": "stopping.generate",
    "alternating_streams": "stopping.streams",
    "generate_captured": "captured.generate",
    "reads_on_host": "stopping.criteria",
}

__all__ = [
    "AsyncContinuousBatchingManager",
    "AsyncGenerate",
    "AsyncStoppingCriteriaList",
    "CapturedGenerate",
    "alternating_streams",
    "async_generate",
    "async_generate_batch",
    "async_stopping",
    "generate_captured",
    "reads_on_host",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
