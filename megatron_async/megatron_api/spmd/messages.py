"""What a call of rank 0's user brought, as the other ranks get it: data alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import msgspec

from megatron_async.codec import Codec
from megatron_async.engine.metrics import EngineCounters
from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.megatron_api.context import Usage
from megatron_async.request.request import StepReport
from megatron_async.runner.memory.cache_sizes import CacheSizes


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Step(_Data, frozen=True):
    """What ``step_modern`` returns. ``finished`` are places in ``Brought.records``."""

    active: list[int]
    finished: list[int]
    tokens: list[TokenOutput]
    reports: list[StepReport]
    seconds: float
    graph_rows: int | None


class Totals(_Data, frozen=True):
    """``counters`` and ``usage`` of rank 0's engine, at a call that is no step, or when all
    requests have ended."""

    counters: dict[str, Any]
    usage: Usage

    @classmethod
    def of(cls, counters: EngineCounters, usage: Usage) -> Totals:
        """The totals of an engine, now."""
        plain = {f.name: getattr(counters, f.name) for f in dataclasses.fields(counters)}
        plain = {name: dict(v) if isinstance(v, Counter) else v for name, v in plain.items()}
        return cls(counters=plain, usage=usage)

    def as_counters(self) -> EngineCounters:
        """The inverse."""
        values: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value
            for name, value in self.counters.items()
        }
        return EngineCounters(**values)


class Standing(_Data, frozen=True):
    """How rank 0's engine stands. ``active``: its requests that have not ended."""

    active: list[int]
    suspended: bool
    sleeping: bool
    weight_version: int
    steps: int
    evictions: int
    in_flight: int
    totals: Totals | None = None

    @classmethod
    def before_it_is_built(cls) -> Standing:
        """The standing of an engine that is not there yet."""
        return cls(
            active=[], suspended=False, sleeping=False, weight_version=0, steps=0, evictions=0,
            in_flight=0,
        )  # fmt: skip


class Brought(_Data, frozen=True):
    """Outcome of a call.

    Args:
        value: what it returned, where that is plain data.
        error: its error's class and message, if it raised one.
        key: the request that it is about.
        records: requests, as ``DynamicInferenceRequest.serialize`` writes them.
        opened: places in ``records`` of active requests that were not told of before.
        returned: places in ``records`` of the requests that it returned.
        done: requests that were added and have ended, and their places in ``records``.
        failed: requests that were added and got an error: its class and message.
    """

    standing: Standing
    value: bool | int | str | None = None
    error: tuple[str, str] | None = None
    key: int | None = None
    records: list[dict[str, Any]] = []
    opened: list[int] = []
    returned: list[int] = []
    done: list[tuple[int, int]] = []
    failed: list[tuple[int, str, str]] = []
    step: Step | None = None


BROUGHT: Codec[Brought] = Codec(Brought)
SIZES: Codec[CacheSizes] = Codec(CacheSizes)

BUILD = "DynamicInferenceEngine"
"""The constructor, among the names of calls."""
CLOSE = "close"
NEWS = "news"
"""Requests have ended in the engine's own thread."""
LISTEN = "start_listening_to_data_parallel_coordinator"
SIGNAL = "signal"
"""A coordinator's client has changed the engine's state."""
ONE_ENGINE = (
    "an engine over a model that is divided has one configuration: build another controller and "
    "another engine over the model, on all ranks"
)
OF_ONE_REQUEST = frozenset(
    {
        "abort_request",
        "add_request",
        "evict_request",
        "has_unfinished_requests",
        "pause_request",
        "resume_request",
        "update_sampling_params",
    }
)
"""Calls that rank 0 may make alone, and those that it makes with the others count once. All but
one are about a request."""
UNCALLED = frozenset({NEWS, SIGNAL})
"""What rank 0 tells besides: no call of another rank's."""
