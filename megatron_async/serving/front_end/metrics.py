"""What Prometheus is told: the engine's counters, and what the front ends have measured.

Names follow vLLM's where it has the same value, with ``megatron_async_`` before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from megatron_async.processes import standard_error
from megatron_async.serving.messages import Snapshot

PREFIX = "megatron_async"

COUNTERS = {
    "steps_launched": ("steps_launched", "Steps launched"),
    "steps_committed": ("steps_committed", "Steps whose tokens the host has taken"),
    "steps_overlapped": ("steps_overlapped", "Steps taken while a later one was in flight"),
    "steps_with_prefill": ("steps_with_prefill", "Steps with prefill chunks"),
    "tokens_committed": ("generation_tokens", "Tokens generated"),
    "tokens_drafted": ("draft_tokens", "Draft tokens that were verified"),
    "tokens_accepted": ("accepted_draft_tokens", "Draft tokens that were accepted"),
    "tokens_discarded": ("discarded_tokens", "Tokens sampled for requests that had ended"),
    "tokens_cached": ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache"),
    "tokens_replayed": ("replayed_tokens", "Tokens computed again after evictions"),
    "stalls": ("stalls", "Times that a request waited for a KV block"),
    "evictions": ("evictions", "Requests whose blocks were given to others"),
    "states_restored": ("recurrent_states_restored", "Admissions that began from a snapshot"),
    "state_snapshots_taken": (
        "recurrent_state_snapshots_taken",
        "Snapshots of recurrent state that were taken",
    ),
    "prefill_chunks": ("prefill_chunks", "Prefill chunks launched"),
    "barriers": ("barriers", "Steps that all in flight was taken for"),
}
"""Fields of ``EngineCounters``: what each is called here, and what it is."""

BY_REASON = {
    "not_overlapped": (
        "steps_not_overlapped",
        "Steps during which no later one was in flight, by reason",
    ),
    "guided_rows": (
        "guided_rows",
        "Sampled rows of requests that a grammar or a function guides, by what they had",
    ),
    "host_masks": (
        "guided_rows_of_the_host",
        "Sampled rows of requests whose grammar the host followed, by why no automaton did",
    ),
}
BY_POSITION = {
    "drafted_by_position": (
        "draft_tokens_per_pos", "Draft tokens that were verified, by their place in the window"
    ),
    "accepted_by_position": (
        "accepted_draft_tokens_per_pos",
        "Draft tokens that were accepted, by their place in the window",
    ),
}  # fmt: skip
BY_VERSION = {
    "drafted": (
        "draft_tokens_per_pos_and_version",
        "Draft tokens that the last weights have verified, by their place in the window",
    ),
    "accepted": (
        "accepted_draft_tokens_per_pos_and_version",
        "Draft tokens that the last weights have accepted, by their place in the window",
    ),
}
"""Fields of ``drafts_by_version`` of ``EngineCounters.to_dict``."""

SECONDS = {
    "step_ns": ("step_seconds", "Seconds in steps"),
    "wait_ns": ("device_wait_seconds", "Seconds of them blocked on the device"),
}

GAUGES = {
    "requests_running": ("num_requests_running", "Sequences that have been admitted"),
    "requests_waiting": ("num_requests_waiting", "Sequences that wait for a row or for blocks"),
    "requests_stalled": ("num_requests_stalled", "Admitted sequences that wait for a block"),
    "blocks_free": ("kv_blocks_free", "Free KV-cache blocks, those of cached prefixes included"),
    "blocks_total": ("kv_blocks_total", "KV-cache blocks"),
    "state_bytes": ("recurrent_state_bytes", "Bytes of the recurrent state of all slots"),
    "state_snapshots": ("recurrent_state_snapshots", "Snapshots of recurrent state that are kept"),
    "state_snapshots_most": (
        "recurrent_state_snapshots_most",
        "Snapshots of recurrent state that there is room for",
    ),
    "steps_in_flight": ("steps_in_flight", "Steps whose tokens the host has not taken"),
    "suspended": ("suspended", "1 while nothing is launched"),
    "engine_stalled": (
        "engine_stalled",
        "1 while requests have waited for long without a step, and for nothing that is known",
    ),
    "weight_version": ("weight_version", "Weight updates since the start"),
}

FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5,
    10,
    30,
)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKEN_COUNTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class EngineValues(Protocol):
    """A collector of prometheus_client."""

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks for no snapshot."""

    def collect(self) -> Iterator[Metric]:
        """All values now."""


