"""``bench --server``: the client, its figures, and a run against a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.benchmark.measuring.http_client import Answer, EventParser, Server
from megatron_async.benchmark.measuring.loads import RaggedLoad
from megatron_async.benchmark.measuring.server_load import (
    SAFE_VOCABULARY,
    Part,
    Target,
    figures,
    run_clients,
)
from megatron_async.checkpoint.path import load_tokenizer
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.serving.chat.chat import Chat, ToolUse
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served import Served, served

Capture = pytest.CaptureFixture[str]
SHAPE = "random:tiny-llama"
LOAD = ("--requests", "9", "--prompt-range", "4,32", "--output-range", "4,16")
DONE = b"data: [DONE]\n\n"


def completion(text: str, **more: Any) -> bytes:
    chunk = {"id": "1", "choices": [{"index": 0, "text": text, **more}], "usage": None}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def usage(tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % tokens


def delta(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": fields}]}).encode()


# --- events ---------------------------------------------------------------------------------------


def parsed(*pieces: bytes) -> tuple[int, int, Any, bool]:
    """Events with tokens, tokens, error and whether the stream is done."""
    answer = Answer(0.0)
    parser = EventParser(answer)
    for piece in pieces:
        parser.push(piece)
    return len(answer.times), answer.tokens, answer.error, parser.is_done


def test_events_may_be_cut_at_any_byte() -> None:
    error = b'data: {"error": {"message": "no"}}\r\n\r\n'
    stream = b": hello\n\n" + completion("x € \n\n data: y") + completion("") + error
    stream += usage(7) + DONE
    whole = parsed(stream)
    assert whole[:2] == (2, 7) and whole[2][0] == "error event" and whole[3]
    for place in range(len(stream)):
        assert parsed(stream[:place], stream[place:]) == whole
    assert parsed(*(stream[n : n + 1] for n in range(len(stream)))) == whole


def test_tokens_are_counted_by_usage_or_ids_or_events() -> None:
    plain = completion("ab") + completion("")
    assert parsed(plain + usage(5)) == (2, 5, None, False)
    assert parsed(completion("ab", token_ids=[1, 2, 3]) + completion("", token_ids=[4]))[1] == 4
    assert parsed(plain)[1] == 2


def test_the_role_of_a_chat_is_no_token() -> None:
    stream = delta(role="assistant", content="") + delta(reasoning_content="hm")
    assert parsed(stream + delta(content="a") + delta())[0] == 2


# --- figures --------------------------------------------------------------------------------------


def test_latencies_are_of_good_answers_alone() -> None:
    good = [Answer(0.0, [n / 100, 2.0, 3.0], 4.0, tokens=5) for n in range(1, 101)]
    bad = [
        Answer(0.0, [9.0], 8.0, 1, ("cut off", "why")),
        Answer(0.0, [], 0.1, 0, ("HTTP 429", "")),
    ]
    found = figures([Part(good[:50], 0.5), Part([*good[50:], *bad], 0.5)])
    assert found["first_token_ms_mean"] == pytest.approx(505)
    assert found["first_token_ms_p50"] == pytest.approx(505)
    assert found["first_token_ms_p90"] == pytest.approx(901)
    assert found["first_token_ms_p99"] == pytest.approx(990.1)
    assert found["token_ms_request_mean_p50"] == pytest.approx((3000 - 505) / 4)
    assert found["token_ms_between_p90"] == pytest.approx(1791.0)
    assert found["request_ms_p99"] == 4000 and found["seconds"] == 8.0
    assert (found["requests"], found["output_tokens"]) == (100, 500)
    assert found["output_tokens_per_second"] == 62.5 and found["requests_per_second"] == 12.5
    assert found["client_us_per_event"] == pytest.approx(1e6 / 301)
    assert found["errors"] == {"cut off": 1, "HTTP 429": 1}


def test_nothing_but_errors_has_no_latencies() -> None:
    found = figures([Part([Answer(1.0, [], 2.0, 0, ("HTTP 500", "oh"))], 0.0)])
    assert found["first_token_ms_p99"] is None and found["output_tokens"] == 0
    assert found["errors_said"] == {"HTTP 500": "oh"}


# --- servers that fail ----------------------------------------------------------------------------


@contextlib.contextmanager
def scripted(answers: list[bytes]) -> Iterator[Server]:
    """A server that sends each of ``answers`` to one request and closes, whatever they are."""
    left = iter(answers)
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(next(left))
        writer.close()

    opened = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = opened.sockets[0].getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}/v1")
    finally:
        loop.call_soon_threadsafe(opened.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_SECONDS)
        loop.close()


def chunked(*bodies: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies)


def test_errors_are_counted_by_kind() -> None:
    full = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
    end = b"0\r\n\r\n"
    whole = chunked(completion("a"), usage(1), DONE) + end
    until_closed = b"HTTP/1.1 200 OK\r\n\r\n" + completion("a") + usage(1) + DONE
    answers = {
        full: ("HTTP 429", "full"),
        chunked(completion("a")): ("cut off", "the server closed the connection"),
        chunked(completion("a")) + end: ("cut off", "the stream has no [DONE]"),
        chunked(b'data: {"error": "nan"}\n\n', DONE) + end: ("error event", "nan"),
        chunked(b"data: {\n\n"): ("not understood", "Input data was truncated"),
        b"SMTP\r\n\r\n": ("not understood", "Expected HTTP/, RTSP/ or ICE/"),
        whole: None,
        until_closed: None,
    }
    with scripted(list(answers)) as server:
        count = len(answers)
        request = server.post("/completions", {})
        ended: list[Answer] = []
        (part,) = run_clients(server, [request] * count, [0.0] * count, 1, 1, ended.append)
    assert [answer.error for answer in part.answers] == list(answers.values())
    assert ended == part.answers
    assert figures([part])["output_tokens"] == 2


def test_nobody_listens() -> None:
    with scripted([]) as server:
        pass
    (part,) = run_clients(server, [b"", b""], [0.0, 0.0], 2, 1, lambda answer: None)
    assert figures([part])["errors"] == {"no connection": 2}


# --- a server of ours -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A model with random weights."""
    config = config_at(1, max_requests=4, enable_prefix_caching=False)
    engine = DynamicInferenceEngine.from_pretrained(SHAPE, config)
    with served(engine, tokenizer=load_tokenizer(SHAPE), api_keys=("key",)) as running:
        yield running


