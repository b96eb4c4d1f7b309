"""The server as its clients use it: the ``openai`` client, many at once, and those that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.engines import config_at, hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.real_server import real_server, url_in
from tests.support.served import Served, served

ROOT = Path(__file__).parents[2]
HELLO: Any = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The embedded model."""
    tokenizer = Tokenizer.from_directory(ROOT / "megatron_async" / "assets" / "tiny")
    engine = DynamicInferenceEngine.from_pretrained("tiny", config_at(1, max_requests=4))
    with served(engine, tokenizer=tokenizer, api_keys=("key",)) as running:
        yield running


def openai_client(server: Served, key: str = "key") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_SECONDS
    )


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai_client(server) as opened:
        yield opened


# --- the openai client ----------------------------------------------------------------------------


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt="def f(", seed=1, max_tokens=12, logprobs=2, n=2
    )
    assert len(whole.choices) == 2 and whole.usage and whole.usage.prompt_tokens == 6
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.tokens
    stream = client.completions.create(
        model="tiny", prompt="def f(", seed=1, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "seed": 1, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    (choice,) = whole.choices
    assert choice.logprobs and choice.logprobs.content
    assert len(choice.logprobs.content) == whole.usage.completion_tokens  # type: ignore[union-attr]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, **options)
    assert last.usage == whole.usage or last.usage.total_tokens == whole.usage.total_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content


def test_structured_output(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        verdict: Literal["yes", "no"]
        colour: Literal["red", "green", "blue"]

    answer = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Answer, max_completion_tokens=100, seed=1
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and parsed.verdict in ("yes", "no")
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Answer, max_completion_tokens=100, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed


def test_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "def f(x):", "max_output_tokens": 12}
    whole = client.responses.create(**asked, temperature=0)
    assert whole.output_text and whole.usage and whole.usage.output_tokens == 12
    with client.responses.stream(**asked, temperature=0) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_tool_calls(server: Served, client: openai.OpenAI) -> None:
    pytest.importorskip("megatron_async.serving.chat.answers.tool_calls")
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    asked: Any = {"model": "tiny", "messages": HELLO, "tools": [tool], "tool_choice": "required"}
    asked |= {"max_completion_tokens": 200, "seed": 1, "parallel_tool_calls": False}
    spaces = server.front.tokenizer.tokenize(" \n\r\t")  # of which JSON may have any number
    asked["logit_bias"] = {str(token): -100 for token in spaces}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_calls_of_responses(server: Served, client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "weather", "parameters": schema, "strict": True}
    asked: Any = {"model": "tiny", "input": "def f(x):", "tools": [tool], "temperature": 0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(**asked, max_output_tokens=200).output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["unit"] in ("C", "F")
    with client.responses.stream(**asked, max_output_tokens=200) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert names[:2] == ["response.created", "response.in_progress"]
    assert "response.function_call_arguments.delta" in names
    (streamed,) = final.output
    assert streamed.type == "function_call" and streamed.arguments == call.arguments
    # The next turn: what came is sent back, with what the function gave.
    turn: Any = [{"role": "user", "content": "def f(x):"}, call.to_dict()]
    turn.append({"type": "function_call_output", "call_id": call.call_id, "output": "12"})
    after = client.responses.create(**{**asked, "input": turn, "tool_choice": "none"},
                                    max_output_tokens=8)  # fmt: skip
    assert after.output_text and after.usage and after.usage.input_tokens > 20


def test_a_response_of_a_type(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        verdict: Literal["yes", "no"]

    asked: Any = {"model": "tiny", "input": "def f(x):", "text_format": Answer, "temperature": 0}
    parsed = client.responses.parse(**asked, max_output_tokens=100).output_parsed
    assert parsed is not None and parsed.verdict in ("yes", "no")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("tiny").owned_by == "megatron-async"


def test_errors_are_those_of_the_client(server: Served, client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "a"}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(**asked, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with openai_client(server, "wrong") as other, pytest.raises(openai.AuthenticationError):
        other.completions.create(**asked)
    server.client.most = 0
    try:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(**asked, stream=stream)
            assert full.value.response.headers["retry-after"]
    finally:
        server.client.most = None


# --- many at once ---------------------------------------------------------------------------------

WORDS = ("abc", "hello", "xyz", "foo", "a b", "[1,2]")


def load(count: int) -> list[dict[str, Any]]:
    """What ``count`` clients ask; every third prompt begins as another one."""
    chance = random.Random(7)
    return [
        {
            "prompt": " ".join(chance.choices(WORDS, k=chance.randint(1, 9))),
            "seed": chance.randrange(10**6),
            "temperature": chance.choice([0.0, 0.7, 1.0]),
            "max_tokens": chance.randint(1, 60),
            "top_k": chance.choice([0, 5]),
        }
        for _ in range(count)
    ]


def serial_texts(asked: list[dict[str, Any]]) -> list[tuple[list[int], str]]:
    """Tokens and text of each, one request after the other without asynchronous scheduling."""
    tokenizer, found = hash_tokenizer(), []
    engine = hash_engine(0, tokenizer=tokenizer, max_requests=1, block_size_tokens=4, debug=False,
                         block_count=100, enable_prefix_caching=False)  # fmt: skip
    with engine:
        for one in asked:
            names = {name: one[name] for name in ("seed", "temperature", "top_k")}
            params = SamplingParams(**names, num_tokens_to_generate=one["max_tokens"])
            (request,) = engine.generate([one["prompt"]], params)
            found.append((request.generated_tokens, request.generated_text or ""))
    return found


def test_64_concurrent_streams_are_serial_decoding() -> None:
    asked = load(64)
    engine = hash_engine(1, tokenizer=hash_tokenizer(), max_requests=16, block_size_tokens=4,
                         block_count=300)  # fmt: skip

    async def one(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[list[int], str]:
        extra = {"top_k": body["top_k"], "return_token_ids": True}
        known = {name: value for name, value in body.items() if name != "top_k"}
        stream = await client.completions.create(
            model="tiny", **known, stream=True, extra_body=extra
        )
        ids: list[int] = []
        text = ""
        async for chunk in stream:
            ids += chunk.choices[0].token_ids  # type: ignore[attr-defined]
            text += chunk.choices[0].text
        return ids, text

    async def all_at_once(url: str) -> list[tuple[list[int], str]]:
        options: Any = {"api_key": "-", "max_retries": 0, "timeout": PATIENCE_SECONDS}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
            return await asyncio.gather(*(one(client, body) for body in asked))

    with served(engine) as server:
        assert asyncio.run(all_at_once(server.url)) == serial_texts(asked)


def test_streams_cut_at_random_points_harm_nobody() -> None:
    asked = load(24)
    serial = serial_texts(asked)
    engine = hash_engine(1, tokenizer=hash_tokenizer(), max_requests=4, block_size_tokens=4,
                         block_count=100)  # fmt: skip
    chance = random.Random(3)

    async def one(client: httpx.AsyncClient, number: int) -> str | None:
        """A third of them reads all."""
        most = None if number % 3 == 0 else chance.randint(0, 20)
        text, body = "", {**asked[number], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if most is not None and len(text) >= most:
                    return None
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text

    async def all_at_once(url: str) -> list[str | None]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
            return await asyncio.gather(*(one(client, number) for number in range(len(asked))))

    with served(engine) as server:
        texts = asyncio.run(all_at_once(server.url))
        server.until(lambda: not server.client.running and not engine.loop.has_work)
        assert server.client.aborted
    engine.scheduler.check_idle()
    assert None in texts
    assert [t for t in texts if t is not None] == [
        of for (_, of), text in zip(serial, texts, strict=True) if text is not None
    ]


# --- the process ----------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``tests.support.fake_server`` with its URL."""
    command = [sys.executable, "-m", "tests.support.fake_server", *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as running:
        try:
            assert running.stdout is not None
            yield running, running.stdout.readline().strip()
        finally:
            running.kill()


LONG: Any = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "seed": 1}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end_and_the_exit_is_a_success(sent: signal.Signals) -> None:
    with process("600") as (server, url):
        asked: Any = {"json": {**LONG, "stream": True}, "timeout": PATIENCE_SECONDS}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            server.send_signal(sent)
            *_, last, done = lines
        assert done == "data: [DONE]"
        choice = json.loads(last.removeprefix("data: "))["choices"][0]
        assert choice["finish_reason"] == "length"
        assert server.wait(PATIENCE_SECONDS) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert server.stderr is not None and server.stderr.read() == ""


def test_what_does_not_end_in_time_ends_with_its_text() -> None:
    with process("0.1", "stuck") as (server, url):
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
            asked = {**LONG, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                server.send_signal(signal.SIGTERM)
                *_, last, done = (line for line in answer.iter_lines() if line)
        assert done == "data: [DONE]"
        choice = json.loads(last.removeprefix("data: "))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "abort")
        assert server.wait(PATIENCE_SECONDS) == 0


def test_a_second_signal_waits_for_nobody_and_ends_in_good_order() -> None:
    with process("600", "stuck") as (server, url):
        asked: Any = {"json": {**LONG, "stream": True}, "timeout": PATIENCE_SECONDS}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            while _accepts(url):
                pass
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_SECONDS) == 0
            assert server.stderr is not None and "Traceback" not in server.stderr.read()


def test_a_standard_error_that_nobody_reads_holds_up_nobody() -> None:
    """A pipe holds the lines of some 340 requests."""
    with process("600", "logs") as (server, url):
        asked: Any = {"json": {**LONG, "stream": True}, "timeout": PATIENCE_SECONDS}
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
            for _ in range(700):
                assert client.get("/version").status_code == 200
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as answer:
            assert list(answer.iter_lines())[-2] == "data: [DONE]"
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
        assert server.stderr is not None and server.stderr.readline().startswith("{")


def _accepts(url: str) -> bool:
    try:
        httpx.get(f"{url}/version", timeout=PATIENCE_SECONDS)
    except httpx.TransportError:
        return False
    return True


def test_a_server_whose_engine_was_given_up_answers_what_is_open_and_exits_with_1() -> None:
    with process("600", "dies") as (server, url):
        asked: Any = {"json": {**LONG, "stream": True}, "timeout": PATIENCE_SECONDS}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as answer:
            *_, last, done = (line for line in answer.iter_lines() if line)
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait(PATIENCE_SECONDS) == 1


def test_a_server_that_stays_says_that_its_engine_was_given_up() -> None:
    with process("600", "stays") as (server, url):
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=LONG).status_code == 200
            for answer in (client.get("/health"), client.post("/v1/completions", json=LONG)):
                assert answer.status_code == 503 and "retry-after" not in answer.headers
                error = answer.json()["error"]
                assert error["code"] == "engine_given_up" and "given up" in error["message"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 1


def test_a_model_without_tokenizer_is_served_by_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "megatron_async" / "assets" / "tiny" / name, tmp_path)
    options = ["serve", "--model", str(tmp_path), "--port", "0"]
    assert main(options) == 2
    assert "--skip-tokenizer-init" in capsys.readouterr().err
    command = [sys.executable, "-m", "megatron_async", *options, "--skip-tokenizer-init"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as running:
        try:
            assert running.stderr is not None
            url = url_in(running.stderr)
            body = {"prompt": [100, 101], "max_tokens": 5, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)
            (choice,) = answer.json()["choices"]
            assert len(choice["token_ids"]) == 5 and choice["text"] == ""
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE_SECONDS) == 0
        finally:
            running.kill()


def test_serve_serves_the_embedded_model() -> None:
    pytest.importorskip("megatron_async.serving.supervisor")
    pytest.importorskip("megatron_async.serving.chat.chat_template")
    script = ROOT / "inference" / "text_generation_server.py"
    options = ["--inference-async-scheduling", "--port", "0", "--served-model-name", "m"]
    command = [sys.executable, str(script), *options, "--api-key", "key"]
    pipes: Any = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as running:
        try:
            assert running.stderr is not None
            url = url_in(running.stderr)
            login: Any = {"api_key": "key", "max_retries": 0, "timeout": PATIENCE_SECONDS}
            with openai.OpenAI(base_url=f"{url}/v1", **login) as client:
                asked: Any = {"model": "m", "messages": HELLO, "seed": 1, "max_tokens": 8}
                whole = client.chat.completions.create(**asked)
                stream = client.chat.completions.create(**asked, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                assert text == whole.choices[0].message.content
                best = client.completions.create(model="m", prompt="a", best_of=3, n=2, seed=1)
                assert len(best.choices) == 2
            headers = {"authorization": "Bearer key"}
            assert httpx.post(f"{url}/pause", headers=headers).json() == {"suspended": True}
            assert httpx.post(f"{url}/resume", headers=headers).json() == {"suspended": False}
            assert "megatron_async_request_success" in httpx.get(f"{url}/metrics").text
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE_SECONDS) == 0
        finally:
            running.kill()


def test_streams_are_cut_and_the_engine_is_killed_under_load() -> None:
    asked: Any = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    chance = random.Random(5)

    async def test() -> None:
        async with real_server("--inference-async-scheduling") as server:
            await asyncio.gather(*(server.text(asked, chance.randrange(40)) for _ in range(16)))
            await server.until_idle()
            tasks = [asyncio.create_task(server.text(asked)) for _ in range(8)]
            while (await server.values())["num_requests_running"] < 8:
                await asyncio.sleep(0.02)
            server.processes()[1].kill()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(end, InterruptedError) and end.args == ("engine_not_ready",)
            await server.until_status(503)
        # SIGTERM has come while the next engine process started.

    asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "65536"], "between 0 and 65535"),
        (["--model", "nowhere"], "nowhere"),
        (["--api-key", ""], "api_key"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--request-timeout", "0"], "above 0"),
        (["--depth", "0", "--inference-async-scheduling"], "contradict"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron_async.serving.supervisor")
    pytest.importorskip("megatron_async.serving.chat.chat_template")
    try:
        status = main(["serve", "--port", "0", *arguments])
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2 and said in error and error.count("\n") == 1