class ServerMetrics:
    """The metrics of one front end, in a registry of its own.

    Args:
        model_name: a label of all of them.
        engine: reads what the engine, or several, have counted.
        directory: where front ends in several processes count together; None for one. It is
            ``PROMETHEUS_MULTIPROC_DIR`` too.
    """

    def __init__(
        self, model_name: str, engine: EngineValues, *, directory: Path | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self._shown = self.registry
        if directory is not None:
            self._shown = CollectorRegistry()  # has the sums in place of this process's own
            MultiProcessCollector(self._shown, directory)
        self._label = {"model_name": model_name}
        self._shown.register(engine)

        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN_SECONDS
        )
        self._token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence", TOKEN_SECONDS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to admission", FIRST_TOKEN_SECONDS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", REQUEST_SECONDS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_COUNTS)
        self._generated = self._histogram(
            "request_generation_tokens", "Tokens generated of a sequence", TOKEN_COUNTS
        )
        self._finished = self._counter(
            "request_success", "Sequences that have ended, by reason", "finished_reason"
        )
        self._refused = self._counter(
            "requests_refused", "Requests that were not served, by HTTP status", "status"
        )
        self._lost_lines = Counter(
            f"{PREFIX}_log_lines_lost",
            "Lines of the front ends' logs that nobody read in time",
            ["model_name"],
            registry=self.registry,
        ).labels(**self._label)
        self._known_lost = 0
        self._open = Gauge(
            f"{PREFIX}_http_requests_open",
            "Requests of clients in progress",
            ["model_name"],
            registry=self.registry,
            multiprocess_mode="livesum",
        ).labels(**self._label)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        self._count_lost_lines()
        return generate_latest(self._shown)

    def opened(self) -> None:
        """A client's request has begun."""
        self._open.inc()

    def closed(self) -> None:
        """Note that it is over, in whatever way."""
        self._open.dec()
        self._count_lost_lines()  # another front end may be asked

    def refused(self, status: int) -> None:
        """A client's request got an error."""
        self._refused.labels(status=str(status), **self._label).inc()

    def first_token(self, seconds: float) -> None:
        """The first token of a request came ``seconds`` after the request."""
        self._first_token.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` further tokens of a sequence came ``seconds`` after those before."""
        for _ in range(count):
            self._token.observe(seconds / count)

    def finished(self, reason: str, usage: dict[str, int | float] | None, seconds: float) -> None:
        """A sequence has ended, ``seconds`` after its request came.

        Args:
            usage: of its last :class:`~megatron_async.serving.messages.Output`.
        """
        self._finished.labels(finished_reason=reason, **self._label).inc()
        self._latency.observe(seconds)
        if usage is not None:
            self._queue.observe(usage["queue_time"])
            self._prompt.observe(usage["prompt_tokens"])
            self._generated.observe(usage["generated_tokens"])

    def _count_lost_lines(self) -> None:
        lost = standard_error.lost_lines()
        if lost > self._known_lost:
            self._lost_lines.inc(lost - self._known_lost)
            self._known_lost = lost

    def _histogram(self, name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
        full = f"{PREFIX}_{name}"
        made = Histogram(full, said, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(**self._label)

    def _counter(self, name: str, said: str, by: str) -> Counter:
        full = f"{PREFIX}_{name}"
        return Counter(full, said, ["model_name", by], registry=self.registry)


class EngineCollector:
    """Reads the engine's last snapshot when somebody asks. Its counters begin anew with each
    process, as Prometheus expects of a restart.

    Args:
        model_name: a label of all values.
        snapshot: the engine's last snapshot; None before the first.
        is_ready: the engine serves.
    """

    def __init__(
        self,
        model_name: str,
        snapshot: Callable[[], Snapshot | None],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model_name = model_name
        self._snapshot = snapshot
        self._is_ready = is_ready

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks for no snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All values of the snapshot."""
        yield self._gauge("engine_ready", "1 while the engine serves", int(self._is_ready()))
        snapshot = self._snapshot()
        if snapshot is None:
            return
        counters, gauges = snapshot.counters, snapshot.gauges
        for name, (shown, said) in COUNTERS.items():
            yield self._counter(shown, said, counters.get(name, 0))
        for name, (shown, said) in SECONDS.items():
            yield self._counter(shown, said, counters.get(name, 0) * 1e-9)
        for name, (shown, said) in BY_REASON.items():
            yield self._by_reason(shown, said, counters.get(name, {}))
        for name, (shown, said) in BY_POSITION.items():
            yield self._by_position(shown, said, counters.get(name, ()))
        of_versions = counters.get("drafts_by_version", {})
        for name, (shown, said) in BY_VERSION.items():
            yield self._by_version(shown, said, {v: of[name] for v, of in of_versions.items()})
        for name, (shown, said) in GAUGES.items():
            yield self._gauge(shown, said, gauges.get(name, 0))
        said = "Times that the engine took no step though requests waited for one"
        yield self._counter("engine_stalls", said, gauges.get("engine_stalls", 0))
        said = "Lines of the engine process's log that nobody read in time"
        yield self._counter("engine_log_lines_lost", said, gauges.get("log_lines_lost", 0))
        total = gauges.get("blocks_total", 0)
        used = 1 - gauges.get("blocks_free", 0) / total if total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of KV-cache blocks in use", used)

    def _by_reason(self, name: str, said: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}_{name}", said, labels=["model_name", "reason"])
        for reason, count in counts.items():
            family.add_metric([self._model_name, reason], count)
        return family

    def _by_position(self, name: str, said: str, counts: Sequence[int]) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}_{name}", said, labels=["model_name", "position"])
        for place, count in enumerate(counts):
            family.add_metric([self._model_name, str(place)], count)
        return family

    def _by_version(self, name: str, said: str, counts: Mapping[str, Sequence[int]]) -> Metric:
        labels = ["model_name", "weight_version", "position"]
        family = CounterMetricFamily(f"{PREFIX}_{name}", said, labels=labels)
        for version, by_position in counts.items():
            for place, count in enumerate(by_position):
                family.add_metric([self._model_name, version, str(place)], count)
        return family

    def _counter(self, name: str, said: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}_{name}", said, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauge(self, name: str, said: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}_{name}", said, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
