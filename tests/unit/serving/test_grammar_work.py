"""Grammars are compiled beside the loop that takes requests, which others do not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import QueueFullError, RequestError
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.serving.engine_side.grammar_work import MOST_WAITING, GrammarWork
from megatron_async.serving.engine_side.live_requests import ConnectedFrontEnd
from megatron_async.serving.engine_side.sockets import Sockets
from megatron_async.serving.messages import Endpoint, Generate, Output
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import client_of, engine_in_thread, patience, run


def asked_with(request_id: int, **params: Any) -> Generate:
    values = {"num_tokens_to_generate": 3, "temperature": 0.0, "termination_id": -1, **params}
    checked = CheckedParams.of(SamplingParams(**values).checked())
    return Generate(request_id, [1, 2, 3], checked)


def guided(request_id: int) -> Generate:
    return asked_with(request_id, structured_outputs={"regex": "[a-c]{9}"})


# --- in an engine's process -----------------------------------------------------------------------


class SlowCompiler:
    """In place of an engine's: compiles when it may.

    Attributes:
        begun, may_end: it has begun, and may end.
    """

    def __init__(self, compile: Callable[[CheckedParams], None]) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._compile = compile

    def __call__(self, params: CheckedParams) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_SECONDS)
        self._compile(params)


@contextmanager
def served_slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, SlowCompiler]]:
    engine: DynamicInferenceEngine = hash_engine(
        1, max_requests=3, block_size_tokens=4, block_count=60, tokenizer=hash_tokenizer()
    )
    compiler = SlowCompiler(engine.requests.compile_now)
    monkeypatch.setattr(engine.requests, "compile_now", compiler)
    with engine_in_thread(engine) as endpoint:
        yield endpoint, compiler


async def outputs_of(client: Any, asked: Generate) -> list[Output]:
    return [output async for output in client.generate(asked)]


def test_a_request_does_not_wait_for_the_grammar_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(endpoint: Endpoint, compiler: SlowCompiler) -> None:
        async with client_of(endpoint) as client, patience():
            slow = asyncio.ensure_future(outputs_of(client, guided(1)))
            await asyncio.to_thread(compiler.begun.wait, PATIENCE_SECONDS)
            others = await outputs_of(client, asked_with(2))
            assert others[-1].finish_reason == "length" and not slow.done()
            compiler.may_end.set()
            outputs = await slow
        ids = [token for output in outputs for token in output.token_ids]
        assert len(ids) == 3 and set(hash_tokenizer().detokenize(ids)) <= set("abc")

    with served_slowly(monkeypatch) as served:
        run(test(*served))


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(endpoint: Endpoint, compiler: SlowCompiler) -> None:
        async with client_of(endpoint) as client, patience():
            slow = asyncio.ensure_future(outputs_of(client, guided(1)))
            await asyncio.to_thread(compiler.begun.wait, PATIENCE_SECONDS)
            await client.abort(1)
            await outputs_of(client, asked_with(2))  # the abort has come before it
            compiler.may_end.set()
            assert (await slow)[-1].finish_reason == "abort"

    with served_slowly(monkeypatch) as served:
        run(test(*served))


def test_a_grammar_that_cannot_be_compiled_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(endpoint: Endpoint, compiler: SlowCompiler) -> None:
        compiler.may_end.set()
        async with client_of(endpoint) as client, patience():
            wrong = asked_with(1, structured_outputs={"regex": "(a"})
            with pytest.raises(RequestError, match=r"structured_outputs\.regex: unclosed group"):
                await outputs_of(client, wrong)

    with served_slowly(monkeypatch) as served:
        run(test(*served))


# --- by itself ------------------------------------------------------------------------------------


class Woken:
    """Waits until a grammar is done."""

    def __init__(self) -> None:
        self._done = threading.Semaphore(0)

    def __call__(self) -> None:
        self._done.release()

    def wait(self) -> None:
        assert self._done.acquire(timeout=PATIENCE_SECONDS)


def test_what_a_front_end_that_is_gone_has_asked_is_dropped() -> None:
    woken, may_end = Woken(), threading.Event()
    work = GrammarWork(lambda _: assert_waits(may_end), woken)
    gone, other = ConnectedFrontEnd(b"gone"), ConnectedFrontEnd(b"other")
    for front_end in (gone, other):
        work.begin(front_end, guided(1))
    work.forget(gone)
    may_end.set()
    for _ in range(2):
        woken.wait()
    assert [compiled.front_end for compiled in work.take()] == [other]
    assert len(work) == 0 and work.take() == []
    work.close()


def assert_waits(event: threading.Event) -> None:
    assert event.wait(PATIENCE_SECONDS)


def test_the_grammars_that_wait_are_bounded_and_have_ids_of_their_own() -> None:
    may_end = threading.Event()
    work = GrammarWork(lambda _: assert_waits(may_end), lambda: None)
    front_end = ConnectedFrontEnd(b"one")
    work.begin(front_end, guided(0))
    with pytest.raises(RequestError, match="request_id=0 is in use"):
        work.begin(front_end, guided(0))
    for number in range(1, MOST_WAITING):
        work.begin(front_end, guided(number))
    with pytest.raises(QueueFullError):
        work.begin(front_end, guided(MOST_WAITING))
    work.close()
    may_end.set()


def test_an_error_that_nobody_expects_is_the_requests() -> None:
    def broken(_: CheckedParams) -> None:
        raise ZeroDivisionError("no")

    woken = Woken()
    work = GrammarWork(broken, woken)
    work.begin(ConnectedFrontEnd(b"one"), guided(1))
    woken.wait()
    (compiled,) = work.take()
    assert "cannot be compiled" in str(compiled.error)
    work.close()


def test_a_wake_behind_the_poll_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that compiles may be done, and have Python's lock till then, just when a poll of the
    main thread has found nothing."""
    sockets = Sockets(Endpoint(str(tmp_path), b"secret"))
    try:
        assert not sockets.wait(0.0)

        class Late:
            def poll(self, milliseconds: int) -> list[Any]:
                sockets.wake()
                return []

        monkeypatch.setattr(sockets, "_poller", Late())
        assert sockets.wait(0.0)
    finally:
        sockets.hang_up()
        sockets.close()
