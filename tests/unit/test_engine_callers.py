"""What callers do to each other: ids used again, callbacks, threads, engines that share."""

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
import torch

from megatron_async.assembly import build_context
from megatron_async.config import EngineConfig
from megatron_async.context import DynamicInferenceContext
from megatron_async.controller import TextGenerationController
from megatron_async.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError, EngineStoppedError, RequestError
from megatron_async.requests import FinishReason, SamplingParams
from tests.support.engines import DEPTHS, hash_engine
from tests.support.hash_model import HashModel
from tests.support.oracle import Ask, decode_alone


def engine_at(depth: int, **values: Any) -> DynamicInferenceEngine:
    return hash_engine(depth, max_requests=3, block_size_tokens=4, block_count=60, **values)


def params(count: int, **values: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, num_tokens_to_generate=count, termination_id=-1, **values
    )


def drive(engine: DynamicInferenceEngine) -> list[int]:
    """Step to the end; the ids of the requests that ended."""
    ended = []
    while engine.has_unfinished_requests():
        ended += [r.request_id for r in engine.step_modern()["finished_request_records"]]
    return ended


def alone(first: int, count: int) -> list[int]:
    return decode_alone(Ask((first,), count))[0]


# --- streams and ids ------------------------------------------------------------------------------


async def tokens_of(engine: DynamicInferenceEngine, first: int, count: int, **values: Any) -> Any:
    return [o.token_id async for o in engine.stream([first], params(count), **values)]


def test_a_stream_with_an_id_in_use_is_refused_and_harms_nobody() -> None:
    with engine_at(1) as engine:
        future = engine.add_request(5, [1], params(8))
        with pytest.raises(RequestError, match="request_id=5 is in use"):
            asyncio.run(tokens_of(engine, 2, 8, request_id=5))
        drive(engine)
        assert future.result().generated_tokens == alone(1, 8)

        async def both() -> Any:
            streams = (tokens_of(engine, 1, 20, request_id=5) for _ in range(2))
            return await asyncio.gather(*streams, return_exceptions=True)

        first, second = asyncio.run(asyncio.wait_for(both(), 30))
        assert first == alone(1, 20) and isinstance(second, RequestError)
        assert engine._listeners == {}


def test_a_stream_that_has_ended_does_not_abort_who_has_its_id_now() -> None:
    async def main(engine: DynamicInferenceEngine) -> Any:
        stream = engine.stream([1], params(4), request_id=5)
        async for output in stream:
            if output.finish_reason is not None:
                return engine.add_request(5, [2], params(6)), tokens_of(engine, 3, 2)
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
                        accepted.append(engine.add_request(7, [1] * 40, params(1)))

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
        lambda engine: engine.generate([[9]], params(2)),
        lambda engine: engine.suspend() or engine.resume(),
        lambda engine: engine.reset(),
    ],
)
def test_a_callback_may_call_the_engine(
    depth: int, call: Callable[[DynamicInferenceEngine], object]
) -> None:
    counts = (4, 12, 12, 4)
    with engine_at(depth) as engine:
        futures = [engine.add_request(i, [i + 1], params(n)) for i, n in enumerate(counts)]
        futures[0].add_done_callback(lambda _: call(engine))
        drive(engine)
        for i, future in enumerate(futures):
            request = future.result(timeout=0)
            got = request.generated_tokens
            assert got == alone(i + 1, counts[i])[: len(got)]
            assert len(got) == counts[i] or request.finish_reason is FinishReason.ABORT
        engine.scheduler.check_idle()


def test_cancelling_a_future_aborts_its_request() -> None:
    with engine_at(2) as engine:
        futures = [engine.add_request(i, [i + 1], params(50)) for i in range(2)]
        engine.step_modern()
        assert futures[0].cancel()
        record = engine.get_request(0)
        drive(engine)
        assert concurrent.futures.wait(futures, timeout=20).not_done == set()
        assert record.finish_reason is FinishReason.ABORT and record.generated_length < 5
        assert futures[1].result().generated_tokens == alone(2, 50)


def test_a_request_is_aborted_while_the_engine_is_suspended() -> None:
    with engine_at(2) as engine:
        futures = [engine.add_request(i, [i + 1], params(8)) for i in range(2)]
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
        engine.add_request(0, [1], params(2))
        engine.step_modern()
        engine.step_modern()
        barrier(engine)
        assert engine.has_unfinished_requests()
        assert drive(engine) == [0]
        engine.add_request(0, [1], params(2))
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
        engine.add_request(number, [number % 3] * (1 + number % 19), params(1 + number % 13))
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
            thread.join(20)
        assert errors == []
        engine.reset()
        assert engine.scheduler.allocator.free_count == 60


