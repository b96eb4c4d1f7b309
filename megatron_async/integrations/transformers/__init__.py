"""Hugging Face ``generate`` without its host waits (docs/transformers.md).

Needs torch and transformers 4.57 or later. Only ``batch`` and ``manager`` use the engine, and they
are imported when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.integrations.transformers.batch import async_generate_batch
    from megatron_async.integrations.transformers.captured import (
        CapturedGenerate,
        generate_captured,
    )
    from megatron_async.integrations.transformers.generate import (
        AsyncGenerate,
        async_generate,
        async_stopping,
    )
    from megatron_async.integrations.transformers.manager import AsyncContinuousBatchingManager
    from megatron_async.integrations.transformers.stopping import (
        AsyncStoppingCriteriaList,
        reads_on_host,
    )
    from megatron_async.integrations.transformers.streams import alternating_streams

HOMES = {
    "AsyncContinuousBatchingManager": "manager",
    "AsyncGenerate": "generate",
    "CapturedGenerate": "captured",
    "AsyncStoppingCriteriaList": "stopping",
    "async_generate": "generate",
    "async_generate_batch": "batch",
    "async_stopping": "generate",
    "alternating_streams": "streams",
    "generate_captured": "captured",
    "reads_on_host": "stopping",
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
