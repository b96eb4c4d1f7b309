"""Commands to the engine process: pauses, profiles and new weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import (
    BusyError,
    EngineDeadError,
    EngineGivenUpError,
    MegatronAsyncError,
    QueueFullError,
    RequestError,
)
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.front_end.engine_client import EngineClient
from megatron_async.serving.front_end.metrics import EngineCollector, ServerMetrics
from megatron_async.serving.messages import Control, Endpoint, Kept
from tests.support.served_engine import (
    NoParent,
    client_of,
    control,
    engine_in_thread,
    outputs_of,
    patience,
    run,
    until_idle,
)
from tests.support.small_engine import LONG, RawFrontEnd, served, small_engine


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
