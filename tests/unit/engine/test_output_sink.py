"""A sink gets all that the engine's own thread brings, in order, once a step; and what comes with
it: requests without text, the record of a request before its first step."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.engine.requests.output_processor import Taken, TokenOutput
from megatron_async.errors import EngineStoppedError, ReentrantCallError, RequestError
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, engine_at, greedy, hash_engine
from tests.support.hash_model import HashModel
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS


class Collects:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []
        self.finished: list[DynamicInferenceRequest] = []
        self.errors: list[EngineStoppedError] = []
        self.was_inside: list[bool] = []
        self.changed = threading.Condition()
        self.is_inside: Callable[[], bool] = lambda: False

    def deliver(self, taken: Taken) -> None:
        with self.changed:
            self.was_inside.append(self.is_inside())
            self.outputs += taken.outputs
            self.finished += taken.finished
            self.changed.notify_all()

    def fail(self, error: EngineStoppedError) -> None:
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def wait(self, ready: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, PATIENCE_SECONDS)


def collecting(engine: DynamicInferenceEngine) -> Collects:
    sink = Collects()

    def is_inside() -> bool:
        try:
            with engine.lock.mutex:
                engine.lock.check_outside()
        except ReentrantCallError:
            return True
        return False

    sink.is_inside = is_inside
    engine.deliver_to(sink)
    return sink


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_sink_gets_every_token_in_order(depth: int) -> None:
    with engine_at(depth) as engine:
        sink = collecting(engine)
        engine.start()
        futures = [engine.add_request(i, [i + 1], greedy(9 + i)) for i in range(6)]
        for i in range(5):  # others hand out what was in flight
            engine.suspend()
            engine.resume()
            futures[i].result(timeout=PATIENCE_SECONDS)
        sink.wait(lambda: len(sink.finished) == 6)
        for i, future in enumerate(futures):
            record = future.result(timeout=PATIENCE_SECONDS)
            own = [output for output in sink.outputs if output.request_id == i]
            assert [output.token_id for output in own] == record.generated_tokens
            reasons = [output.finish_reason for output in own]
            assert reasons == [None] * (len(own) - 1) + [record.finish_reason]
            assert record.queue_time is not None and record.queue_time <= record.latency
        assert {request.request_id for request in sink.finished} == set(range(6))
        assert not any(sink.was_inside)


def test_a_sink_is_told_that_the_engine_has_stopped() -> None:
    class Fails(HashModel):
        def forward(self, *arguments: Any) -> Any:
            raise ValueError("boom")

    with hash_engine(1, model=Fails(), max_requests=2, block_count=20) as engine:
        sink = collecting(engine)
        engine.start()
        engine.add_request(0, [1], greedy(5))
        sink.wait(lambda: sink.errors)
        assert "boom" in str(sink.errors[0])


def test_steps_by_the_caller_go_to_the_caller() -> None:
    with engine_at(1) as engine:
        sink = collecting(engine)
        assert len(engine.generate([[1]], greedy(5))[0].generated_tokens) == 5
        assert sink.outputs == []


def test_opened_sees_all_sequences_and_can_take_the_request_back() -> None:
    seen: list[list[int]] = []

    def opened(record: DynamicInferenceRequest) -> None:
        seen.append([choice.request_id for choice in record.choices] or [record.request_id])
        if len(seen) == 1:
            raise RequestError("not now")

    with engine_at(1) as engine:
        params = SamplingParams(n=3, num_tokens_to_generate=4, termination_id=-1)
        with pytest.raises(RequestError, match="not now"):
            engine.add_request(7, [1], params, opened=opened)
        assert not engine.has_unfinished_requests()
        future = engine.add_request(7, [1], params, opened=opened)
        other = engine.add_request(8, [1], greedy(2), opened=opened)
        while not (future.done() and other.done()):
            engine.step_modern()
        choices = [choice.request_id for choice in future.result().choices]
        assert seen[1:] == [choices, [8]] and choices[0] == 7 and len(choices) == 3


class CountsStreams:
    """A tokenizer that counts the streams that it makes."""

    def __init__(self) -> None:
        self.streams = 0
        self._tokenizer = hash_tokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def stream(self) -> Any:
        self.streams += 1
        return self._tokenizer.stream()


def test_without_detokenize_only_stop_words_make_text() -> None:
    tokenizer = CountsStreams()
    with engine_at(1, tokenizer=tokenizer) as engine:
        (plain,) = engine.generate([[1]], greedy(12))
        made = tokenizer.streams
        (silent,) = engine.generate([[1]], greedy(12, detokenize=False))
        assert tokenizer.streams == made
        assert silent.generated_tokens == plain.generated_tokens
        assert plain.generated_text and silent.generated_text is None
        word = plain.generated_text[2:4]
        (stopped,) = engine.generate([[1]], greedy(12, detokenize=False, stop_words=[word]))
        assert stopped.generated_text == plain.generated_text[: plain.generated_text.index(word)]


def test_a_run_that_forgets_its_prefixes_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    prompt = list(range(1, 41))
    with engine_at(2, record=str(path)) as engine:
        cached = []
        for forget in (False, False, True):
            if forget:
                engine.reset_prefix_cache()
            cached.append(engine.generate([prompt], greedy(6))[0].counters.cached)
        assert cached[0] == cached[2] == 0 < cached[1]
    assert any(json.loads(line).get("command") == "ResetPrefixCache" for line in path.open())
    run = read_run(path)
    for depth in (0, 2):
        values = {"max_requests": 3, "block_size_tokens": 4, "block_count": 60}
        with hash_engine(depth, **values) as engine:
            assert replay(run, engine).differences == ()
    assert isinstance(run.config, EngineConfig)
