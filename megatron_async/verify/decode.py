"""Decodes a fixed list of requests, for ``verify`` and ``demo``, and says what differs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_async.cli.output.writers import BarWriter, Writer, write_all
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.engine.metrics import EngineCounters


class Work(NamedTuple):
    """One request to decode."""

    prompt: str | list[int]
    params: SamplingParams

    def changed(self, **fields: Any) -> Work:
        """The same with other sampling parameters."""
        return self._replace(params=replace(self.params, **fields))


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came of a list of :class:`Work`, in its order; ``seconds`` of wall clock."""

    depth: int
    requests: list[DynamicInferenceRequest]
    counters: EngineCounters
    seconds: float

    def differences(self, reference: Decoded) -> list[str]:
        """A line for each request whose tokens or finish reason are not those of ``reference``."""
        origin = f"with depth {reference.depth}"
        pairs = zip(self.requests, reference.requests, strict=True)
        lines = [difference(Outcome.of(mine), Outcome.of(other), origin) for mine, other in pairs]
        return [f"depth {self.depth}, request {n}: {line}" for n, line in enumerate(lines) if line]


class Outcome(NamedTuple):
    """What a request generated, and how it ended."""

    tokens: list[int]
    reason: FinishReason | None

    @classmethod
    def of(cls, request: DynamicInferenceRequest) -> Outcome:
        """What came of ``request`` so far."""
        return cls(request.generated_tokens, request.finish_reason)


def difference(mine: Outcome, other: Outcome, origin: str) -> str | None:
    """Where ``mine`` is not ``other``, which came about ``origin``; None when they are equal."""
    ours, theirs = mine.tokens, other.tokens
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        return f"from token {at} on {ours[at : at + 4]}, {origin} {theirs[at : at + 4]}"
    if mine.reason is not other.reason:
        names = ["nothing" if end is None else end.value for end in (mine.reason, other.reason)]
        return f"ended by {names[0]}, {origin} by {names[1]}"
    return None


@dataclass(frozen=True, slots=True)
class DepthReport:
    """What ``verify`` found at one depth: differences from serial decoding, a line each; how often
    each witness was seen, and a line for each that should have been."""

    depth: int
    differences: list[str]
    witnesses: dict[str, int]
    missing: list[str]
    counters: EngineCounters
    seconds: float

    @property
    def ok(self) -> bool:
        """All is equal and every witness was seen."""
        return not self.differences and not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        values = {**asdict(self), "counters": self.counters.to_dict()}
        return {"depth": self.depth, "equal": not self.differences, **values}


@dataclass(frozen=True, slots=True)
class Report:
    """What ``verify`` found of one workload or scenario."""

    name: str
    description: str
    requests: int
    depths: list[DepthReport]
    advice: str = ""
    """What to do about tokens that differ."""

    @property
    def ok(self) -> bool:
        """All is equal and every witness was seen, at every depth."""
        return all(depth.ok for depth in self.depths)

    @property
    def failures(self) -> list[str]:
        """Lines about what is not as it should be."""
        differences = [line for depth in self.depths for line in depth.differences]
        missing = [f"depth {d.depth}: {line}" for d in self.depths for line in d.missing]
        return differences + missing + ([self.advice] if differences and self.advice else [])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        head = {name: getattr(self, name) for name in ("name", "description", "requests", "ok")}
        return {**head, "depths": [depth.to_dict() for depth in self.depths]}


def decode(
    engine: DynamicInferenceEngine, works: Sequence[Work], writer: Writer | None = None
) -> Decoded:
    """Decode all of ``works`` together, as requests 0, 1, ...

    Args:
        writer: takes what is committed; None shows a bar on a terminal.
    """
    engine.reset()
    started = time.perf_counter()
    futures = [engine.add_request(n, work.prompt, work.params) for n, work in enumerate(works)]
    write_all(engine, BarWriter(len(works)) if writer is None else writer, futures)
    seconds = time.perf_counter() - started
    return Decoded(engine.depth, [future.result() for future in futures], engine.counters, seconds)
