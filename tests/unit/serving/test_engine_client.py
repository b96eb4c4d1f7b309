"""Requests through the engine process's sockets, against the same requests without them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from safetensors.torch import save_file

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import (
    BusyError,
    ConfigError,
    EngineDeadError,
    EngineGivenUpError,
    MegatronAsyncError,
    QueueFullError,
    RequestError,
)
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.engine_side import output_socket
from megatron_async.serving.front_end.engine_client import EngineClient, gather
from megatron_async.serving.front_end.metrics import EngineCollector, ServerMetrics
from megatron_async.serving.messages import (
    Control,
    Dropped,
    Endpoint,
    FromEngine,
    Generate,
    Hello,
    Kept,
    Output,
)
from tests.support.engines import hash_engine
from tests.support.served_engine import (
    NoParent,
    checked,
    client_of,
    control,
    engine_in_thread,
    engine_process,
    outputs_of,
    patience,
    run,
    until_idle,
)

LONG = {"num_tokens_to_generate": 200, "termination_id": -1, "temperature": 0.0}


def small_engine(depth: int = 1, **values: Any) -> DynamicInferenceEngine:
    """A hash engine whose requests may have 256 tokens, four at the same time."""
    values = {"max_requests": 4, "block_size_tokens": 4, "block_count": 300, **values}
    return hash_engine(depth, **values)


@pytest.fixture(scope="module")
def tiny() -> Iterator[DynamicInferenceEngine]:
    with DynamicInferenceEngine.from_pretrained("tiny", EngineConfig(device="cpu")) as engine:
        yield engine


def served(engine: DynamicInferenceEngine, **options: Any) -> Any:
    """A client of an engine in a thread."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[EngineClient]:
        with engine_in_thread(engine, **options) as endpoint:
            async with client_of(endpoint) as client:
                yield client

    return opened()


# --- parity -----------------------------------------------------------------------------------


def mixed_requests() -> list[tuple[list[int], dict[str, Any]]]:
    """64 prompts, half of them sampled, some with penalties, stop words or an early end."""
    requests = []
    for i in range(64):
        params: dict[str, Any] = {"num_tokens_to_generate": 8 + i % 24, "seed": 1000 + i}
        params["temperature"] = 1.0 if i % 2 else 0.0
        if i % 5 == 0:
            params |= {"repetition_penalty": 1.3, "top_k": 20}
        if i % 7 == 0:
            params |= {"stop_words": ["e", "\n"]}
        prompt = list(f"def function_{i}(x):\n    return x".encode()[: 3 + i % 26])
        requests.append((prompt, params))
    return requests


@contextlib.asynccontextmanager
async def in_a_process(depth: int) -> AsyncIterator[EngineClient]:
    config = {"inference_async_scheduling": depth > 0, "max_requests": 32}
    async with engine_process(config=config) as (_, client):
        yield client


@contextlib.asynccontextmanager
async def in_a_thread(depth: int) -> AsyncIterator[EngineClient]:
    config = EngineConfig(device="cpu", max_requests=32, inference_async_scheduling=depth > 0)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        async with served(engine) as client:
            yield client


@pytest.mark.parametrize(("opened", "depth"), ((in_a_thread, 0), (in_a_process, 1)))
def test_64_requests_at_once_get_what_generate_gives(
    opened: Any, depth: int, tiny: DynamicInferenceEngine
) -> None:
    requests = mixed_requests()
    given = [SamplingParams.deserialize(params) for _, params in requests]
    expected = tiny.generate([prompt for prompt, _ in requests], given)

    async def test() -> None:
        async with opened(depth) as client:
            got = await asyncio.gather(*(outputs_of(client, *request) for request in requests))
            for (output,), record in zip(got, expected, strict=True):
                assert output.token_ids == record.generated_tokens
                assert output.finish_reason == record.finish_reason.value
                assert output.stop_reason == record.stop_reason
                has_words = record.sampling_params.stop_words is not None
                assert output.text == (record.generated_text if has_words else None)
                assert output.usage is not None and output.usage["queue_time"] >= 0
                assert output.usage["prompt_tokens"] == len(record.prompt_tokens)
                assert output.usage["generated_tokens"] == len(record.generated_tokens)
            assert (await client.info()).depth == depth
            await until_idle(client)

    run(test())