def bench(url: str, path: Path, *options: str) -> dict[str, Any]:
    options = ("--api-key", "key", *LOAD, "--json", str(path), *options)
    assert main(["bench", "--server", url, *options]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_load_reaches_the_server(
    server: Served, tmp_path: Path, capsys: Capture, endpoint: str
) -> None:
    options = ("--endpoint", endpoint, "--concurrency", "3", "--arrival-rate", "inf,500")
    report = bench(server.url, tmp_path / "report.json", *options)
    assert report["complete"] and "key" not in report["command"]
    assert report["vocabulary"] == 512 and report["shape"] == "tiny"
    ranges = {"prompt_range": (4, 32), "output_range": (4, 16)}
    asked = RaggedLoad(requests=9, **ranges).make_requests(512)  # type: ignore[arg-type]
    tokens = sum(one.params.num_tokens_to_generate or 0 for one in asked)
    for row in report["results"]:
        assert row["requests"] == 9 and row["output_tokens"] == tokens and not row["errors"]
        assert 0 < row["first_token_ms_p50"] <= row["request_ms_p50"] <= row["request_ms_p99"]
    said = capsys.readouterr().out
    assert "arriving at once" in said and "arriving 500/s" in said and "tpot" in said


def test_ranges_that_are_not_given_fit_the_server(
    server: Served, tmp_path: Path, capsys: Capture
) -> None:
    path, few = tmp_path / "report.json", ("--requests", "2", "--output-range", "1,2")
    options = ("--api-key", "key", *few, "--json", str(path))
    assert main(["bench", "--server", server.url, *options]) == 0
    most = Target(server.url, key="key").card["max_model_len"]
    load = json.loads(path.read_text())["load"]
    assert load["prompt_range"] == [32, most - 2] and load["output_range"] == [1, 2]
    assert f"has {most} tokens here: --prompt-range 32,{most - 2} --" in capsys.readouterr().err


def test_processes_share_the_streams(server: Served, tmp_path: Path) -> None:
    options = ("--client-processes", "2", "--rounds", "2", "--vocabulary", "99")
    report = bench(server.url, tmp_path / "report.json", *options)
    (row,) = report["results"]
    assert row["requests"] == 9 and len(row["round_seconds"]) == 2 and report["complete"]


def test_a_refusal_is_no_success(server: Served, capsys: Capture) -> None:
    names = ("--served-model-name", "other", "--vocabulary", "100", "--api-key", "key")
    assert main(["bench", "--server", server.url, *LOAD, *names]) == 1
    assert "failed: 9 times HTTP 404" in capsys.readouterr().out


def test_rounds_do_not_meet_each_others_prefixes() -> None:
    target = Target("http://127.0.0.1:1", model="m", vocab_size=50)
    (request,) = RaggedLoad(requests=1).make_requests(50)
    bodies = [json.loads(target.encode(request, n).partition(b"\r\n\r\n")[2]) for n in (0, 1)]
    assert bodies[1]["prompt"] == [(token + 1) % 50 for token in bodies[0]["prompt"]]


def test_the_vocabulary_of_a_server_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "_ask", lambda *_: {"data": [{"id": "theirs"}]})
    target = Target("http://127.0.0.1:1")
    assert (target.model, target.vocab_size) == ("theirs", SAFE_VOCABULARY)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "3"], "--concurrency belongs to --server"),
        (["--server", "http://h", "--shape", "gpt2"], "--shape does not go together with --server"),
        (["--server", "http://h", "--new-tokens", "3"], "--new-tokens belongs to --workload"),
        (["--server", "localhost:80"], "give a URL"),
        (["--server", "http://127.0.0.1:1"], "/v1/models"),
    ],
)
def test_wrong_options(options: list[str], said: str, capsys: Capture) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err


# --- random weights -------------------------------------------------------------------------------


def test_an_unknown_shape_says_which_there_are() -> None:
    with pytest.raises(CheckpointError, match="no such shape; there are llama8b"):
        load_tokenizer("random:llama9b")


def test_a_random_model_has_a_chat_template() -> None:
    chat = Chat.from_directory(SHAPE)
    messages = [{"role": "user", "content": "a "}, {"role": "user", "content": "b"}]

    async def prompt() -> str:
        made = await chat.prompt(messages, ToolUse())
        chat.close()
        return made.text

    assert asyncio.run(prompt()) == "a b"


def test_a_url_is_needed() -> None:
    for url in ("", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="give a URL"):
            Server(url)
