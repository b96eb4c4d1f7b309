"""The public API: what is refused at the door, aborts, streams, futures, reset."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch

import megatron_async
from megatron_async import megatron_api
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError, RequestError
from megatron_async.models.served import ServedModel
from megatron_async.request.request import FinishReason, Status
from megatron_async.runner.memory.cache_attention import warn_of_slow_attention
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, config_at, random_ask, sampling_params, small_engine
from tests.support.hash_model import MAX_LENGTH, VOCAB_SIZE, HashModel
from tests.support.oracle import Ask, decode_alone

ASK = Ask(prompt=(1, 2, 3), max_new=10)


BAD_REQUESTS = [
    ([], {}, "empty"),
    ("text", {}, "no tokenizer"),
    ([1.5], {}, "1.5"),
    ([VOCAB_SIZE], {}, str(VOCAB_SIZE)),
    ([-1], {}, "-1"),
    (torch.ones(2, 2, dtype=torch.int64), {}, "(2, 2)"),
    ([0] * MAX_LENGTH, {}, f"at most {MAX_LENGTH - 1}"),
    ([1], {"num_tokens_to_generate": MAX_LENGTH}, str(MAX_LENGTH - 1)),
    ([1] * 30, {"num_tokens_to_generate": 30}, "12"),
    ([1], {"temperature": -0.5}, "-0.5"),
    ([1], {"temperature": float("nan")}, "nan"),
    ([1], {"top_p": 1.5}, "1.5"),
    ([1], {"top_k": -3}, "-3"),
    ([1], {"num_tokens_to_generate": 0}, "0"),
    ([1], {"num_tokens_to_generate": 5, "num_tokens_total": 9}, "contradict"),
    ([1, 2, 3], {"num_tokens_to_generate": None, "num_tokens_total": 3}, "at least 4"),
    ([1], {"stop_token_ids": (-4,)}, "-4"),
    ([1], {"stop_token_ids": (2**31,)}, str(2**31)),
    ([1], {"stop_token_ids": (VOCAB_SIZE,)}, f"stop_token_ids has token id {VOCAB_SIZE}"),
    ([1], {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ([1], {"stop_token_ids": 5}, "stop_token_ids=5"),
    ([1], {"termination_id": 2**40}, str(2**40)),
    ([1], {"temperature": 10**400}, "1e+06"),
    ([1], {"top_p": True}, "top_p=True"),
    ([True], {}, "True"),
    ([1], {"seed": 2**63}, str(2**63)),
    ([1], {"termination_id": -2}, "-2"),
    ([1], {"stop_words": ["x"]}, "stop_words"),
]


@pytest.mark.parametrize(("prompt", "params", "named"), BAD_REQUESTS)
def test_bad_request_names_the_value_and_harms_nobody(
    prompt: Any, params: dict[str, Any], named: str
) -> None:
    with small_engine() as engine:
        future = engine.add_request(0, list(ASK.prompt), sampling_params(ASK))
        engine.step_modern()
        with pytest.raises(RequestError) as error:
            engine.add_request(1, prompt, SamplingParams(**params))
        assert named in str(error.value)
        assert "\n" not in str(error.value)
        while engine.has_unfinished_requests():
            engine.step_modern()
    assert future.result().generated_tokens == decode_alone(ASK)[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_any_number_of_own_end_tokens_end_a_request(depth: int) -> None:
    """The device knows the first eight; the host finds the others."""
    own = tuple(range(3, VOCAB_SIZE, 4))
    asks = [Ask((number, 7), 40, stop_ids=own) for number in range(12)]
    expected = [decode_alone(ask) for ask in asks]
    late = [tokens for tokens, reason in expected if reason == "stop" and tokens[-1] > own[7]]
    assert len(own) > 8 and late
    config = config_at(depth, max_requests=3, block_size_tokens=4, block_count=60, debug=True)
    with DynamicInferenceEngine(
        ServedModel(network=HashModel(), eos_token_ids=own), config
    ) as engine:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=40)
        requests = engine.generate([list(ask.prompt) for ask in asks], params)
    assert [(r.generated_tokens, r.finish_reason) for r in requests] == expected
    assert {request.stop_reason for request in requests} == {None}


def test_request_ids_must_be_free() -> None:
    with small_engine() as engine:
        engine.add_request(7, [1], sampling_params(ASK))
        with pytest.raises(RequestError, match="request_id=7 is in use"):
            engine.add_request(7, [1], sampling_params(ASK))
        with pytest.raises(RequestError, match="'a'"):
            engine.add_request("a", [1])  # type: ignore[arg-type]
        engine.reset()
        engine.add_request(7, [1], sampling_params(ASK))
        assert engine.get_request(7).status is Status.WAITING_IN_QUEUE
        engine.reset()
        with pytest.raises(RequestError, match="request_id=7"):
            engine.get_request(7)


def test_controller_serves_one_engine_alone() -> None:
    controller = megatron_async.TextGenerationController(HashModel())
    config = config_at(1, max_requests=2, block_size_tokens=4, block_count=12)
    with megatron_api.DynamicInferenceEngine(controller, None, config=config) as engine:
        future = engine.add_request(0, list(ASK.prompt), sampling_params(ASK))
        engine.step_modern()
        with pytest.raises(ConfigError, match="new TextGenerationController"):
            megatron_api.DynamicInferenceEngine(controller, None, config=config)
        while engine.has_unfinished_requests():
            engine.step_modern()
    assert future.result().generated_tokens == decode_alone(ASK)[0]


def test_a_chunk_longer_than_any_prompt_means_whole_prompts() -> None:
    with small_engine(prefill_chunk_tokens=2**31 - 1, block_count=80) as engine:
        longest = engine.max_sequence_length
        limits = engine.scheduler.limits
        assert (limits.prefill_chunk_tokens, limits.max_tokens) == (longest, 2 * longest)
        engine.generate([[1] * (longest - 2)], sampling_params(Ask(prompt=(1,), max_new=2)))
        assert engine.counters.prefill_chunks == 1


def test_a_forward_is_no_larger_than_a_chunk_in_each_row() -> None:
    with small_engine(prefill_chunk_tokens=8, max_requests=3, max_tokens=10**12) as engine:
        assert engine.scheduler.limits.max_tokens == 24


def test_a_head_size_without_a_kernel_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_slow_attention.cache_clear()
    for _ in range(2):
        warn_of_slow_attention(320)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "head size of 320 is above 256" in record.getMessage()


@pytest.mark.sweep
@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_at_any_moment_gives_everything_back(depth: int) -> None:
    rng = random.Random(depth)
    for moment in range(12):
        asks = [random_ask(rng, max_prompt=20, max_new=20) for _ in range(6)]
        with small_engine(depth, block_count=20, prefill_chunk_tokens=4, jitter_seed=1) as engine:
            futures = [
                engine.add_request(i, list(ask.prompt), sampling_params(ask))
                for i, ask in enumerate(asks)
            ]
            for _ in range(moment):
                engine.step_modern()
            victim = rng.randrange(6)
            was_live = engine.abort_request(victim)
            while engine.has_unfinished_requests():
                engine.step_modern()
            assert engine.scheduler.allocator.free_count == 20
            assert engine.abort_request(victim) is False
        for i, (ask, future) in enumerate(zip(asks, futures, strict=True)):
            request = future.result(timeout=0)
            expected, reason = decode_alone(ask)
            counts = request.counters
            assert counts.launched == counts.committed + counts.discarded
            if i == victim and was_live:
                assert request.finish_reason == FinishReason.ABORT
                assert request.status is Status.FAILED
                assert request.generated_tokens == expected[: len(request.generated_tokens)]
            else:
                assert request.generated_tokens == expected
                assert request.finish_reason == reason


def test_aborted_request_with_tokens_in_flight_emits_none_of_them() -> None:
    with small_engine(4) as engine:
        engine.add_request(0, [1], sampling_params(Ask(prompt=(1,), max_new=40)))
        outputs = []
        for _ in range(10):
            outputs += engine.step_modern()["tokens"]
        engine.abort_request(0)
        while engine.has_unfinished_requests():
            outputs += engine.step_modern()["tokens"]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert outputs[-1].token_id is None
    assert all(output.finish_reason is None for output in outputs[:-1])
    assert engine.counters.tokens_discarded == 4


def test_streams_interleave_and_leaving_one_aborts_it() -> None:
    asks = [Ask(prompt=(i + 1,), max_new=12) for i in range(3)]

    async def consume(engine: DynamicInferenceEngine, ask: Ask) -> list[int | None]:
        return [
            output.token_id
            async for output in engine.stream(list(ask.prompt), sampling_params(ask))
        ]

    async def leave_early(engine: DynamicInferenceEngine) -> None:
        stream = engine.stream([5], sampling_params(Ask(prompt=(5,), max_new=30)))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    async def main(engine: DynamicInferenceEngine) -> list[list[int | None]]:
        results, _ = await asyncio.gather(
            asyncio.gather(*(consume(engine, ask) for ask in asks)), leave_early(engine)
        )
        while engine.has_unfinished_requests():
            await engine.async_step()
        return results

    with small_engine(2) as engine:
        results = asyncio.run(main(engine))
        assert engine.scheduler.allocator.free_count == 12
    assert results == [decode_alone(ask)[0] for ask in asks]


class WaitsForReaders(HashModel):
    """Its forwards, beyond those that may be in flight, wait until every stream has been given the
    tokens of the steps before."""

    def __init__(self, depth: int, streams: int) -> None:
        super().__init__()
        self.depth = depth
        self.forwards = 0
        self.given = [0] * streams
        self.changed = threading.Condition()

    def give(self, stream: int) -> None:
        with self.changed:
            self.given[stream] += 1
            self.changed.notify()

    def forward(self, *arguments: Any) -> Any:
        due = self.forwards - self.depth
        self.forwards += 1
        with self.changed:
            everybody = self.changed.wait_for(lambda: min(self.given) >= due, timeout=30)
        assert everybody, f"a stream has no token of step {due - 1}"
        return super().forward(*arguments)


@pytest.mark.parametrize("depth", DEPTHS)
def test_all_streams_get_their_tokens_before_the_next_step(depth: int) -> None:
    asks = [Ask(prompt=(number + 1,), max_new=10) for number in range(6)]
    model = WaitsForReaders(depth, len(asks))

    async def consume(engine: DynamicInferenceEngine, number: int) -> list[int | None]:
        tokens = []
        ask = asks[number]
        async for output in engine.stream(list(ask.prompt), sampling_params(ask)):
            tokens.append(output.token_id)
            model.give(number)
        return tokens

    async def main(engine: DynamicInferenceEngine) -> list[list[int | None]]:
        engine.suspend()  # until all streams are there: they have their tokens of the same steps
        streams = [asyncio.create_task(consume(engine, number)) for number in range(len(asks))]
        while len(engine.streams) < len(asks):
            await asyncio.sleep(0)
        engine.resume()
        return await asyncio.gather(*streams)

    with small_engine(depth, model=model, max_requests=len(asks), block_count=60) as engine:
        results = asyncio.run(main(engine))
        assert engine.counters.steps_committed == model.forwards == 10
    assert results == [decode_alone(ask)[0] for ask in asks]


def test_futures_can_be_awaited_and_requests_added_from_other_threads() -> None:
    ask = Ask(prompt=(2,), max_new=8)

    async def awaiting(engine: DynamicInferenceEngine) -> list[int]:
        future = engine.add_request(0, list(ask.prompt), sampling_params(ask))
        while not future.done():
            await engine.async_step()
        return (await future).generated_tokens

    with small_engine(1) as engine:
        assert asyncio.run(awaiting(engine)) == decode_alone(ask)[0]
        futures: list[Any] = []

        def add(start: int) -> None:
            for i in range(start, start + 10):
                futures.append(engine.add_request(i, list(ask.prompt), sampling_params(ask)))

        threads = [threading.Thread(target=add, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads) or engine.has_unfinished_requests():
            engine.step_modern()
        assert len(futures) == 40
        assert all(f.result().generated_tokens == decode_alone(ask)[0] for f in futures)


@pytest.mark.parametrize("depth", DEPTHS)
def test_reset_leaves_nothing_behind(depth: int) -> None:
    """A pending forward of the requests before the reset must not reach those after it."""
    ask = Ask(prompt=(9, 9), max_new=15)
    with small_engine(depth) as engine:
        for i in range(5):
            engine.add_request(i, [i + 1], sampling_params(Ask(prompt=(i + 1,), max_new=20)))
        for _ in range(4):
            engine.step_modern()
        engine.reset()
        assert not engine.has_unfinished_requests()
        assert engine.counters.steps_launched == 0
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
        assert request.generated_tokens == decode_alone(ask)[0]


def test_engine_goes_on_when_one_of_several_prompts_is_refused() -> None:
    with small_engine() as engine:
        with pytest.raises(RequestError):
            engine.generate([[1], []], sampling_params(ASK))
        (request,) = engine.generate([list(ASK.prompt)], sampling_params(ASK))
        assert request.generated_tokens == decode_alone(ASK)[0]


def test_seed_decides_and_defaults_are_reproducible() -> None:
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=20, termination_id=-1)
    with small_engine() as engine:
        first = [r.generated_tokens for r in engine.generate([[1], [1]], params)]
    with small_engine() as engine:
        again = [r.generated_tokens for r in engine.generate([[1], [1]], params)]
    with small_engine(random_seed=1) as engine:
        other = [r.generated_tokens for r in engine.generate([[1], [1]], params)]
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_serialised_sampling_parameters_come_back_and_unknown_ones_are_refused() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, seed=4)
    assert SamplingParams.deserialize(params.serialize()) == params
    with pytest.raises(RequestError, match="min_length"):
        params.add_attributes({"min_length": 4})


def test_results_have_megatrons_names() -> None:
    with small_engine() as engine:
        engine.add_request(3, torch.tensor([1, 2]), SamplingParams(num_tokens_to_generate=2))
        finished = []
        while engine.has_unfinished_requests():
            result = engine.step_modern()
            assert set(result) >= {
                "active_request_ids",
                "finished_request_records",
                "step_time",
                "cuda_graph_request_count",
            }
            finished += result["finished_request_records"]
    (request,) = (record.merge() for record in finished)
    assert request.request_id == 3
    assert request.status is Status.COMPLETED
    assert request.generated_length == len(request.generated_tokens) == 2
    assert request.latency is not None and request.latency > 0
    assert len(request.tpot) == 2
    assert [event.type.name for event in request.events] == ["ADD", "FINISH"]