# --- what is shared -------------------------------------------------------------------------------


def test_new_weights_reach_all_engines_over_them() -> None:
    prompts, several = ["def fibonacci(n):\n    if n < 2:\n"], params(20)
    config = EngineConfig(device="cpu", block_size_tokens=4, block_count=200)
    with (
        DynamicInferenceEngine.from_pretrained(
            "tiny", EngineConfig(device="cpu", block_count=100)
        ) as one,
        one.with_config(config) as other,
    ):
        other.generate(prompts, several)
        running = other.add_request(7, prompts[0], several)
        other.step_modern()
        generator = torch.Generator().manual_seed(0)
        state = one.controller.inference_wrapped_model.model.state_dict()
        one.update_weights(
            {
                name: value + 0.05 * torch.randn(value.shape, generator=generator)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            }
        )
        assert (one.weight_version, other.weight_version) == (1, 1)
        drive(other)
        with one.with_config(config) as fresh:
            (wanted,) = fresh.generate(prompts, several)
        (again,) = other.generate(prompts, several)
        assert again.generated_tokens == wanted.generated_tokens
        assert running.result().weight_spans[-1].version == 1


class Failing(HashModel):
    """Replaces its weights and then fails, where it is told to."""

    def update_weights(self, source: Any) -> None:
        super().update_weights(source)
        if source.get("fails"):
            raise RuntimeError("no memory while copying")


def test_an_update_that_fails_on_the_way_stops_all_engines_before_anybody_is_told() -> None:
    model = Failing()
    with engine_at(1, model=model) as one, engine_at(1, model=model) as other:
        raised: list[Any] = []

        def turn_to_the_other(_: Any) -> None:
            with pytest.raises(EngineStoppedError) as error:
                one.generate([[1]], params(8))
            raised.append(error)

        other.add_request(0, [1], params(20)).add_done_callback(turn_to_the_other)
        other.step_modern()
        with pytest.raises(RuntimeError, match="no memory"):
            one.update_weights({"salt": 1, "fails": True})
        assert len(raised) == 1
        with pytest.raises(ConfigError, match="some are new"):
            engine_at(1, model=model)


def test_what_an_update_ended_is_told_outside_of_all_locks() -> None:
    """A callback may wait for another thread, which needs a turn or builds an engine."""
    model = HashModel()
    with engine_at(1, model=model) as one, engine_at(1, model=model) as other:
        results: list[Any] = []

        def wait_for_a_thread(_: Any) -> None:
            def generate() -> None:
                results.append(one.generate([[2]], params(3)))
                with engine_at(1, model=model) as third:
                    results.append(third.generate([[2]], params(3)))

            thread = threading.Thread(target=generate, daemon=True)
            thread.start()
            thread.join(20)

        other.add_request(0, [1], params(2)).add_done_callback(wait_for_a_thread)
        other.step_modern()
        other.step_modern()
        one.update_weights({"salt": 0})
        assert [request.generated_tokens for (request,) in results] == [alone(2, 3)] * 2


def test_an_engine_whose_device_has_failed_stops_alone_at_an_update() -> None:
    model = HashModel()
    with engine_at(1, model=model) as one, engine_at(1, model=model) as other:
        mine, others = (engine.add_request(0, [1], params(20)) for engine in (one, other))
        for engine in (one, other):
            engine.step_modern()
        other.device.enqueue(lambda: 1 / 0, "fails")  # type: ignore[arg-type, return-value]
        while other.device.failure is None:  # type: ignore[attr-defined]
            pass
        assert one.update_weights({"salt": 0}) == 1
        assert isinstance(others.exception(timeout=0), EngineStoppedError)
        drive(one)
        assert mine.result(timeout=0).generated_tokens == alone(1, 20)