def test_sequences_of_a_request_come_under_their_index(tiny: DynamicInferenceEngine) -> None:
    params = {"n": 3, "seed": 5, "num_tokens_to_generate": 12, "top_n_logprobs": 2}
    best = {**params, "best_of": 5, "stop_words": ["zzz"]}

    async def test() -> None:
        with DynamicInferenceEngine.from_pretrained("tiny", tiny.config) as engine:
            async with served(engine) as client:
                for asked in (params, best):
                    (record,) = tiny.generate([[65, 66, 67]], SamplingParams.deserialize(asked))
                    outputs = await outputs_of(client, [65, 66, 67], asked)
                    assert [output.index for output in outputs] == [0, 1, 2]
                    for output, choice in zip(outputs, record.choices, strict=True):
                        assert output.token_ids == choice.generated_tokens
                        assert output.log_probs is not None
                        assert [own for own, _ in output.log_probs] == choice.generated_log_probs
                        tops = [top for _, top in output.log_probs]
                        assert tops == choice.generated_top_n_logprobs
                        has_words = "stop_words" in asked
                        assert output.text == (choice.generated_text if has_words else None)
                    first = outputs[0].prompt_log_probs
                    assert first is not None and outputs[1].prompt_log_probs is None
                    assert [own for own, _ in first] == record.prompt_log_probs
                    assert [top for _, top in first] == record.prompt_top_n_logprobs
                await until_idle(client)

    run(test())


def test_outputs_that_have_gathered_come_as_one() -> None:
    def output(index: int, token: int, **more: Any) -> Output:
        return Output(7, index, [token], **more)

    first = output(0, 1, text="a", log_probs=[(-1.0, {})], prompt_log_probs=[(-3.0, {})])
    last = output(0, 2, text="b", log_probs=[(-2.0, {})], finish_reason="stop", stop_reason=2)
    other = output(1, 9)
    joined, alone = gather([first, other, last])
    assert alone is other
    assert joined == Output(
        7, 0, [1, 2], "ab", [(-1.0, {}), (-2.0, {})], [(-3.0, {})], "stop", 2, None
    )


def test_a_reader_that_is_late_gets_all_tokens_in_one_output() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            request = Generate(client.next_request_id(), [1], checked(LONG))
            async with contextlib.aclosing(client.generate(request)) as outputs:
                first = await anext(outputs)
                await until_idle(client)
                rest = [output async for output in outputs]
            assert len(rest) == 1 and len(first.token_ids) + len(rest[0].token_ids) == 200

    run(test())


def test_an_acknowledged_request_says_so_before_any_step() -> None:
    async def test() -> None:
        async with served(small_engine(), max_queue=3) as client:
            assert (await client.info()).max_sequences == 4 + 3
            await control(client, "suspend")
            request = Generate(client.next_request_id(), [1], checked(LONG), acknowledge=True)
            async with contextlib.aclosing(client.generate(request)) as outputs:
                first = await anext(outputs)
                assert (first.token_ids, first.finish_reason) == ([], None)
                await control(client, "resume")
                tokens = [token async for output in outputs for token in output.token_ids]
            assert len(tokens) == 200
            with pytest.raises(RequestError, match="temperature"):
                await outputs_of(client, [1], {"temperature": -1}, acknowledge=True)
            await until_idle(client)

    run(test())


