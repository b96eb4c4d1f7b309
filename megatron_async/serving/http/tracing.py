"""Traces by OpenTelemetry.

FastAPI makes a span of each request: its parent from ``traceparent``, HTTP's attributes, its end
with the last byte. This module makes the provider, and adds what a model server knows: attributes
of the semantic conventions for generative AI, and vLLM's for latencies. No texts.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigError
from megatron_async.version import __version__

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from megatron_async.serving.front_end.job import Job

try:
    from opentelemetry import trace
except ImportError:  # FastAPI before 0.150 does not bring it
    trace = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"

PROVIDER_NAME = "megatron_async"
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/api": "text_completion",
}
"""``gen_ai.operation.name`` of each path."""
ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
}
"""What fields of a request's log line are called in its span."""


# --- setting up -----------------------------------------------------------------------------------


def make_provider(endpoint: str | None = None) -> TracerProvider | None:
    """What makes spans and exports them as the ``OTEL_*`` variables say; None where neither they
    nor ``endpoint`` ask for traces.

    Args:
        endpoint: the URL of an OTLP collector, instead of the variables'.

    Raises:
        ConfigError: ``endpoint`` is given and a package is missing. Without it this is a warning.
    """
    names = _exporter_names(endpoint)
    if not names:
        return None
    try:
        exporters = [_exporter(name, endpoint) for name in names]
        return _provider(exporters)
    except ImportError as error:
        said = f"traces need the packages of the extra 'tracing': {error}"
        if endpoint is not None:
            raise ConfigError(f"otlp_traces_endpoint: {said}") from None
        logger.warning("%s; there are no traces", said)
        return None


def telemetry(provider: TracerProvider | None, untraced_paths: Collection[str]) -> TelemetryConfig:
    """The argument ``telemetry`` of ``FastAPI``: one span for a request.

    Args:
        provider: None takes the global one, which ``opentelemetry-instrument`` sets.
    """
    return {
        "tracer_provider": provider,
        "operation_spans": False,
        "metrics": False,  # Prometheus has them
        "logs": False,
        "auto_configure": False,
        "exclude": lambda scope: scope["path"] in untraced_paths,
    }


def _exporter_names(endpoint: str | None) -> list[str]:
    """Entry points of the exporters."""
    default = "otlp" if any(map(os.environ.get, ENDPOINT_VARIABLES)) else "none"
    chosen = "otlp" if endpoint is not None else os.environ.get(EXPORTER_VARIABLE) or default
    names = [name.strip() for name in chosen.split(",")]
    protocol = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def _exporter(name: str, endpoint: str | None) -> SpanExporter:
    found = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise ImportError(f"no exporter {name!r} is installed")
    made: SpanExporter = found[0].load()(**({} if endpoint is None else {"endpoint": endpoint}))
    return made


def _provider(exporters: Sequence[SpanExporter]) -> TracerProvider:
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    resource = importlib.import_module("opentelemetry.sdk.resources").Resource
    of_server = resource.create({"service.version": __version__})
    if str(of_server.attributes["service.name"]).startswith("unknown_service"):
        of_server = of_server.merge(resource({"service.name": "megatron-async"}))
    provider: TracerProvider = sdk.TracerProvider(resource=of_server)
    for exporter in exporters:
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return provider


# --- the span of a request ------------------------------------------------------------------------


def current_span() -> Span | None:
    """FastAPI's of this request; None where it is not traced."""
    if trace is None:
        return None
    span = trace.get_current_span()
    return span if span.get_span_context().is_valid else None


def ids_of(span: Span | None) -> dict[str, str]:
    """The ids for the request's log lines."""
    if span is None:
        return {}
    context = span.get_span_context()
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def describe_request(path: str, model: str, jobs: Sequence[Job]) -> None:
    """Add what the client asked for."""
    span = current_span()
    if span is None or not span.is_recording():
        return
    params = jobs[0].params
    asked = {
        "gen_ai.operation.name": OPERATIONS.get(path),
        "gen_ai.provider.name": PROVIDER_NAME,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.num_tokens_to_generate,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p or None,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }
    span.set_attributes({name: value for name, value in asked.items() if value is not None})


def describe_end(span: Span | None, fields: Mapping[str, Any]) -> None:
    """Add what a request's log line says of it. Does nothing to a span that has ended.

    Args:
        fields: of the line; ``error`` of a stream that was cut short makes the span an error.
    """
    if span is None or not span.is_recording():
        return
    span.set_attributes(dict(_known(fields)))
    if "error" in fields:
        span.set_attribute("error.type", fields["error"])
        span.set_status(trace.StatusCode.ERROR)


def _known(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field, attribute in ATTRIBUTES.items():
        if fields.get(field) is not None:
            yield attribute, fields[field]
