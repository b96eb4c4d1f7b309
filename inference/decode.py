"""Decodes a fixed list of requests with an engine, for ``verify`` and ``demo``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_async.requests import DynamicInferenceRequest, SamplingParams

from .progress import request_bar

if TYPE_CHECKING:
    from megatron_async.engine import DynamicInferenceEngine
    from megatron_async.observability.counters import EngineCounters


@dataclass(frozen=True, slots=True)
class Work:
    """One request to decode."""

    prompt: str | list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came of a list of :class:`Work`, in its order; ``seconds`` of wall clock."""

    depth: int
    requests: list[DynamicInferenceRequest]
    counters: EngineCounters
    seconds: float

    def differences(self, reference: Decoded) -> list[str]:
        """A line for each request whose tokens or finish reason are not those of ``reference``."""
        lines = []
        for mine, other in zip(self.requests, reference.requests, strict=True):
            ours, theirs = mine.generated_tokens, other.generated_tokens
            where = f"depth {self.depth}, request {mine.request_id}"
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                shorter = min(len(ours), len(theirs))
                at = next((n for n, (a, b) in pairs if a != b), shorter)
                lines.append(
                    f"{where}: from token {at} on {ours[at : at + 4]}, with depth "
                    f"{reference.depth} {theirs[at : at + 4]}"
                )
            elif mine.finish_reason is not other.finish_reason:
                lines.append(
                    f"{where}: ended by {mine.finish_reason}, with depth {reference.depth} by "
                    f"{other.finish_reason}"
                )
        return lines


def decode(
    engine: DynamicInferenceEngine,
    works: Sequence[Work],
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_finish: Callable[[DynamicInferenceRequest], None] | None = None,
) -> Decoded:
    """Decode all of ``works`` together, as requests 0, 1, ...

    Args:
        on_text: called with a request's number and its new text; replaces the progress bar.
        on_finish: called with each request that ended.
    """
    engine.reset()
    started = time.perf_counter()
    futures = [engine.add_request(n, work.prompt, work.params) for n, work in enumerate(works)]
    with request_bar(len(works) if on_text is None else 0) as bar:
        while engine.has_unfinished_requests():
            step = engine.step_modern()
            for output in step["tokens"]:
                if on_text is not None and output.text:
                    on_text(output.request_id, output.text)
            for request in step["finished_request_records"]:
                bar.update()
                if on_finish is not None:
                    on_finish(request)
    seconds = time.perf_counter() - started
    return Decoded(engine.depth, [future.result() for future in futures], engine.counters, seconds)