def test_log_probs_of_a_prompt_survive_an_empty_output_before_them() -> None:
    of_prompt = [(-1.0, {1: -1.0})]
    outputs = [Output(1, 0, []), Output(1, 0, [5], prompt_log_probs=of_prompt)]
    assert gather(outputs) == [Output(1, 0, [5], prompt_log_probs=of_prompt)]


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, said", (
    ({"params": {"temperature": -1}}, "temperature"),
    ({"params": {"colour": 1}}, "colour"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [10**6]}, "token id 1000000"),
    ({"prompt": [1] * 5000}, "256"),
    ({"timeout": 0.0}, "timeout"),
    ({"priority": 10**9}, "priority"),
    ({"params": {"n": "many"}}, "n="),
))  # fmt: skip
def test_a_wrong_request_is_refused_by_name_and_hurts_nobody(
    wrong: dict[str, Any], said: str
) -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            other = asyncio.create_task(outputs_of(client, [2], LONG))
            asked = {"prompt": [1], "params": {}, **wrong}
            with pytest.raises(RequestError, match=said):
                await outputs_of(client, **asked)
            ((output,),) = (await other,)
            assert output.finish_reason == "length"
            await until_idle(client)

    run(test())


def test_leaving_the_iteration_aborts_the_request() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            await control(client, "suspend")
            request = Generate(client.next_request_id(), [1], checked({**LONG, "n": 3}))
            waits = asyncio.create_task(anext(client.generate(request)))
            async with patience():
                while client.snapshot is None or not client.snapshot.gauges["requests_waiting"]:
                    await asyncio.sleep(0.01)
            waits.cancel()
            await asyncio.wait([waits])
            await until_idle(client)  # suspended as it is
            await control(client, "resume")
            async with contextlib.aclosing(client.generate(request)) as outputs:
                await anext(outputs)
            await until_idle(client)

    run(test())


def test_an_aborted_request_ends_with_what_it_has() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            request = Generate(client.next_request_id(), [1], checked({**LONG, "n": 2}))
            outputs = []
            async for output in client.generate(request):
                if not outputs:
                    await client.abort(request.request_id)
                outputs.append(output)
            assert {o.finish_reason for o in gather(outputs)} <= {"abort", "length"}
            await client.abort(request.request_id)  # it has ended
            await until_idle(client)

    run(test())


def test_a_timeout_ends_a_request_with_what_it_has() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            await control(client, "suspend")
            late = asyncio.create_task(outputs_of(client, [1], LONG, timeout=0.01))
            ranked = {**LONG, "best_of": 3, "temperature": 1.0}
            best = asyncio.create_task(outputs_of(client, [1], ranked, timeout=0.02))
            for (output,) in (await late, await best):
                assert (output.finish_reason, output.token_ids) == ("timeout", [])
            await control(client, "resume")
            (output,) = await outputs_of(client, [1], LONG, timeout=1e6)
            assert output.finish_reason == "length"
            await until_idle(client)

    run(test())


def test_more_sequences_than_may_wait_are_refused() -> None:
    async def test() -> None:
        async with served(small_engine(), max_queue=3) as client:
            await control(client, "suspend")
            tasks = [asyncio.create_task(outputs_of(client, [1], LONG)) for _ in range(7)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="7 may"):
                await outputs_of(client, [1], LONG)
            await control(client, "resume")
            await asyncio.gather(*tasks)
            with pytest.raises(QueueFullError):
                await outputs_of(client, [1], {**LONG, "n": 8})
            assert len(await outputs_of(client, [1], {**LONG, "n": 7})) == 7
            await until_idle(client)

    run(test())


# --- front ends -------------------------------------------------------------------------------


