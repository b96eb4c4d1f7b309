"""What every HTTP request passes: its id and log line, and the limit of its body."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_async.serving.front_end.protocols import Metrics
from megatron_async.serving.http.errors import ApiError, ClientGoneError, error_response
from megatron_async.serving.http.frontend import MIB, PLAIN_ID
from megatron_async.serving.http.logs import logger
from megatron_async.serving.http.rights import find_route
from megatron_async.serving.tracing import spans

BODY_SECONDS = 60.0
"""For each MiB of a body that is begun: a connection must not live for ever."""
SMALL_BODY = 64 * 1024
"""A server takes as many of these as it has connections."""
ALL_BODIES = 128 * MIB
_ALL_SAID = "the bodies of other requests hold all the memory that they may; try again later"
_STOPPED_SAID = "the server is stopped before the request is complete; send it to another one"
STATUS_CLIENT_GONE = 499
"""In the log alone; nginx's."""
_CLOSE = {"Connection": "close"}
"""What is left of a body that was refused is never read."""


class RequestLog:
    """The outermost layer: gives each request its id, from ``x-request-id`` if the client sent a
    plain one, and logs how it ended. Neither prompts nor texts are logged.

    Handlers add to the line by functions in ``request.state.log_more``, called at the end. An error
    that nobody expected becomes a 500 here, and its traceback goes to the log. What is cancelled
    because the server ends becomes a 503, which is no error of the log.

    Which route will answer stands in ``request.state.route``, None where there is none.

    Args:
        routes: of the application.
        metrics: count requests of routes with ``counted_paths``.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        metrics: Metrics,
        counted_paths: Collection[str],
    ) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._counted_paths = counted_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        span = spans.current_span()
        ids = {"request_id": request_id, **spans.ids_of(span)}
        fields: dict[str, Any] = {
            **ids,
            "method": scope["method"],
            "path": scope["path"],
        }
        state = scope.setdefault("state", {})
        more: list[Callable[[], dict[str, Any]]] = []
        state["request_id"], state["log_more"] = request_id, more
        state["route"] = route = find_route(self._routes, scope)
        status: int | None = None

        def describe() -> None:
            for numbers in more:
                fields.update(numbers())
            spans.describe_end(span, fields)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif span is not None and not message.get("more_body"):
                describe()  # the span ends with this message
            await send(message)

        is_counted = getattr(route, "path", None) in self._counted_paths
        if is_counted:
            self._metrics.opened()
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            status = STATUS_CLIENT_GONE
        except asyncio.CancelledError:  # the server has ended, and this request has not
            if status is None:
                await error_response(ApiError(503, _STOPPED_SAID))(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("unexpected error", extra={"fields": ids})
            if status is not None:
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            if is_counted:
                self._metrics.closed()
                if status is not None and status >= 400:
                    self._metrics.refused(status)
            describe()
            fields["status"] = status
            fields["seconds"] = round(time.perf_counter() - started, 6)
            logger.info("request", extra={"fields": fields})


class BodyLimit:
    """Answers 413 to a larger body, before it has been read: by its declared length, else as soon
    as more has come. One that comes too slowly is answered 408, and a compressed one 415. A large
    one is answered 503 while bodies that have not been answered yet hold all that they may.

    Args:
        most_bytes: of one body.
        all_bytes: of what all bodies have beyond :data:`SMALL_BODY`.
        seconds: in which a body must arrive, and as many more for each MiB that has.
    """

    def __init__(
        self,
        app: ASGIApp,
        most_bytes: int,
        all_bytes: int = ALL_BODIES,
        seconds: float = BODY_SECONDS,
    ) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._free = max(all_bytes, most_bytes)
        self._seconds = seconds
        self._said = f"the body is larger than {most_bytes:,} bytes, the most this server takes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._most_bytes:
            await self._refuse(ApiError(413, self._said))(scope, receive, send)
            return
        if headers.get("content-encoding", "identity").lower() != "identity":
            said = "a body with Content-Encoding is not read; send it as it is"
            await self._refuse(ApiError(415, said))(scope, receive, send)
            return
        limited, give_back = self._limited(receive)

        async def send_and_give_back(message: Message) -> None:
            give_back()  # what is answered has been parsed
            await send(message)

        try:
            await self._app(scope, limited, send_and_give_back)
        finally:
            give_back()

    def _limited(self, receive: Receive) -> tuple[Receive, Callable[[], None]]:
        """What receives the body, and what gives back the room that it takes."""
        received, is_whole, start = 0, False, asyncio.get_running_loop().time()
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._free:
                raise ApiError(503, _ALL_SAID, code="too_many_bodies")
            self._free -= size
            taken += size

        def give_back() -> None:
            nonlocal taken
            self._free += taken
            taken = 0

        async def receive_within_limits() -> Message:
            nonlocal received, is_whole
            if is_whole:  # what comes now is that the client has gone
                return await receive()
            try:
                async with asyncio.timeout_at(start + self._seconds * (1 + received // MIB)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body came too slowly", _CLOSE) from None
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                raise HTTPException(413, self._said, _CLOSE)
            is_whole = not message.get("more_body", False)
            if not is_whole or taken:
                try:
                    take(max(received - SMALL_BODY, 0) - taken)
                except ApiError as error:
                    raise HTTPException(error.status, str(error), _CLOSE) from error
            return message

        return receive_within_limits, give_back

    def _refuse(self, error: ApiError) -> Response:
        response = error_response(error)
        response.headers.update(_CLOSE)
        return response
