"""What Prometheus is told."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_async.engine.metrics import EngineCounters
from megatron_async.processes import standard_error
from megatron_async.serving.front_end.metrics import (
    BY_POSITION,
    COUNTERS,
    SECONDS,
    EngineCollector,
    ServerMetrics,
)
from megatron_async.serving.messages import Snapshot

USAGE = {"prompt_tokens": 7, "cached_tokens": 0, "generated_tokens": 5, "queue_time": 0.25}


def values_of(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """Each sample by its name and its other label's value."""
    samples = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for name, labels, value, *_ in family.samples:
            assert labels.pop("model_name") == "tiny"
            samples[name.removeprefix("megatron_async_"), ",".join(labels.values())] = value
    return samples


def test_the_engines_counters_and_gauges_are_those_of_the_last_snapshot() -> None:
    counters = EngineCounters()
    counters.tokens_committed, counters.step_ns = 41, 2_500_000_000
    counters.not_overlapped["serial: depth 0"] = 3
    counters.guided_rows["the mask of one token"] = 5
    counters.host_masks["the pool was full"] = 4
    counters.verified([(1, 2, 3), (1,), (), (4, 5)], [3] * 4)
    counters.weights_changed(1)
    counters.verified([(1, 2)], [2])
    gauges = {"requests_running": 2, "requests_waiting": 1, "blocks_free": 25, "blocks_total": 100}
    snapshots = [None, Snapshot(0.0, counters.to_dict(first_version=7), gauges)]
    metrics = ServerMetrics("tiny", EngineCollector("tiny", lambda: snapshots[-1], lambda: False))
    values = values_of(metrics)
    assert values["generation_tokens_total", ""] == 41
    assert values["step_seconds_total", ""] == 2.5
    assert values["steps_not_overlapped_total", "serial: depth 0"] == 3
    assert values["guided_rows_total", "the mask of one token"] == 5
    assert values["guided_rows_of_the_host_total", "the pool was full"] == 4
    drafts = [values[f"{name}_per_pos_total", place]
              for name in ("draft_tokens", "accepted_draft_tokens") for place in "01"]  # fmt: skip
    assert drafts == [4, 3, 3, 1]
    by_version = [values[f"{name}_per_pos_and_version_total", label]
                  for name in ("draft_tokens", "accepted_draft_tokens")
                  for label in ("0,7", "1,7", "0,8")]  # fmt: skip
    assert by_version == [3, 3, 1, 2, 1, 1]
    assert values["num_requests_running", ""] == 2
    assert values["kv_cache_usage_perc", ""] == 0.75
    assert values["engine_ready", ""] == 0
    snapshots.append(None)
    assert ("generation_tokens_total", "") not in values_of(metrics)


def test_every_counter_that_is_shown_exists() -> None:
    fields = {field.name for field in dataclasses.fields(EngineCounters)}
    assert fields >= set(COUNTERS) | set(SECONDS) | set(BY_POSITION)


def test_lost_lines_of_the_log_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [0]
    monkeypatch.setattr(standard_error, "lost_lines", lambda: lost[0])
    snapshot = Snapshot(0.0, {}, {"log_lines_lost": 3})
    metrics = ServerMetrics("tiny", EngineCollector("tiny", lambda: snapshot))
    assert values_of(metrics)["log_lines_lost_total", ""] == 0
    lost[0] = 5
    values = values_of(metrics)
    assert values["log_lines_lost_total", ""] == 5
    assert values["engine_log_lines_lost_total", ""] == 3
    lost[0] = 7
    metrics.closed()  # what another front end shows of this one
    sample = metrics.registry.get_sample_value
    assert sample("megatron_async_log_lines_lost_total", {"model_name": "tiny"}) == 7


def test_a_front_ends_own_timings_are_histograms() -> None:
    metrics = ServerMetrics("tiny", EngineCollector("tiny", lambda: None))
    metrics.opened()
    metrics.opened()
    metrics.closed()
    metrics.refused(429)
    metrics.first_token(0.03)
    metrics.tokens(4, 0.02)
    metrics.finished("stop", dict(USAGE), 1.5)
    metrics.finished("timeout", None, 9.0)
    values = values_of(metrics)
    assert values["http_requests_open", ""] == 1
    assert values["requests_refused_total", "429"] == 1
    assert values["time_to_first_token_seconds_bucket", "0.04"] == 1
    assert values["time_to_first_token_seconds_bucket", "0.02"] == 0
    assert values["inter_token_latency_seconds_count", ""] == 4
    assert abs(values["inter_token_latency_seconds_sum", ""] - 0.02) < 1e-9
    assert values["request_queue_time_seconds_sum", ""] == 0.25
    assert values["request_prompt_tokens_sum", ""] == 7
    assert values["request_generation_tokens_sum", ""] == 5
    assert (
        values["request_success_total", "stop"] == values["request_success_total", "timeout"] == 1
    )
    assert values["e2e_request_latency_seconds_sum", ""] == 10.5