class RawFrontEnd:
    """A front end that reads when it is told to."""

    def __init__(self, endpoint: Endpoint, identity: bytes | None = None) -> None:
        self._context = zmq.Context()
        self.outputs, self.commands = (self._context.socket(zmq.DEALER) for _ in range(2))
        for socket in (self.outputs, self.commands):
            socket.setsockopt(zmq.ROUTING_ID, identity or endpoint.secret + b"raw")
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.outputs.connect(endpoint.outputs)
        self.commands.connect(endpoint.commands)

    def send(self, message: Any) -> None:
        self.commands.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        return msgspec.msgpack.decode(self.outputs.recv(), type=FromEngine)

    def greet(self) -> None:
        """Until the engine answers."""
        self.outputs.setsockopt(zmq.RCVTIMEO, 50)
        while True:
            self.send(Hello())
            with contextlib.suppress(zmq.Again):
                self.receive()
                break
        self.outputs.setsockopt(zmq.RCVTIMEO, 60_000)

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_a_front_end_that_does_not_read_is_dropped_and_slows_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_socket, "HIGH_WATER_MARK", 20)

    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            frozen = RawFrontEnd(endpoint)
            await asyncio.to_thread(frozen.greet)
            async with client_of(endpoint) as client:
                await control(client, "suspend")
                for number in range(4):
                    frozen.send(Generate(number, [1], checked(LONG)))
                for _ in range(60):
                    frozen.send(Control(0, "x" * 10**6))  # the answer says that there is none
                async with patience():
                    while client.snapshot is None or client.snapshot.gauges["front_ends"] != 1:
                        await asyncio.sleep(0.01)
                await until_idle(client)  # suspended as it is, so they were aborted
                await control(client, "resume")
                # Fewer tokens than may be unread: where others keep the machine busy all may be.
                (output,) = await outputs_of(client, [2], {**LONG, "num_tokens_to_generate": 10})
                assert len(output.token_ids) == 10
            async with patience():
                while not isinstance(await asyncio.to_thread(frozen.receive), Dropped):
                    pass
            frozen.close()

    run(test())


def test_requests_of_a_front_end_that_is_gone_are_aborted() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "suspend")
                gone = RawFrontEnd(endpoint)
                await asyncio.to_thread(gone.greet)
                gone.send(Generate(0, [1], checked({**LONG, "n": 4})))
                async with patience():
                    while client.snapshot is None or not client.snapshot.gauges["requests_waiting"]:
                        await asyncio.sleep(0.01)
                gone.close()
                await until_idle(client)

    run(test())


def test_a_front_end_without_the_secret_is_not_heard() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            assert stat.S_IMODE(Path(endpoint.directory).stat().st_mode) == 0o700
            stranger = RawFrontEnd(endpoint, b"stranger")
            stranger.send(Hello())
            async with client_of(endpoint) as client:
                await outputs_of(client, [1], LONG)
            assert stranger.outputs.poll(100) == 0
            stranger.close()

    run(test())


def test_nonsense_on_the_socket_is_ignored() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            other = RawFrontEnd(endpoint)
            await asyncio.to_thread(other.greet)
            for frame in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Generate"})):
                other.commands.send(frame)
            other.commands.send_multipart([b"a", b"b"])
            async with client_of(endpoint) as client:
                (output,) = await outputs_of(client, [1], LONG)
                assert output.finish_reason == "length"
            other.close()

    run(test())


def test_without_an_engine_requests_fail_at_once() -> None:
    async def test() -> None:
        endpoint = Endpoint.private()
        client = EngineClient(endpoint)
        await client.connect()
        assert client.state == "starting"
        with pytest.raises(EngineDeadError, match="not started"):
            await outputs_of(client, [1], {})
        with pytest.raises(EngineDeadError):
            await control(client, "suspend")
        with pytest.raises(EngineDeadError):
            await client.info()
        await client.aclose()
        Path(endpoint.directory).rmdir()

    run(test())


# --- controls ---------------------------------------------------------------------------------


