"""How spans leave: in batches, by threads, and at the end of a server within a few seconds. A
collector that does not answer costs spans, and holds up neither requests nor a stop.

Imports the SDK of OpenTelemetry, which not everybody has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from megatron_async.version import __version__

logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""For the last spans, when a server ends."""


class WatchedExporter(SpanExporter):
    """Exports by another exporter, raises nothing, and counts what is lost.

    Attributes:
        lost: spans that were not exported.
        is_ending: somebody else says so in the log.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.lost = 0
        self.is_ending = False
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See the base."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # of whatever library
            if not self.is_ending:
                logger.warning("%d spans are lost: %s: %s", len(spans), type(error).__name__, error)
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        """See the base."""
        with contextlib.suppress(Exception):  # what is lost has been counted
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See the base."""
        return self._exporter.force_flush(timeout_millis)


class ServerTracerProvider(TracerProvider):
    """Makes the spans of a server, which :meth:`finish` ends: no exit of the process waits."""

    def __init__(self, exporters: Sequence[SpanExporter]) -> None:
        super().__init__(resource=_resource(), shutdown_on_exit=False)
        self._exports = [WatchedExporter(each) for each in exporters]
        self._batches = [BatchSpanProcessor(each) for each in self._exports]
        for batch in self._batches:
            self.add_span_processor(batch)

    async def finish(self, seconds: float = END_SECONDS) -> None:
        """Export the last spans. What takes longer is lost, and the log says so in one line."""
        for each in self._exports:
            each.is_ending = True
        theirs, known = logging.getLogger("opentelemetry"), self._lost
        level = theirs.level
        theirs.setLevel(logging.CRITICAL)  # they tell of each try
        try:
            has_ended = await _all_end([batch.shutdown for batch in self._batches], seconds)
        finally:
            theirs.setLevel(level)
        if not has_ended:
            said = "the last spans are lost: the collector has not taken them for %g seconds"
            logger.warning(said, seconds)
        elif self._lost > known:
            said = "%d of the last spans are lost: the collector has not taken them"
            logger.warning(said, self._lost - known)

    @property
    def _lost(self) -> int:
        return sum(each.lost for each in self._exports)


def _resource() -> Resource:
    """What all spans say of this server."""
    made = Resource.create({"service.version": __version__})
    if str(made.attributes["service.name"]).startswith("unknown_service"):
        made = made.merge(Resource({"service.name": "megatron-async"}))
    return made


async def _all_end(works: Sequence[Callable[[], None]], seconds: float) -> bool:
    """Do all at the same time, in threads for which nobody waits any longer; whether all ended."""
    loop = asyncio.get_running_loop()
    ends = [asyncio.Event() for _ in works]

    def run(work: Callable[[], None], end: asyncio.Event) -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end.set)

    for work, end in zip(works, ends, strict=True):
        threading.Thread(target=run, args=(work, end), name="last spans", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            for end in ends:
                await end.wait()
    except TimeoutError:
        return False
    return True
