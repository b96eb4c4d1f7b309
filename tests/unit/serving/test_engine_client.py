"""Requests through the engine process's sockets, against the same requests without them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError, RequestError
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.front_end.engine_client import EngineClient, gather
from megatron_async.serving.messages import Control, Endpoint, Generate, Output
from tests.support.served_engine import (
    checked,
    control,
    engine_process,
    outputs_of,
    run,
    until_idle,
)
from tests.support.small_engine import LONG, served, small_engine

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
                    assert [own for own, _, _ in first] == record.prompt_log_probs
                    assert [top for _, top, _ in first] == record.prompt_top_n_logprobs
                    assert [rank for _, _, rank in first] == record.prompt_token_ranks
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
    shutil.rmtree(directory)
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