def test_a_drained_engine_takes_nothing_until_it_is_resumed() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            runs = asyncio.create_task(outputs_of(client, [1], LONG))
            await asyncio.sleep(0)
            assert await control(client, "drain") == {"in_time": True}
            ((output,),) = (await runs,)
            assert output.finish_reason == "length"
            with pytest.raises(QueueFullError, match="drained"):
                await outputs_of(client, [1], LONG)
            await control(client, "resume")
            await outputs_of(client, [1], LONG)

    run(test())


def test_what_takes_longer_than_a_drain_may_ends_with_what_it_has() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            await control(client, "suspend")
            runs = asyncio.create_task(outputs_of(client, [1], LONG))
            await asyncio.sleep(0)
            assert await control(client, "drain", timeout=0.01) == {"in_time": False}
            ((output,),) = (await runs,)
            assert output.finish_reason == "timeout"
            await until_idle(client)

    run(test())


@pytest.mark.parametrize("mode, reason", (("keep", "length"), ("wait", "length"), ("abort", None)))
def test_a_paused_engine_launches_nothing(mode: str, reason: str | None) -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            runs = asyncio.create_task(outputs_of(client, [1], LONG))
            await asyncio.sleep(0)
            await control(client, "pause", mode=mode)
            waits = asyncio.create_task(outputs_of(client, [2], LONG))
            await asyncio.sleep(0)
            await control(client, "reset_prefix_cache")
            assert not waits.done() and runs.done() == (mode != "keep")
            await control(client, "resume")
            ((output,), (other,)) = (await runs, await waits)
            assert output.finish_reason in ({reason} if reason else {"abort", "length"})
            assert other.finish_reason == "length"
            with pytest.raises(RequestError, match="keep, wait or abort"):
                await control(client, "pause", mode="loudly")
            with pytest.raises(RequestError, match="check_idle"):
                await control(client, "dance")

    run(test())


def test_a_forgotten_prefix_is_computed_again(tiny: DynamicInferenceEngine) -> None:
    async def test() -> None:
        async with served(tiny.with_config(tiny.config)) as client:
            prompt, params = [65] * 200, {"num_tokens_to_generate": 2}
            cached = []
            for forget in (False, False, True):
                if forget:
                    await control(client, "reset_prefix_cache")
                (output,) = await outputs_of(client, prompt, params)
                assert output.usage is not None
                cached.append(output.usage["cached_tokens"])
            assert cached[0] == cached[2] == 0 < cached[1]

    run(test())


def test_new_weights_come_from_a_path(tiny: DynamicInferenceEngine) -> None:
    import megatron_async

    assets = Path(megatron_async.__file__).parent / "assets" / "tiny"

    async def test() -> None:
        with DynamicInferenceEngine.from_pretrained("tiny", tiny.config) as engine:
            async with served(engine) as client:
                runs = asyncio.create_task(outputs_of(client, [65], {"seed": 3}))
                assert await control(client, "weights", path=str(assets)) == {"weight_version": 1}
                ((output,),) = (await runs,)
                (record,) = tiny.generate([[65]], SamplingParams(seed=3))
                assert output.token_ids == record.generated_tokens
                with pytest.raises(RequestError, match="nowhere"):
                    await control(client, "weights", path="/nowhere")

    run(test())


