"""Long texts leave the event loop, wait in a bounded queue, and are refused by length first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import pytest

from megatron_async.errors import QueueFullError
from megatron_async.serving.front_end.text_work import LONG, MOST_WAITING, SHORT, THREADS, TextWork
from megatron_async.serving.http.errors import ApiError
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer

TOKENIZER = hash_tokenizer()


class NotedTokenizer:
    """Says in which thread it works, once it may.

    Attributes:
        begun: one for each text that a thread has begun.
    """

    longest_token = 4

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.threads: list[str] = []
        self.vocab_size = 10

    def tokenize(self, text: str, add_bos: bool = False, **options: Any) -> list[int]:
        self.begun.release()
        if len(text) > SHORT:
            assert self.may_end.wait(PATIENCE_SECONDS)
        self.threads.append(threading.current_thread().name)
        return [len(text)]

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.threads.append(threading.current_thread().name)
        return "text"

    def token_name(self, token_id: int) -> str:
        self.threads.append(threading.current_thread().name)
        return "name"


def work_of(tokenizer: Any) -> TextWork:
    return TextWork(tokenizer)


def run(work: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await asyncio.wait_for(work, PATIENCE_SECONDS)

    return asyncio.run(wait())


def test_short_texts_stay_and_long_ones_leave_the_loop() -> None:
    tokenizer = NotedTokenizer()
    tokenizer.may_end.set()
    work, many = work_of(tokenizer), SHORT + 1
    here = threading.current_thread().name
    run(work.tokenize("a" * SHORT, 10_000))
    run(work.detokenize([1] * SHORT))
    assert set(tokenizer.threads) == {here}
    tokenizer.threads.clear()
    run(work.tokenize("a" * many, 10_000))
    run(work.detokenize([1] * many))
    run(work.token_names([1] * many))
    assert here not in tokenizer.threads and len(tokenizer.threads) == 2 + many
    work.close()


def test_the_loop_goes_on_while_a_text_is_read() -> None:
    tokenizer = NotedTokenizer()
    work = work_of(tokenizer)

    async def test() -> None:
        long = asyncio.ensure_future(work.tokenize("a" * (LONG + 1), LONG))
        while not tokenizer.begun.acquire(blocking=False):
            await asyncio.sleep(0)
        assert await work.tokenize("ab", 10) == [2]
        between = asyncio.ensure_future(work.tokenize("a" * (SHORT + 1), LONG))
        assert not long.done()
        tokenizer.may_end.set()
        assert (await long, await between) == ([LONG + 1], [SHORT + 1])

    run(test())
    work.close()


def test_texts_of_medium_length_do_not_wait_for_the_longest() -> None:
    tokenizer = NotedTokenizer()
    work = work_of(tokenizer)

    async def test() -> None:
        long = [asyncio.ensure_future(work.tokenize("a" * (LONG + 1), LONG)) for _ in range(9)]
        for _ in range(THREADS):
            assert await asyncio.to_thread(tokenizer.begun.acquire, timeout=PATIENCE_SECONDS)
        other = asyncio.ensure_future(work.tokenize("a" * (SHORT + 1), LONG))
        assert await asyncio.to_thread(tokenizer.begun.acquire, timeout=PATIENCE_SECONDS)
        tokenizer.may_end.set()
        assert await other == [SHORT + 1] and len(await asyncio.gather(*long)) == 9

    run(test())
    work.close()


def test_the_queue_is_bounded() -> None:
    tokenizer = NotedTokenizer()
    work = work_of(tokenizer)

    async def test() -> None:
        text = "a" * (SHORT + 1)
        waiting = [asyncio.ensure_future(work.tokenize(text, LONG)) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await work.tokenize(text, LONG)
        waiting.pop().cancel()
        tokenizer.may_end.set()
        assert await asyncio.gather(*waiting) == [[SHORT + 1]] * (MOST_WAITING - 1)
        assert await work.tokenize(text, LONG) == [SHORT + 1]

    run(test())
    work.close()


def test_a_text_that_no_tokens_can_hold_is_refused_before_it_is_read() -> None:
    tokenizer = NotedTokenizer()
    work = work_of(tokenizer)
    with pytest.raises(ApiError, match="maximum context length is 300 tokens") as raised:
        run(work.tokenize("a" * 1201, 300, field="messages"))
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")
    assert not tokenizer.begun.acquire(blocking=False)
    tokenizer.may_end.set()
    assert run(work.tokenize("a" * 1200, 300)) == [1200]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, tiny_tokenizer()])
def test_long_texts_have_the_ids_of_short_ones(tokenizer: Tokenizer) -> None:
    """Joined from lines, at whose ends no token goes on."""
    line = "ab [1, 2]\n" if tokenizer is not TOKENIZER else "ab[1,2]"
    ids = tokenizer.tokenize(line)
    many = tokenizer.tokenize(line * 2000)
    assert many == ids * 2000
    assert tokenizer.detokenize(many) == line * 2000
    assert tokenizer.longest_token >= max(len(tokenizer.token_bytes(n)) for n in ids)


def test_long_texts_come_back_through_the_server() -> None:
    tokenizer, text = tiny_tokenizer(), "def f(a): b\n" * 200

    def post(path: str, **body: Any) -> Any:
        client = ScriptedClient(tokenizer, ["c"])
        return say(client, path, body).raise_for_status().json()

    found = post("/tokenize", prompt=text, return_token_strs=True)
    assert found["count"] == len(found["token_strs"]) > SHORT
    assert found["token_strs"][0] == tokenizer.token_name(found["tokens"][0])
    assert post("/detokenize", tokens=found["tokens"])["prompt"] == text
    echoed = post("/v1/completions", prompt=found["tokens"], echo=True, max_tokens=1)
    assert echoed["choices"][0]["text"] == text + "c"
