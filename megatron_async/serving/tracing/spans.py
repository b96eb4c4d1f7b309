"""The span of a request.

FastAPI makes it: its parent from ``traceparent``, HTTP's attributes, its end with the last byte.
This module adds what a model server knows: attributes of the semantic conventions for generative
AI, and vLLM's for latencies. No texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from megatron_async.serving.front_end.job import Job

try:
    from opentelemetry import trace
except ImportError:  # FastAPI before 0.150 does not bring it
    trace = None  # type: ignore[assignment]

PROVIDER_NAME = "megatron_async"
OPERATIONS = {
    "/completions": "text_completion",
    "/v1/completions": "text_completion",
    "/chat/completions": "chat",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/api": "text_completion",
    "/generate": "text_completion",
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