def test_a_profile_shows_steps_for_perfetto(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            path = tmp_path / "trace.json"
            profile = asyncio.create_task(control(client, "profile", path=str(path), steps=20))
            while not profile.done():
                await outputs_of(client, [1], LONG)
            result = await profile
            assert result["steps"] >= 20
            names = {e.get("cat") for e in json.loads(path.read_text())["traceEvents"]}
            assert {"launch", "commit", "plan"} <= names
            with pytest.raises(RequestError, match="steps"):
                await control(client, "profile", path=str(path), steps=0)
            (output,) = await outputs_of(client, [1], LONG)
            assert output.finish_reason == "length"

    run(test())


def profiled_engine(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, threading.Event]:
    """An engine, and what is set when a profile has begun."""
    engine, begun = small_engine(), threading.Event()
    start = engine.device.start_timeline

    def noted() -> None:
        start()
        begun.set()

    monkeypatch.setattr(engine.device, "start_timeline", noted)
    return engine, begun


async def until_no_profile(client: EngineClient) -> None:
    """Another profile can be taken."""
    asked = {"path": "/nowhere/trace", "steps": 1, "timeout": 0.001}
    with pytest.raises(RequestError, match="cannot be written"):
        while True:
            with contextlib.suppress(BusyError):
                await control(client, "profile", **asked)


def test_a_profile_is_aborted_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine, begun = profiled_engine(monkeypatch)
        async with served(engine) as client:  # nothing runs, so a profile lasts
            first = asyncio.create_task(control(client, "profile", path="/x", timeout=None))
            await asyncio.to_thread(begun.wait)
            with pytest.raises(BusyError, match="another profile"):
                await control(client, "profile", path="/x")
            first.cancel()
            await asyncio.wait([first])
            await until_no_profile(client)
            (output,) = await outputs_of(client, [1], LONG)
            assert output.finish_reason == "length"

    run(test())


def test_a_profile_is_aborted_when_its_front_end_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine, begun = profiled_engine(monkeypatch)
        with engine_in_thread(engine) as endpoint:
            gone = RawFrontEnd(endpoint)
            await asyncio.to_thread(gone.greet)
            gone.send(Control(0, "profile", {"path": "/x", "timeout": None}))
            await asyncio.to_thread(begun.wait)
            async with client_of(endpoint) as client:
                gone.close()
                await until_no_profile(client)

    run(test())


def weights_of(tiny: DynamicInferenceEngine) -> dict[str, torch.Tensor]:
    """By their names, in memory of their own."""
    model = tiny.model.weights_owner
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_each_error_of_weights_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        with DynamicInferenceEngine.from_pretrained("tiny", EngineConfig(device="cpu")) as engine:
            tensors = weights_of(engine)
            (name, tensor), *_ = tensors.items()
            nan = tensor.clone()
            nan.view(-1)[0] = float("nan")
            for file, wrong in (("nan", nan), ("shape", tensor[1:].clone())):
                path = tmp_path / f"{file}.safetensors"
                save_file({name: wrong}, path)
            async with served(engine) as client:
                for file, said in (("gone", "gone"), ("nan", name), ("shape", "shape")):
                    path = tmp_path / f"{file}.safetensors"
                    with pytest.raises(RequestError, match=said):
                        await control(client, "weights", path=str(path))
                monkeypatch.setattr(engine, "update_weights", fails)
                with pytest.raises(MegatronAsyncError, match="boom") as failed:
                    await control(client, "weights", path=str(tmp_path))
                assert type(failed.value) is MegatronAsyncError

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("boom")

    run(test())


def test_a_restarted_engine_has_all_weights_that_it_was_given(tmp_path: Path) -> None:
    """One file has all, the other some."""
    config = EngineConfig(device="cpu")
    whole, some = tmp_path / "whole.safetensors", tmp_path / "some.safetensors"
    params = {"seed": 3, "temperature": 1.0, "num_tokens_to_generate": 20}
    told = NoParent()

    async def test() -> None:
        with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
            tensors = weights_of(engine)
            save_file({name: tensor * 0.9 for name, tensor in tensors.items()}, whole)
            name = next(each for each in tensors if "word_embeddings" in each)
            save_file({name: tensors[name].roll(3, 0)}, some)
            with engine_in_thread(engine, parent=told) as endpoint:
                async with client_of(endpoint) as client:
                    (first,) = await outputs_of(client, [65], params)
                    for path in (some, whole, some):
                        await control(client, "weights", path=str(path))
                    (expected,) = await outputs_of(client, [65], params)
                    assert expected.token_ids != first.token_ids
                    await control(client, "pause")
        assert told.kept == Kept((str(whole), str(some)), 3, True)
        with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
            async with served(engine, kept=told.kept, parent=told) as client:
                waits = asyncio.create_task(outputs_of(client, [65], params))
                async with patience():
                    while client.snapshot is None:
                        await asyncio.sleep(0.01)
                assert client.snapshot.gauges["suspended"] == 1
                assert client.snapshot.gauges["weight_version"] == 3
                await control(client, "resume")
                ((output,),) = (await waits,)
                assert output.token_ids == expected.token_ids
                answer = await control(client, "weights", path=str(whole))
                assert answer == {"weight_version": 4}
        assert told.kept == Kept((str(whole),), 4, False)

    run(test())


def test_lost_weights_keep_the_engine_from_serving_until_there_are_new_ones(tmp_path: Path) -> None:
    kept = Kept((str(tmp_path / "gone"),), 7)

    async def test() -> None:
        with DynamicInferenceEngine.from_pretrained("tiny", EngineConfig(device="cpu")) as engine:
            some = tmp_path / "some.safetensors"
            save_file(dict([next(iter(weights_of(engine).items()))]), some)
            async with served(engine, kept=kept) as client:
                for path, version in ((some, 8), (Path("tiny"), 9)):
                    with pytest.raises(EngineDeadError, match=r"gone.* lost.*send new weights"):
                        client.check_ready()
                    with pytest.raises(EngineDeadError, match="lost"):
                        await outputs_of(client, [65], {})
                    answer = await control(client, "weights", path=str(path))
                    assert answer == {"weight_version": version}
                (output,) = await outputs_of(client, [65], {"num_tokens_to_generate": 3})
                assert len(output.token_ids) == 3

    run(test())


def test_a_dead_engine_has_no_gauges() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            client = EngineClient(endpoint)
            await client.connect()
            values = EngineCollector(
                "tiny", lambda: client.snapshot, lambda: client.state == "ready"
            )
            metrics = ServerMetrics("tiny", values)
            async with patience():
                while b"kv_blocks_total" not in metrics.text():
                    await asyncio.sleep(0.01)
        async with patience():
            while client.state == "ready":
                await asyncio.sleep(0.01)
        assert b"kv_blocks" not in metrics.text() and b"num_requests" not in metrics.text()
        assert b'engine_ready{model_name="tiny"} 0.0' in metrics.text()
        await client.aclose()

    run(test())


def test_an_engine_that_was_given_up_says_so() -> None:
    async def test() -> None:
        client = EngineClient(Endpoint.private())
        await client.connect()
        client.give_up("it died too often")
        for asked in (outputs_of(client, [1], {}), control(client, "resume")):
            with pytest.raises(EngineGivenUpError, match="too often"):
                await asked
        with pytest.raises(EngineGivenUpError):
            client.check_ready()
        await client.aclose()

    run(test())


# --- where it is ------------------------------------------------------------------------------


def test_a_restart_makes_its_socket_directory_again() -> None:
    endpoint = Endpoint.private()
    directory = Path(endpoint.directory)
    endpoint.prepare()  # it is there
    endpoint.remove()
    endpoint.prepare()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="this user alone"):
        endpoint.prepare()
    directory.rmdir()
    directory.symlink_to("/tmp")
    with pytest.raises(ConfigError, match="this user alone"):
        endpoint.prepare()
    directory.unlink()


def test_a_path_that_is_too_long_for_a_socket_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no way over TCP, on which other users of the machine could listen."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        Endpoint.private()
    assert list(long.iterdir()) == []


def test_info_is_the_same_by_both_ways() -> None:
    async def test() -> None:
        async with served(small_engine(2)) as client:
            info = await client.info()
            assert info.depth == 2 and info.max_requests == 4 and info.block_count == 300
            answer = await client.command(Control(0, "info"))
            sent = msgspec.msgpack.encode(msgspec.structs.asdict(info))
            assert answer == msgspec.msgpack.decode(sent)

    run(test())
