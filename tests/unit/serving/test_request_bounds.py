"""What is bounded before a request is believed: heads, requests sent ahead, bodies, values, and the
time and memory of work that a model's files describe."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from megatron_async.errors import RequestError
from megatron_async.serving.chat.chat import Chat, ToolUse
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.endpoints.development_api import UpdateInfo
from megatron_async.serving.endpoints.engine_api import DetokenizeRequest
from megatron_async.serving.endpoints.json_body import check_size, parse
from megatron_async.serving.endpoints.megatron_api import MegatronRequest
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest
from megatron_async.serving.endpoints.responses_api import ResponsesRequest
from megatron_async.serving.front_end.limited_worker import LimitedWorkers, TooMuchError
from megatron_async.serving.http import connections, middleware
from megatron_async.serving.http.errors import ApiError, install_error_handlers
from megatron_async.serving.http.lingering import Bounds
from megatron_async.serving.http.middleware import BodyLimit
from tests.support import limited_work
from tests.unit.serving.test_connections import REQUEST, connected, run, running, says_ok

MIB = 1 << 20


# --- heads ----------------------------------------------------------------------------------------

FIRST = b"POST / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = FIRST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"
FLOODS = {
    "fields": (FIRST, b"x: y\r\n" * 64),
    "one value": (FIRST + b"x: ", b"a" * 4096),
    "one name": (FIRST, b"a" * 4096),
    "request line": (b"GET /", b"a" * 4096),
    "trailers": (CHUNKED + b"0\r\n", b"x: " + b"b" * 2048 + b"\r\n"),
    "chunk extensions": (CHUNKED, b"1;" + b"a" * 2048 + b"\r\na\r\n"),
    "blank lines": (b"", b"\r\n" * 2048),
}


async def waits_for_its_body(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await says_ok(scope, receive, send)


@pytest.mark.parametrize("name", FLOODS)
def test_a_head_without_end_ends_its_connection(name: str) -> None:
    first, more = FLOODS[name]

    async def test() -> None:
        at_once = Bounds(most_bytes=0)
        async with (
            running(waits_for_its_body, lingering=at_once) as port,
            connected(port) as flood,
        ):
            flood.writer.write(first)
            sent = 0
            try:
                while not flood.reader.at_eof() and sent < MIB:
                    flood.writer.write(more)
                    sent += len(more)
                    await flood.writer.drain()
                    await asyncio.sleep(0)
                said = await flood.is_closed()
            except ConnectionError:
                said = b""
            assert sent < MIB
            assert not said or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
            async with connected(port) as other:
                await other.asks()

    run(test())


def test_a_long_head_is_told_its_limit() -> None:
    async def test() -> None:
        async with running() as port, connected(port) as client:
            fields = b"".join(b"x-%d: y\r\n" % n for n in range(connections.HEAD_FIELDS + 1))
            client.writer.write(b"GET / HTTP/1.1\r\n" + fields + b"\r\n")
            head, _, body = (await client.is_closed()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "headers_too_large"

    run(test())


def test_a_large_head_and_a_large_body_pass() -> None:
    """Also one of chunks of single bytes, and one behind another request."""

    async def test() -> None:
        async with running(waits_for_its_body) as port, connected(port) as client:
            value = b"x: " + b"a" * (connections.HEAD_BYTES - 4096) + b"\r\n"
            ahead = FIRST + value + b"content-length: 3000000\r\n\r\n" + b"a" * 3_000_000
            chunks = FIRST + b"transfer-encoding: chunked\r\n\r\n"
            chunks += b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
            client.writer.write(ahead + chunks)
            for _ in range(2):
                await client.reader.readuntil(b"ok")
            await client.asks()

    run(test())


def test_requests_that_are_sent_ahead_wait_unparsed() -> None:
    waiting: list[int] = []

    async def test() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            await go_on.wait()
            await says_ok(scope, receive, send)

        async with running(app) as port, connected(port) as client:
            count = 2000
            client.writer.write(REQUEST * count)
            await begun.wait()
            for _ in range(50):
                await asyncio.sleep(0)
            (held,) = [
                task.get_coro().cr_frame.f_locals["self"]  # type: ignore[union-attr]
                for task in asyncio.all_tasks()
                if "run_asgi" in repr(task.get_coro())
            ]
            protocol = held.on_response.__self__
            waiting.append(len(protocol.pipeline))
            go_on.set()
            for _ in range(count):
                await client.reader.readuntil(b"ok")

    run(test())
    assert 0 < waiting[0] <= connections.PART_BYTES // len(REQUEST) + 1


# --- bodies ---------------------------------------------------------------------------------------


def test_large_bodies_share_what_all_of_them_may_take() -> None:
    asking = asyncio.Event

    async def test() -> None:
        app = FastAPI()
        install_error_handlers(app)

        @app.post("/")
        async def whole(request: dict[str, str]) -> str:
            return str(len(request["a"]))

        limited = BodyLimit(app, most_bytes=MIB, all_bytes=MIB)
        async with running(limited) as port:
            url = f"http://127.0.0.1:{port}/"
            body = json.dumps({"a": "x" * 900_000}).encode()
            held = asking()

            async def slow() -> Any:
                yield body[:800_000]
                held.set()
                await released.wait()
                yield body[800_000:]

            released = asking()
            headers = {"content-type": "application/json"}
            async with httpx.AsyncClient(timeout=60) as client:
                first = asyncio.create_task(client.post(url, content=slow(), headers=headers))
                await held.wait()
                while True:  # until the server has read what was sent
                    second = await client.post(url, content=body, headers=headers)
                    if second.status_code != 200:
                        break
                assert second.status_code == 503
                assert second.json()["error"]["code"] == "too_many_bodies"
                assert "retry-after" in second.headers
                small = await client.post(url, json={"a": "x"})
                assert small.json() == "1"
                released.set()
                assert (await first).json() == "900000"
                assert (await client.post(url, content=body, headers=headers)).status_code == 200

    run(test())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" * 65 + b"]" * 65, "json_too_deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "json_too_deep"),
        (b"[" + b"{}," * 60 + b"{}]", None),
        (b'{"a": "' + b"[{," * 300 + b'"}', None),
        (b'{"a": "\\\\", "b": "\\"' + b"[" * 100 + b'"}', None),
        (b'{"a": "\\\\\\\\\\"' + b"," * 300 + b'"}', None),
        (b"[" + b"0," * 200 + b"0]", "too_many_values"),
        (b"[" + b'"",' * 200 + b"0]", "too_many_values"),
        (b"[" + b"{}," * 101 + b"{}]", "too_many_values"),
    ],
)
def test_values_and_depth_of_a_body_are_counted_outside_of_texts(
    body: bytes, code: str | None
) -> None:
    json.loads(body)
    if code is None:
        check_size(body, 200, 64)
        return
    with pytest.raises(ApiError) as raised:
        check_size(body, 200, 64)
    assert raised.value.code == code
    check_size(body, 1000, 100)


@pytest.mark.parametrize("body", [b"[1,", b"{", b'{"a" 1}', b"\xff", b"[" * 64, b""])
def test_what_is_no_json_is_said_to_be_none(body: bytes) -> None:
    check_size(body)
    with pytest.raises(ApiError, match="the body is not valid JSON") as raised:
        parse(body)
    assert raised.value.status == 400


MANY = 30_000
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "nulls in prompt": (CompletionRequest, {"prompt": [None] * MANY}),
    "objects in prompt": (CompletionRequest, {"prompt": [{}] * MANY}),
    "lists of nulls": (CompletionRequest, {"prompt": [[None] * MANY] * 3}),
    "texts, then nulls": (CompletionRequest, {"prompt": ["a"] + [None] * MANY}),
    "tokens, then texts": (CompletionRequest, {"prompt": [1] + ["a"] * MANY}),
    "nulls in stop": (CompletionRequest, {"prompt": "", "stop": [None] * MANY}),
    "texts as tokens": (CompletionRequest, {"prompt": "", "stop_token_ids": ["1"] * MANY}),
    "biases of texts": (
        CompletionRequest,
        {"prompt": "", "logit_bias": {str(n): "x" for n in range(MANY)}},
    ),
    "many biases": (
        CompletionRequest,
        {"prompt": "", "logit_bias": {str(n): "x" for n in range(70_000)}},
    ),
    "nulls in messages": (ChatCompletionRequest, {"messages": [None] * (MANY // 2)}),
    "many messages": (ChatCompletionRequest, {"messages": [{}] * MANY}),
    "tools": (ChatCompletionRequest, {"messages": [{}], "tools": [0] * MANY}),
    "input": (ResponsesRequest, {"input": [0] * (MANY // 2)}),
    "include": (ResponsesRequest, {"input": "", "include": [0] * MANY}),
    "tokens": (DetokenizeRequest, {"tokens": [None] * MANY}),
    "prompts": (MegatronRequest, {"prompts": [None] * 100}),
    "shapes": (UpdateInfo, {"names": [], "dtype_names": [], "shapes": [[None] * MANY] * 2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_many_wrong_items_are_one_error(name: str) -> None:
    """It takes no more memory than what is wrong."""
    shape, body = WRONG[name]
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as raised:
            shape.model_validate(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if name != "biases of texts":  # an object's entries are checked one by one
        assert raised.value.error_count() <= 4
    assert most < 32 * MIB


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], None), ("", None), ([1, 2], None), ([[1], [2]], None), (["a", "b"], None),
        ([1, True], r"prompt\[1\] must be a token id"), ([1, 2.0], r"prompt\[1\] must be"),
        ([-1], r"prompt\[0\] must be"), ([2**31], r"prompt\[0\] must be"),
        (["a", 1], r"prompt\[1\] must be a text"), ([[1], 2], r"prompt\[1\] must be a list"),
        ([[1], [2, "a"]], r"prompt\[1\]\[1\] must be a token id"), (5, "prompt must be a text"),
        ({"a": 1}, "prompt must be a text"),
    ],
)  # fmt: skip
def test_a_wrong_prompt_is_named_by_its_place(prompt: Any, said: str | None) -> None:
    if said is None:
        assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt
        return
    with pytest.raises(ValidationError, match=said):
        CompletionRequest.model_validate({"prompt": prompt})


# --- work within limits ---------------------------------------------------------------------------


def workers(seconds: float = 60.0, mib: int = 256) -> LimitedWorkers:
    return LimitedWorkers(limited_work.__name__, {"given": 1}, seconds=seconds, mib=mib)


def test_work_that_hangs_dies_or_grows_ends_alone() -> None:
    async def test() -> None:
        pool = workers()
        first = await pool.call(what="say")
        assert first == {"given": 1, "pid": first["pid"]} and first["pid"] != os.getpid()
        assert await pool.call(what="say") == first  # the same process
        with pytest.raises(RequestError, match=r"^no$"):
            await pool.call(what="refuse")
        assert await pool.call(what="say") == first
        assert await pool.call(what="eat", much=64 * MIB) == 64 * MIB
        with pytest.raises(TooMuchError, match="256 MiB"):
            await pool.call(what="eat", much=512 * MIB)
        with pytest.raises(TooMuchError, match="ended its process"):
            await pool.call(what="die")
        assert (await pool.call(what="say"))["pid"] != first["pid"]
        with pytest.raises(RequestError, match="64 bits"):
            await pool.call(what=2**70)
        waiting = psutil.Process((await pool.call(what="say"))["pid"])
        waiting.kill()
        waiting.wait()
        assert (await pool.call(what="say"))["pid"] != waiting.pid
        pool.close()

    run(test())


def test_work_that_takes_too_long_ends() -> None:
    async def test() -> None:
        pool = workers(seconds=0.5)
        hanging = [asyncio.create_task(pool.call(what="hang")) for _ in range(3)]
        for task in hanging:
            with pytest.raises(TooMuchError, match=r"more than 0\.5 s"):
                await task
        pool.close()

    run(test())


def test_work_that_nobody_waits_for_is_stopped() -> None:
    async def test() -> None:
        pool = workers()
        await pool.call(what="say")
        task = asyncio.create_task(pool.call(what="hang"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "pid" in await pool.call(what="say")
        pool.close()

    run(test())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum(n=100000000)|length }}",
        "{{ ([[1]*1000]*40000)|sum(start=[])|length }}",
        "{{ 'a'.center(3*10**9) }}",
        "{{ ('a' * 10**7).replace('a', 'b' * 10**3) }}",
        "{{ range(10**5)|list|tojson(indent=10**5) }}",
    ],
)
def test_templates_that_never_end_or_grow_are_refused(source: str) -> None:
    templates = ChatTemplates({"default": source})

    async def test() -> None:
        pool = LimitedWorkers(ChatTemplates.__module__, templates.to_dict(), seconds=3, mib=256)
        chat = Chat(templates, renderer=pool)
        with pytest.raises(ApiError, match=r"^messages.*: chat template: ") as raised:
            await chat.prompt([{"role": "user", "content": "a"}], ToolUse())
        assert raised.value.status == 400
        chat.close()

    run(test())


def test_templates_in_processes_say_what_they_say_here() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ x }}"
    templates = ChatTemplates({"default": source}, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    async def test() -> None:
        pool = LimitedWorkers(ChatTemplates.__module__, templates.to_dict(), seconds=60)
        for chat in (Chat(templates), Chat(templates, renderer=pool)):
            made = await chat.prompt(messages, ToolUse(), chat_template_kwargs={"x": 1})
            assert made.text == "user:a;assistant:b;1"
            with pytest.raises(ApiError, match=r"messages\[0\]"):
                await chat.prompt([{"content": "a"}], ToolUse())
            chat.close()

    run(test())


def test_the_limits_stand_in_their_modules() -> None:
    """What the documentation says of them."""
    assert (connections.HEAD_BYTES, connections.HEAD_FIELDS) == (64 * 1024, 256)
    assert middleware.ALL_BODIES == 128 * MIB


def test_work_that_cannot_begin_is_an_error_of_its_own() -> None:
    async def test() -> None:
        pool = LimitedWorkers("tests.support.no_such_module", {}, seconds=60)
        with pytest.raises(TooMuchError, match="does not start"):
            await pool.call(what="say")

    run(test())
