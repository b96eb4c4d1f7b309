"""A collector that is silent, refuses or fails costs spans, and holds up neither requests nor a
stop."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megatron_async.serving.http.http_server import connected
from megatron_async.serving.tracing.export import ServerTracerProvider
from tests.support.patience import PATIENCE_SECONDS

SOON = 0.05


class Collector(SpanExporter):
    """Exports by a function."""

    def __init__(self, take: Callable[[], SpanExportResult]) -> None:
        self.take = take
        self.begun = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        return self.take()

    def shutdown(self) -> None:
        raise ConnectionError("it has gone")


@pytest.fixture
def silent() -> Iterator[Collector]:
    """Does not answer before the test is over."""
    over = threading.Event()

    def wait() -> SpanExportResult:
        over.wait()
        return SpanExportResult.FAILURE

    yield Collector(wait)
    over.set()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged; the level of OpenTelemetry's loggers comes back."""
    theirs = logging.getLogger("opentelemetry")
    before = theirs.level
    yield caplog
    theirs.setLevel(before)


def provider_of(*exporters: SpanExporter, spans: int = 1) -> ServerTracerProvider:
    provider = ServerTracerProvider(exporters)
    tracer = provider.get_tracer("test")
    for _ in range(spans):
        tracer.start_span("request").end()
    return provider


def test_a_stop_does_not_wait_for_a_collector_that_is_silent(
    silent: Collector, log: pytest.LogCaptureFixture
) -> None:
    asyncio.run(provider_of(silent).finish(SOON))
    assert log.messages == [
        "the last spans are lost: the collector has not taken them for 0.05 seconds"
    ]


def refuses() -> SpanExportResult:
    logging.getLogger("opentelemetry.exporter").error("refused")
    return SpanExportResult.FAILURE


def fails() -> SpanExportResult:
    raise ConnectionResetError("there is nobody")


@pytest.mark.parametrize("take", [refuses, fails])
def test_a_collector_that_takes_nothing_is_one_line_at_a_stop(
    take: Callable[[], SpanExportResult], log: pytest.LogCaptureFixture
) -> None:
    asyncio.run(provider_of(Collector(take), spans=3).finish(PATIENCE_SECONDS))
    (record,) = log.records
    assert record.getMessage().startswith("3 of the last spans are lost")
    assert record.exc_info is None


def test_the_last_spans_are_exported_also_beside_a_silent_collector(
    silent: Collector, log: pytest.LogCaptureFixture
) -> None:
    good = InMemorySpanExporter()
    asyncio.run(provider_of(good, spans=4).finish(PATIENCE_SECONDS))
    assert len(good.get_finished_spans()) == 4 and not log.records
    taken = threading.Event()

    def take() -> SpanExportResult:
        taken.set()
        return SpanExportResult.SUCCESS

    asyncio.run(provider_of(silent, Collector(take)).finish(SOON))
    assert taken.wait(PATIENCE_SECONDS)


def test_spans_end_while_the_collector_is_silent(silent: Collector) -> None:
    provider = provider_of(silent, spans=600)  # a batch
    assert silent.begun.wait(PATIENCE_SECONDS)
    for _ in range(5_000):  # more than the queue holds
        provider.get_tracer("test").start_span("request").end()


def test_a_failure_in_service_has_no_traceback(log: pytest.LogCaptureFixture) -> None:
    provider = provider_of(Collector(fails), spans=2)
    provider.force_flush()
    (record,) = log.records
    assert record.getMessage() == "2 spans are lost: ConnectionResetError: there is nobody"
    assert record.exc_info is None


class NoConnection:
    async def connect(self) -> None: ...

    async def aclose(self) -> None: ...

    async def ready(self) -> object: ...

    def give_up(self, reason: str) -> None: ...


def test_a_server_exports_its_last_spans() -> None:
    good = InMemorySpanExporter()
    provider = provider_of(good)

    async def serve() -> None:
        lifespan = connected(NoConnection(), waits=False, tracer_provider=provider)
        async with lifespan(FastAPI()):
            assert not good.get_finished_spans()

    asyncio.run(serve())
    assert len(good.get_finished_spans()) == 1


def test_a_process_does_not_wait_at_its_exit() -> None:
    code = (
        "import asyncio, threading\n"
        "from opentelemetry.sdk.trace.export import SpanExporter\n"
        "from megatron_async.serving.tracing.export import ServerTracerProvider\n"
        "class Silent(SpanExporter):\n"
        "    def export(self, spans):\n"
        "        threading.Event().wait()\n"
        "provider = ServerTracerProvider([Silent()])\n"
        "provider.get_tracer('test').start_span('request').end()\n"
        f"asyncio.run(provider.finish({SOON}))\n"
    )
    options: Any = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
    ended = subprocess.run([sys.executable, "-c", code], **options)
    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith("the last spans are lost")