def test_an_engine_that_is_built_during_an_update_waits_for_it() -> None:
    begun, end = threading.Event(), threading.Event()

    class Slow(HashModel):
        def update_weights(self, source: Any) -> None:
            begun.set()
            end.wait(20)
            super().update_weights(source)

    model = Slow()
    with engine_at(1, model=model) as one:
        update = threading.Thread(target=one.update_weights, args=({"salt": 0},))
        update.start()
        begun.wait(20)
        built: list[DynamicInferenceEngine] = []
        build = threading.Thread(target=lambda: built.append(engine_at(1, model=model)))
        build.start()
        build.join(0.3)
        assert not built
        end.set()
        build.join(20)
        update.join(20)
        with built[0] as other:
            assert (one.weight_version, other.weight_version) == (1, 0)
            assert other.update_weights({"salt": 0}) == 1 and one.weight_version == 2


def test_parameters_may_change_places() -> None:
    config = EngineConfig(device="cpu", block_count=100)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        state = engine.controller.weights_owner.state_dict()
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        swap = {"decoder.layers.0.": "decoder.layers.1.", "decoder.layers.1.": "decoder.layers.0."}
        swapped = {
            swap[name[:17]] + name[17:]: tensor
            for name, tensor in tensors.items()
            if name[:17] in swap
        }
        wanted = {name: tensor.clone() for name, tensor in swapped.items()}
        assert len(wanted) > 8
        engine.update_weights(swapped)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def test_what_the_garbage_collector_ends_may_abort_requests() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 3, 3)
    try:
        with engine_at(1, debug=False) as engine:

            class Handle:
                def __init__(self, number: int) -> None:
                    self.number, self.cycle = number, self
                    engine.add_request(number, [1], params(3))

                def __del__(self) -> None:
                    engine.abort_request(self.number)

            for number in range(1500):
                Handle(number)
                if number % 3 == 0:
                    engine.step_modern()
            drive(engine)
    finally:
        gc.set_threshold(*thresholds)


def test_a_context_serves_one_engine_alone_and_one_that_suits_it() -> None:
    with engine_at(1) as engine:
        config = engine.config
        with pytest.raises(ConfigError, match="new DynamicInferenceContext"):
            DynamicInferenceEngine(
                TextGenerationController(HashModel()), engine.context, config=config
            )
        model = HashModel()
        good = build_context(model, config, torch.device("cpu"))
        values = {
            "params_dtype": good.params_dtype,
            "num_layers": good.kv_cache.shape[0],
            "kv_channels": good.kv_cache.shape[5],
            "num_attention_heads": good.kv_cache.shape[4],
            "max_sequence_length": good.max_sequence_length,
            "block_count": 20,
            "device": "cpu",
        }
        for name, value in (
            ("params_dtype", torch.float64),
            ("num_layers", 7),
            ("kv_channels", 96),
            ("num_attention_heads", 11),
            ("max_sequence_length", 10**4),
        ):
            context = DynamicInferenceContext(**{**values, name: value})
            with pytest.raises(ConfigError, match=f"{name}={value}"):
                DynamicInferenceEngine(TextGenerationController(model), context, config=config)


@pytest.mark.parametrize(
    ("values", "named"), [({"dtype": "bfloat16"}, "dtype='bfloat16'"), ({"device": "mps"}, "mps")]
)
def test_engines_over_the_same_weights_have_their_device_and_dtype(
    values: dict[str, Any], named: str
) -> None:
    config = EngineConfig(device="cpu", block_count=100)
    with (
        DynamicInferenceEngine.from_pretrained("tiny", config) as engine,
        pytest.raises(ConfigError, match=named),
    ):
        engine.with_config(EngineConfig(block_count=100, **values))


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


def test_a_single_text_is_one_prompt() -> None:
    config = EngineConfig(device="cpu", block_count=100)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        (one,) = engine.generate("import os", params(4))
        (same,) = engine.generate(["import os"], params(4))
        assert one.generated_tokens == same.generated_tokens


def test_none_of_several_prompts_runs_when_one_is_refused() -> None:
    with engine_at(1) as engine:
        with pytest.raises(RequestError, match="stop_token_ids=5"):
            engine.generate([[1], [2]], [params(8), params(8, stop_token_ids=5)])
        assert drive(engine) == [0] and engine.counters.steps_launched == 0


def test_a_length_in_all_takes_the_place_of_the_default_length() -> None:
    given = SamplingParams()
    given.add_attributes({"num_tokens_total": 50})
    assert (given.num_tokens_to_generate, given.num_tokens_total) == (None, 50)
    both = SamplingParams()
    both.add_attributes({"num_tokens_total": 50, "num_tokens_to_generate": 30})
    with pytest.raises(RequestError, match="contradict"):
        both.validate()
