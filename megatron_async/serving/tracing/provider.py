"""What makes the spans of a server, as its options and the ``OTEL_*`` variables say."""

from __future__ import annotations

import importlib
import logging
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from megatron_async.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from megatron_async.serving.tracing.export import ServerTracerProvider

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"


def make_provider(endpoint: str | None = None) -> ServerTracerProvider | None:
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
        export = importlib.import_module("megatron_async.serving.tracing.export")
        made: ServerTracerProvider = export.ServerTracerProvider(exporters)
        return made
    except ImportError as error:
        said = f"traces need the packages of the extra 'tracing': {error}"
        if endpoint is not None:
            raise ConfigError(f"otlp_traces_endpoint: {said}") from None
        logger.warning("%s; there are no traces", said)
        return None


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
