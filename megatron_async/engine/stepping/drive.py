"""Stepping an engine until all is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine


def drive(engine: DynamicInferenceEngine) -> Iterator[dict[str, Any]]:
    """The result of each step until no request is unfinished; a caller may stop before."""
    while engine.has_unfinished_requests():
        yield engine.step_modern()
