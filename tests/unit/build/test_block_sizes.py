"""Tokens of a KV block where nobody says how many: small ones where they cost nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron_async.build.sizes import sizes_of
from megatron_async.cli.main import build_parser
from megatron_async.cli.options.options import engine_config
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.megatron_api.inference_config import InferenceConfig
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.served import ModelDescription
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.sampling_params import SamplingParams

CACHED = KVCacheSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
CHAT_TOKENS = 41


def sizes(block_size: int | None, device: str) -> CacheSizes:
    model = ModelDescription(vocab_size=100, max_sequence_length=2**17, kv_cache=CACHED)
    return sizes_of(model, None, EngineConfig(block_size_tokens=block_size), device, None)


@pytest.mark.parametrize(("device", "block_size"), [("cpu", 16), ("cuda", 64)])
def test_the_device_says_how_large_a_block_is_and_the_cache_keeps_its_bytes(
    device: str, block_size: int
) -> None:
    found = sizes(None, device)
    assert found.block_size_tokens == block_size
    tokens = {size: sizes(size, device).block_count * size for size in (16, 64, 256)}
    assert set(tokens.values()) == {found.block_count * block_size}


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_only_who_answers_chats_leaves_it_to_the_device(command: str) -> None:
    def asked(line: str) -> int | None:
        return engine_config(build_parser().parse_args(line.split()), 0).block_size_tokens

    assert asked(command) is None
    assert asked(f"{command} --inference-dynamic-batching-block-size 256") == 256
    assert asked("generate --prompt a") == EngineConfig().block_size_tokens == 64
    assert InferenceConfig().block_size_tokens == 256


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_the_help_says_the_default_of_each_device(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    assert "(default: 16 on a CPU, 64 on a GPU)" in " ".join(capsys.readouterr().out.split())


def test_a_short_chat_that_is_sent_twice_is_cached_and_the_run_says_its_blocks(
    tmp_path: Path,
) -> None:
    line = "serve --device cpu --inference-dynamic-batching-max-requests 2"
    config = engine_config(build_parser().parse_args(line.split()), 1)
    run = tmp_path / "run"
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=2)
    with DynamicInferenceEngine.from_pretrained(
        "tiny", dataclasses.replace(config, record=str(run))
    ) as engine:
        assert engine.config.block_size_tokens == 16
        cached = [
            engine.generate([list(range(CHAT_TOKENS))], params)[0].num_cached_tokens
            for _ in range(2)
        ]
    assert cached == [0, 32]
    assert json.loads(run.read_text().splitlines()[0])["config"]["block_size_tokens"] == 16
    assert read_run(run).config.block_size_tokens == 16
