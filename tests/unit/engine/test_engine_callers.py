"""What callers do to each other: ids used again, callbacks, threads, odd arguments."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import RequestError
from megatron_async.request.request import FinishReason
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, drive, engine_at, greedy
from tests.support.hash_tokenizer import VOCAB_SIZE, hash_tokenizer
from tests.support.oracle import Ask, decode_alone
from tests.support.patience import PATIENCE_SECONDS


def alone(first: int, count: int) -> list[int]:
    return decode_alone(Ask((first,), count))[0]


# --- streams and ids ------------------------------------------------------------------------------


async def tokens_of(engine: DynamicInferenceEngine, first: int, count: int, **values: Any) -> Any:
    return [o.token_id async for o in engine.stream([first], greedy(count), **values)]


def test_a_stream_with_an_id_in_use_is_refused_and_harms_nobody() -> None:
    with engine_at(1) as engine:
        future = engine.add_request(5, [1], greedy(8))
        with pytest.raises(RequestError, match="request_id=5 is in use"):
            asyncio.run(tokens_of(engine, 2, 8, request_id=5))
        drive(engine)
        assert future.result().generated_tokens == alone(1, 8)

        async def both() -> Any:
            streams = (tokens_of(engine, 1, 20, request_id=5) for _ in range(2))
            return await asyncio.gather(*streams, return_exceptions=True)

        first, second = asyncio.run(asyncio.wait_for(both(), PATIENCE_SECONDS))
        assert first == alone(1, 20) and isinstance(second, RequestError)
        assert len(engine.streams) == 0


def test_a_stream_that_has_ended_does_not_abort_who_has_its_id_now() -> None:
    async def main(engine: DynamicInferenceEngine) -> Any:
        stream = engine.stream([1], greedy(4), request_id=5)
        async for output in stream:
            if output.finish_reason is not None:
                return engine.add_request(5, [2], greedy(6)), tokens_of(engine, 3, 2)
        raise AssertionError("no end")

    with engine_at(1) as engine:
        future, other = asyncio.run(main(engine))
        assert asyncio.run(other) == alone(3, 2)
        drive(engine)
        assert future.result().finish_reason is FinishReason.LENGTH


def test_one_of_several_threads_gets_an_id() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with engine_at(1, debug=False) as engine:
            for _ in range(30):
                accepted: list[Any] = []
                barrier = threading.Barrier(4)

                def add(accepted: list[Any] = accepted, barrier: Any = barrier) -> None:
                    barrier.wait()
                    with contextlib.suppress(RequestError):
                        accepted.append(engine.add_request(7, [1] * 40, greedy(1)))

                threads = [threading.Thread(target=add) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert drive(engine) == [7] and len(accepted) == 1
    finally:
        sys.setswitchinterval(interval)


# --- futures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.step_modern(),
        lambda engine: engine.generate([[9]], greedy(2)),
        lambda engine: engine.suspend() or engine.resume(),
        lambda engine: engine.reset(),
    ],
)
def test_a_callback_may_call_the_engine(
    depth: int, call: Callable[[DynamicInferenceEngine], object]
) -> None:
    counts = (4, 12, 12, 4)
    with engine_at(depth) as engine:
        futures = [engine.add_request(i, [i + 1], greedy(n)) for i, n in enumerate(counts)]
        futures[0].add_done_callback(lambda _: call(engine))
        drive(engine)
        for i, future in enumerate(futures):
            request = future.result(timeout=0)
            got = request.generated_tokens
            assert got == alone(i + 1, counts[i])[: len(got)]
            assert len(got) == counts[i] or request.finish_reason is FinishReason.ABORT
        engine.scheduler.check_idle()


def test_cancelling_a_future_aborts_its_request(caplog: pytest.LogCaptureFixture) -> None:
    with engine_at(2) as engine:
        futures = [engine.add_request(i, [i + 1], greedy(50)) for i in range(2)]
        engine.step_modern()
        assert futures[0].cancel()
        assert futures[0].cancel() and not caplog.records
        record = engine.get_request(0)
        drive(engine)
        assert concurrent.futures.wait(futures, timeout=PATIENCE_SECONDS).not_done == set()
        assert record.finish_reason is FinishReason.ABORT and record.generated_length < 5
        assert futures[1].result().generated_tokens == alone(2, 50)


def test_a_request_is_aborted_while_the_engine_is_suspended() -> None:
    with engine_at(2) as engine:
        futures = [engine.add_request(i, [i + 1], greedy(8)) for i in range(2)]
        engine.step_modern()
        engine.suspend()
        engine.abort_request(0)
        assert [r.request_id for r in engine.step_modern()["finished_request_records"]] == [0]
        assert not futures[1].done()
        engine.resume()
        drive(engine)
        assert futures[1].result().generated_tokens == alone(2, 8)


# --- what a step hands out ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "barrier",
    [lambda engine: engine.update_weights({"salt": 0}), lambda engine: engine.suspend()],
)
def test_what_a_barrier_commits_is_handed_out_by_the_next_step(
    barrier: Callable[[DynamicInferenceEngine], object],
) -> None:
    with engine_at(2) as engine:
        engine.add_request(0, [1], greedy(2))
        engine.step_modern()
        engine.step_modern()
        barrier(engine)
        assert engine.has_unfinished_requests()
        assert drive(engine) == [0]
        engine.add_request(0, [1], greedy(2))
        engine.resume()
        engine.step_modern()
        engine.step_modern()
        barrier(engine)
        engine.reset()
        assert not engine.has_unfinished_requests()
        assert engine.step_modern()["tokens"] == []


def test_reset_beside_a_thread_that_steps_and_one_that_adds() -> None:
    stop, errors = threading.Event(), []

    def repeat(work: Callable[[int], object]) -> None:
        number = 0
        while not stop.is_set() and not errors:
            try:
                work(number)
            except BaseException as error:
                errors.append(error)
            number += 1

    def add(number: int) -> None:
        engine.add_request(number, [number % 3] * (1 + number % 19), greedy(1 + number % 13))
        if number % 3 == 2:
            stop.wait(5e-3)

    with engine_at(2, debug=False) as engine:
        works = (lambda _: engine.step_modern(), add)
        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for _ in range(60):
            engine.reset()
            stop.wait(1e-3)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert errors == []
        engine.reset()
        assert engine.scheduler.allocator.free_count == 60


def test_what_the_garbage_collector_ends_may_abort_requests() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 3, 3)
    try:
        with engine_at(1, debug=False) as engine:

            class Handle:
                def __init__(self, number: int) -> None:
                    self.number, self.cycle = number, self
                    engine.add_request(number, [1], greedy(3))

                def __del__(self) -> None:
                    engine.abort_request(self.number)

            for number in range(1500):
                Handle(number)
                if number % 3 == 0:
                    engine.step_modern()
            drive(engine)
    finally:
        gc.set_threshold(*thresholds)


# --- what may be given ----------------------------------------------------------------------------


def test_integers_of_numpy_are_integers() -> None:
    with engine_at(1) as engine:
        future = engine.add_request(
            np.int64(3),  # type: ignore[arg-type]
            [np.int32(1)],  # type: ignore[list-item]
            SamplingParams(
                temperature=np.float32(0.0),  # type: ignore[arg-type]
                num_tokens_to_generate=np.int64(6),  # type: ignore[arg-type]
                termination_id=-1,
                top_k=np.int16(4),  # type: ignore[arg-type]
                seed=np.int64(5),  # type: ignore[arg-type]
                stop_token_ids=None,
            ),
        )
        assert drive(engine) == [3]
        request = future.result()
        assert request.generated_tokens == alone(1, 6)
        assert type(request.request_id) is int and type(request.sampling_params.seed) is int
        assert request.sampling_params.stop_token_ids == ()


@pytest.mark.parametrize(
    ("prompts", "named"),
    [({"prompt": "a"}, "dict"), ({"a"}, "set"), (None, "NoneType"), (3, "int")],
)
def test_what_is_no_list_of_prompts_is_refused(prompts: Any, named: str) -> None:
    with engine_at(1) as engine:
        with pytest.raises(RequestError, match=f"prompts is a {named}; give a list"):
            engine.generate(prompts, greedy(2))
        assert not engine.has_unfinished_requests()


def test_prompts_may_come_from_a_generator() -> None:
    with engine_at(1) as engine:
        requests = engine.generate(([number] for number in (1, 2)), greedy(6))
        assert [request.generated_tokens for request in requests] == [alone(1, 6), alone(2, 6)]


@pytest.mark.parametrize("call", ["abort_request", "pause_request", "get_request"])
def test_an_id_that_is_no_integer_is_refused(call: str) -> None:
    with engine_at(1) as engine, pytest.raises(RequestError, match=r"request_id=\[1\]"):
        getattr(engine, call)([1])


def test_a_generator_of_stop_ids_is_refused() -> None:
    with engine_at(1) as engine, pytest.raises(RequestError, match="stop_token_ids=<generator"):
        engine.add_request(0, [1], greedy(2, stop_token_ids=(n for n in (1,))))


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-40, 1e-30])
def test_the_least_top_p_keeps_one_token(top_p: float) -> None:
    with engine_at(1) as engine:
        futures = [
            engine.add_request(
                seed,
                [1],
                SamplingParams(
                    temperature=1.0,
                    top_p=top_p,
                    seed=seed,
                    num_tokens_to_generate=6,
                    termination_id=-1,
                ),
            )
            for seed in range(3)
        ]
        drive(engine)
        assert [future.result().generated_tokens for future in futures] == [alone(1, 6)] * 3


def test_a_single_text_is_one_prompt() -> None:
    config = EngineConfig(device="cpu", block_count=100)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        (one,) = engine.generate("import os", greedy(4))
        (same,) = engine.generate(["import os"], greedy(4))
        assert one.generated_tokens == same.generated_tokens


def test_none_of_several_prompts_runs_when_one_is_refused() -> None:
    with engine_at(1) as engine:
        with pytest.raises(RequestError, match="stop_token_ids=5"):
            engine.generate([[1], [2]], [greedy(8), greedy(8, stop_token_ids=5)])
        assert drive(engine) == [0] and engine.counters.steps_launched == 0


def test_a_length_in_all_takes_the_place_of_the_default_length() -> None:
    given = SamplingParams()
    given.add_attributes({"num_tokens_total": 50})
    assert (given.num_tokens_to_generate, given.num_tokens_total) == (None, 50)
    both = SamplingParams()
    both.add_attributes({"num_tokens_total": 50, "num_tokens_to_generate": 30})
    with pytest.raises(RequestError, match="contradict"):
        both.validate()


class WholeTexts:
    """The methods of megatron-core's tokenizers: none makes text token by token."""

    eod = VOCAB_SIZE - 1

    def __init__(self) -> None:
        self.decoded = 0

    def tokenize(self, text: str) -> list[int]:
        return hash_tokenizer().tokenize(text)

    def detokenize(self, ids: list[int]) -> str:
        self.decoded += 1
        return hash_tokenizer().detokenize(ids)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stream_has_text_whatever_the_tokenizer(depth: int) -> None:
    tokenizer = WholeTexts()

    async def text_of(engine: DynamicInferenceEngine, **values: Any) -> str:
        outputs = [output async for output in engine.stream([3, 5], greedy(20, **values))]
        return "".join(output.text or "" for output in outputs)

    with engine_at(depth, tokenizer=tokenizer) as engine:
        expected = hash_tokenizer().detokenize(decode_alone(Ask((3, 5), 20))[0])
        assert asyncio.run(text_of(engine)) == expected != ""
        word = expected[7:9]
        assert asyncio.run(text_of(engine, stop_words=[word])) == expected.partition(word)[0]
        tokenizer.decoded = 0
        future = engine.add_request(1, [3, 5], greedy(20))
        drive(engine)
        assert future.result().generated_text == expected and tokenizer.decoded <= 2
