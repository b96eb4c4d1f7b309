"""Bodies of requests: bounded in items and depth before anything is built from them, then parsed.

What is built takes many times the bytes that ask for it, and the event loop stands while it is
built and checked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from megatron_async.checkpoint.reading.json_file import json_fault
from megatron_async.codec import parse_json
from megatron_async.serving.http.errors import ApiError, validation_error

MOST_ITEMS = 1 << 20
"""Values of a body: items of lists, fields of objects, and what holds them."""
MOST_FIELDS = 1 << 17
"""Fields of objects, objects and lists: each takes as long as many numbers."""
MOST_DEPTH = 64
"""Lists and objects within each other."""
MOST_LENIENT = 1 << 20
"""Bytes of a body that Python's slower parser may look at, too."""
LARGE = 1 << 16
"""Bytes of a body that is read in a thread, so that the event loop goes on between its steps."""
_THREAD = ThreadPoolExecutor(1, "large bodies")
"""One for all: each that computes takes its share from the event loop."""

Result = TypeVar("Result")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def check_size(
    body: bytes,
    most_items: int = MOST_ITEMS,
    most_depth: int = MOST_DEPTH,
    most_fields: int = MOST_FIELDS,
) -> None:
    """Raise ApiError for a body of more values, or deeper ones. What is no JSON may pass."""
    opened = body.count(b"[") + body.count(b"{")
    is_small = opened + body.count(b",") <= most_items and opened + body.count(b":") <= most_fields
    if opened <= most_depth and is_small:
        return  # counted in texts too, which only makes it more
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(plain, np.uint8)
    # 1 within texts, at the end of which a second quotation mark makes it even again.
    in_text = np.cumsum(characters == ord('"'), dtype=np.uint8) & 1
    outside = characters[in_text == 0]
    opens = (outside == ord("[")) | (outside == ord("{"))
    for mark, most, what in (
        (b",", most_items, "values"),
        (b":", most_fields, "fields, objects and lists"),
    ):
        if int(opens.sum() + (outside == ord(mark)).sum()) > most:
            said = f"the body has more than {most:,} {what}, the most that this server takes; "
            raise ApiError(413, said + "send several requests", code="too_many_values")
    closes = (outside == ord("]")) | (outside == ord("}"))
    levels = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
    if int(levels.max(initial=0)) > most_depth:
        said = f"the body has more than {most_depth} lists and objects within each other, the most "
        raise ApiError(400, said + "that this server takes", code="json_too_deep")


def parse(body: bytes) -> Any:
    """The value of a body of JSON.

    Raises:
        ApiError: it is no JSON.
    """
    try:
        return parse_json(body)
    except ValueError as error:
        said = str(error)
    if len(body) <= MOST_LENIENT:
        # It takes lone surrogates and NaN, which are refused by the names of their fields.
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            said = json_fault(error)
    raise ApiError(400, f"the body is not valid JSON: {said}", code="invalid_json")


class BodyField(Protocol):
    """What is needed of FastAPI's field of a body."""

    def validate(
        self, value: Any, values: dict[str, Any] = ..., *, loc: tuple[int | str, ...] = ...
    ) -> tuple[Any, list[Any]]:
        """The value as the field declares it, or what is wrong with it."""


def read(body: bytes, field: BodyField) -> Any:
    """The value of a body of JSON as a field declares it, which FastAPI takes as it is then.

    Raises:
        ApiError: it is too large, no JSON, or another value.
    """
    check_size(body)
    value, errors = field.validate(parse(body), {}, loc=("body",))
    if errors:
        raise validation_error(RequestValidationError(errors))
    return value


async def apart(request: Request, work: Callable[[], Result]) -> Result:
    """What ``work`` on a request's body gives: if that is large, in the thread of such bodies."""
    if request.state.body_bytes < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


class JsonRequest(Request):
    """A request whose JSON is parsed by :func:`parse`, and whose bytes are not kept then.

    Args:
        field: of the body, if the route has one.
    """

    _bytes: bytes | None = None

    def __init__(self, request: Request, field: BodyField | None) -> None:
        super().__init__(request.scope, request.receive)
        self._field = field

    async def body(self) -> bytes:
        """The whole body; empty once it has been parsed."""
        if self._bytes is None:
            self._bytes = b"".join([part async for part in self.stream()])
        return self._bytes

    async def json(self) -> Any:
        """The value of the body.

        Raises:
            HTTPException: caused by what :func:`read` raises.
        """
        body = await self.body()
        self._bytes = b""
        self.state.body_bytes = len(body)
        try:
            if self._field is not None and len(body) >= LARGE:
                return await apart(self, partial(read, body, self._field))
            check_size(body)
            return parse(body)
        except ApiError as error:  # FastAPI lets no other error through
            raise HTTPException(error.status, str(error)) from error


class JsonRoute(APIRoute):
    """A route that takes a :class:`JsonRequest`."""

    def get_route_handler(self) -> Handler:
        """See FastAPI's."""
        handle = super().get_route_handler()
        field = self.body_field

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request, field))

        return handle_json
