"""Requests that an attack on a running server has found to be answered badly."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any
from unittest.mock import create_autospec

import pytest
from pydantic import ValidationError
from starlette.types import Message

from megatron_async.serving.chat.chat import Chat, ToolUse
from megatron_async.serving.chat.chat_messages import plain
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.endpoints.json_body import MOST_FIELDS, check_size, parse
from megatron_async.serving.endpoints.responses_api import ResponsesRequest
from megatron_async.serving.front_end.limited_worker import LimitedWorkers
from megatron_async.serving.front_end.protocols import Metrics
from megatron_async.serving.http.errors import ApiError
from megatron_async.serving.http.middleware import RequestLog
from tests.unit.serving.test_connections import connected, run, running
from tests.unit.serving.test_request_bounds import waits_for_its_body

POST = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
USER = {"role": "user", "content": "a"}


def answer_to(request: bytes) -> tuple[bytes, dict[str, Any]]:
    """The status line of what a server says before it closes the connection, and the error."""

    async def ask() -> bytes:
        async with running(waits_for_its_body) as port, connected(port) as client:
            client.writer.write(request)
            return await client.is_closed()

    said: list[bytes] = []

    async def test() -> None:
        said.append(await ask())

    run(test())
    head, _, body = said[0].partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        POST + b"1\r\na\r\nZZ\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_the_shape_of_the_api(request_bytes: bytes) -> None:
    status, error = answer_to(request_bytes)
    assert status == b"HTTP/1.1 400 Bad Request"
    assert error["code"] == "invalid_http"


@pytest.mark.parametrize(
    "rest", [b"1;" + b"a" * 100_000 + b"\r\na\r\n", b"0\r\n" + b"x: y\r\n" * 300]
)
def test_framing_beyond_its_bound_is_told_so_before_the_answer_has_begun(rest: bytes) -> None:
    status, error = answer_to(POST + b"1\r\na\r\n" + rest)
    assert status.startswith(b"HTTP/1.1 431 ")
    assert error["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":{' + b",".join(b'"%d":0' % n for n in range(MOST_FIELDS)) + b"}}",
        b"[" + b",".join([b'{"a":{}}'] * (MOST_FIELDS // 2)) + b"]",
        b"[" + b",".join([b"[]"] * MOST_FIELDS) + b"]",
    ],
)
def test_many_fields_are_refused_though_as_many_numbers_are_not(body: bytes) -> None:
    with pytest.raises(ApiError, match="131,072 fields, objects and lists") as raised:
        check_size(body)
    assert raised.value.status == 413
    check_size(b"[" + b",".join([b"0"] * (2 * MOST_FIELDS)) + b"]")
    check_size(json.dumps({"a": ":" * (2 * MOST_FIELDS)}).encode())


@pytest.mark.parametrize("digits", [5_000, 50_000])
def test_an_integer_of_many_digits_is_refused_in_the_words_of_json(digits: int) -> None:
    with pytest.raises(ApiError, match=r"not valid JSON: an integer has too many digits$"):
        parse(b'{"a":' + b"1" * digits + b"}")


@pytest.mark.parametrize(
    ("messages", "kwargs", "place"),
    [
        ([USER, USER | {"content": "a\ud800"}], None, r"messages\[1\]\.content has a lone"),
        ([USER | {"name": "\udc00"}], None, r"messages\[0\]\.name has a lone"),
        ([USER], {"x": ["\ud800"]}, r"chat_template_kwargs\.x\[0\] has a lone"),
        ([USER], {"x": 2**70}, r"chat_template_kwargs: an integer does not fit"),
    ],
)
def test_what_cannot_go_to_the_process_of_templates_is_named(
    messages: list[dict[str, Any]], kwargs: dict[str, Any] | None, place: str
) -> None:
    templates = ChatTemplates({"default": "{{ messages[0].content }}"})
    pool = LimitedWorkers(ChatTemplates.__module__, templates.to_dict(), seconds=60)
    chat = Chat(templates, renderer=pool)
    with pytest.raises(ApiError, match=place) as raised:
        asyncio.run(chat.prompt(messages, ToolUse(), chat_template_kwargs=kwargs))
    assert raised.value.status == 400
    chat.close()


@pytest.mark.parametrize("value", [[0] * 1000, ["a"] * 1000, {str(n): 0.5 for n in range(1000)}])
def test_a_value_is_copied_without_a_name_of_its_place(value: Any) -> None:
    """A million of them hold up the event loop no longer than it takes to look at each."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        made = plain("metadata", value)
    finally:
        sys.setprofile(None)
    assert made == value and made is not value
    assert calls < 2 * len(value) + 100


def test_metadata_that_is_echoed_is_bounded() -> None:
    ResponsesRequest.model_validate({"input": "a", "metadata": {str(n): n for n in range(1024)}})
    with pytest.raises(ValidationError, match="1,025 entries of at most 1,024"):
        many = {str(n): n for n in range(1025)}
        ResponsesRequest.model_validate({"input": "a", "metadata": many})


def test_a_body_that_never_ends_is_told_that_the_server_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Message] = []
    waits = asyncio.Event()

    async def receive() -> Message:
        waits.set()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    async def test() -> None:
        app = RequestLog(waits_for_its_body, [], create_autospec(Metrics), ())
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        task = asyncio.create_task(app(scope, receive, send))
        await waits.wait()
        task.cancel()
        await task

    run(test())
    assert sent[0]["status"] == 503
    assert "stopped" in json.loads(sent[1]["body"])["error"]["message"]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
