"""Spans of requests, as an exporter gets them, and their ids in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from megatron_async.errors import ConfigError, EngineDeadError
from megatron_async.serving.http.app import OPEN_PATHS
from megatron_async.serving.http.logs import JsonFormatter
from megatron_async.serving.messages import Generate, Output
from megatron_async.serving.tracing import provider as providers
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import Served, served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "abc xyz"
ASKED: Any = {"prompt": SECRET, "max_tokens": 5, "seed": 1, "ignore_eos": True, "temperature": 0.5}


class Traces:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def one(self, server: Served) -> ReadableSpan:
        """The only span since the last call, as soon as it is there."""
        server.until(lambda: bool(self.exporter.get_finished_spans()))
        (span,) = self.exporter.get_finished_spans()
        self.exporter.clear()
        return span


@pytest.fixture
def traces(shared: tuple[Traces, Served]) -> Traces:
    shared[0].exporter.clear()
    return shared[0]


@pytest.fixture
def server(shared: tuple[Traces, Served]) -> Served:
    return shared[1]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Traces, Served]]:
    traces = Traces()
    engine = hash_engine(1, tokenizer=hash_tokenizer(), max_requests=4)
    with served(engine, tracer_provider=traces.provider) as running:
        yield traces, running


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as opened:
        yield opened


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_one_span_below_its_callers(
    traces: Traces, server: Served, client: httpx.Client
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answer = client.post("/v1/completions", json={**ASKED, "n": 2, "top_p": 0.9}, headers=headers)
    span = traces.one(server)
    assert span.name == "POST /v1/completions" and span.kind == SpanKind.SERVER
    assert span.parent is not None and span.context is not None
    assert format_trace_id(span.context.trace_id) == TRACE
    assert format_span_id(span.parent.span_id) == PARENT
    assert span.status.status_code == StatusCode.UNSET
    found = attributes_of(span)
    seconds = found.pop("gen_ai.latency.time_to_first_token")
    assert 0 < seconds < (span.end_time - span.start_time) / 1e9  # type: ignore[operator]
    assert {name: value for name, value in found.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "megatron_async",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.latency.time_in_queue": 0.0,
    }
    assert found["http.response.status_code"] == 200
    assert SECRET not in json.dumps(found, default=str) and not span.events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/responses", {"input": SECRET}),
    ],
)
def test_a_streams_span_knows_its_end(
    path: str, body: dict[str, Any], traces: Traces, server: Served, client: httpx.Client
) -> None:
    most = "max_output_tokens" if "input" in body else "max_tokens"
    asked = {**body, most: 40, "ignore_eos": True, "stream": True, "model": "small"}
    with client.stream("POST", path, json=asked) as answer:
        answer.read()
    span = traces.one(server)
    found = attributes_of(span)
    assert span.parent is None and span.name == f"POST {path}"
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "small"
    assert found["gen_ai.usage.output_tokens"] == 40
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert SECRET not in json.dumps(found, default=str) and not span.events


def test_the_log_line_has_the_spans_ids_and_its_numbers(
    traces: Traces, server: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "megatron_async.serving"):
        client.post("/v1/completions", json=ASKED)
        context = traces.one(server).context
        server.until(lambda: bool(caplog.records))
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert context is not None
    assert line["trace_id"] == format_trace_id(context.trace_id)
    assert line["span_id"] == format_span_id(context.span_id)
    assert line["model"] == "tiny" and line["finish_reasons"] == ["length"]
    assert line["first_token_seconds"] > 0 and line["queue_seconds"] == 0
    assert SECRET not in json.dumps(line)


def test_a_wrong_request_is_no_error_of_the_servers(
    traces: Traces, server: Served, client: httpx.Client
) -> None:
    assert client.post("/v1/completions", json={"prompt": "a", "n": -1}).status_code == 400
    span = traces.one(server)
    assert span.status.status_code == StatusCode.UNSET
    assert attributes_of(span)["http.response.status_code"] == 400


def test_an_engine_that_is_away_is_an_error(
    traces: Traces, server: Served, client: httpx.Client
) -> None:
    server.client.state = "dead"
    try:
        assert client.post("/v1/completions", json=ASKED).status_code == 503
    finally:
        server.client.state = "ready"
    span = traces.one(server)
    assert span.status.status_code == StatusCode.ERROR
    assert attributes_of(span)["http.response.status_code"] == 503


@pytest.mark.parametrize("error", [EngineDeadError("gone"), ZeroDivisionError()])
def test_an_error_in_a_stream_is_one_in_span_and_log(
    error: Exception,
    traces: Traces,
    server: Served,
    client: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def event(_: Any) -> bytes:
        raise error

    # Events with text alone are made from parts; the last one, with the reason, is not.
    monkeypatch.setattr("megatron_async.serving.endpoints.completions.event", event)
    with caplog.at_level(logging.INFO, "megatron_async.serving"):
        answer = client.post("/v1/completions", json={**ASKED, "stream": True})
        span = traces.one(server)
        server.until(lambda: bool(caplog.records) and caplog.messages[-1] == "request")
    assert '"error"' in answer.text and answer.status_code == 200
    assert span.status.status_code == StatusCode.ERROR
    kind = type(error).__name__
    assert attributes_of(span)["error.type"] == kind
    *earlier, line = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert line["error"] == kind
    unexpected = kind == "ZeroDivisionError"
    assert ["traceback" in each for each in earlier] == [True] * unexpected


def test_a_client_that_leaves_ends_its_span(
    traces: Traces, server: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = server.client.generate

    async def first_alone(request: Generate) -> AsyncGenerator[Output, None]:
        async with contextlib.aclosing(generate(request)) as outputs:
            yield await anext(outputs)
            await asyncio.Event().wait()

    monkeypatch.setattr(server.client, "generate", first_alone)
    asked = {**ASKED, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    span = traces.one(server)
    assert span.status.status_code == StatusCode.ERROR
    assert attributes_of(span)["gen_ai.usage.output_tokens"] == 1


def test_probes_are_not_traced(traces: Traces, client: httpx.Client) -> None:
    for path in OPEN_PATHS:
        client.get(path)
    assert not traces.exporter.get_finished_spans()


def test_without_a_provider_nothing_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    engine = hash_engine(1, tokenizer=hash_tokenizer())
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with (
        caplog.at_level(logging.INFO, "megatron_async.serving"),
        served(engine) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
    ):
        client.post("/v1/completions", json=ASKED, headers=headers)
        server.until(lambda: bool(caplog.records))
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert "trace_id" not in line and line["finish_reasons"] == ["length"]


# --- the provider ---------------------------------------------------------------------------------


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the ``OTEL_*`` variables is set."""
    where = (*providers.ENDPOINT_VARIABLES, *providers.PROTOCOL_VARIABLES)
    others = (providers.EXPORTER_VARIABLE, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
    for name in (*where, *others):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("exporter", ["", "none"])
def test_nobody_asks_for_traces(exporter: str, variables: pytest.MonkeyPatch) -> None:
    variables.setenv(providers.EXPORTER_VARIABLE, exporter)
    assert providers.make_provider() is None
    variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert exporter == "" or providers.make_provider() is None


@pytest.mark.parametrize("name", [None, "mine"])
def test_the_variables_choose_exporter_and_name(
    name: str | None, variables: pytest.MonkeyPatch
) -> None:
    variables.setenv(providers.EXPORTER_VARIABLE, "console")
    if name is not None:
        variables.setenv("OTEL_SERVICE_NAME", name)
    provider = providers.make_provider()
    assert provider is not None
    provider.shutdown()
    assert provider.resource.attributes["service.name"] == name or "megatron-async"


@pytest.mark.parametrize(
    ("protocol", "exporter"),
    [(None, "otlp_proto_http"), ("http/protobuf", "otlp_proto_http"), ("grpc", "otlp_proto_grpc")],
)
def test_the_endpoint_goes_to_the_protocols_exporter(
    protocol: str | None, exporter: str, variables: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Any]] = []

    class EntryPoint:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            def make(**options: Any) -> InMemorySpanExporter:
                made.append((self.name, options))
                return InMemorySpanExporter()

            return make

    variables.setattr(providers, "entry_points", lambda group, name: [EntryPoint(name)])
    if protocol is not None:
        variables.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for endpoint in ("http://there/v1/traces", None):
        provider = providers.make_provider(endpoint)
        assert provider is not None
        provider.shutdown()
    assert made == [(exporter, {"endpoint": "http://there/v1/traces"}), (exporter, {})]


def test_a_missing_package_is_an_error_for_the_option_alone(
    variables: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variables.setattr(providers, "entry_points", lambda group, name: ())
    with pytest.raises(ConfigError, match="extra 'tracing'"):
        providers.make_provider("http://there")
    variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there")
    assert providers.make_provider() is None
    assert "extra 'tracing'" in caplog.text
