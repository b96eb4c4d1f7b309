"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron_async.codec import encode_json
from megatron_async.errors import MegatronAsyncError
from megatron_async.serving.http.errors import ClientGoneError, describe
from megatron_async.serving.http.logs import logger

DONE = b"data: [DONE]\n\n"


T = TypeVar("T")


def event(data: Any, name: str | None = None) -> bytes:
    """One event, with ``data`` as JSON on one line."""
    if name is None:
        return b"data: %b\n\n" % encode_json(data)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))


class TextEvents:
    """Makes the events of most tokens, of which one string alone differs, from parts made before.

    Args:
        data: of an event, with :attr:`PLACE` as that string.
    """

    PLACE = "\ue000text\ue000"

    def __init__(self, data: Any) -> None:
        self._before, self._after = event(data).split(encode_json(self.PLACE))

    def event(self, text: str) -> bytes:
        """The event with ``text``."""
        return b"".join((self._before, encode_json(text), self._after))


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled at once when the client closes its connection. The
    request's body must have been read.

    Raises:
        ClientGoneError: it has.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client has closed its connection")
        return task.result()
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_event(error: Exception) -> bytes:
    """The last event of a stream that an error has cut."""
    return event(describe(error)[1])


class EventStream(Response):
    """An answer of server-sent events.

    The status is decided by the first event: an error before it is an ordinary answer, a later one
    an event. A client that goes away ends the generator.

    Args:
        failed: makes the event of an error.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[Exception], bytes] = error_event,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._failed = failed
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(scope, send))
        except ClientGoneError:
            if not self._started:  # else there is nobody to tell, and nothing to add
                raise

    async def _send(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            body = await anext(events)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            self._started = True
            await send(start)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            try:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except Exception as error:
                _log(scope, error)
                body = self._failed(error)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _log(scope: Scope, error: Exception) -> None:
    """Say in the request's log line which error ended its stream; one that nobody expected gets a
    line of its own, with its traceback."""
    state = scope["state"]
    kind = type(error).__name__
    state["log_more"].append(lambda: {"error": kind})
    if not isinstance(error, MegatronAsyncError):
        fields = {"request_id": state["request_id"]}
        logger.exception("unexpected error in a stream", extra={"fields": fields})
