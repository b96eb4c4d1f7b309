"""Sizes that nobody gave: the cache fits what is free, and is never the reason of a refusal."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.build import runner as runner_module
from megatron_async.build.model import load_model
from megatron_async.build.sizes import (
    DEFAULT_CACHE_GIB,
    FREE_SHARE,
    MOST_DEFAULT_TOKENS,
    STEPS_GIB,
    automata_bytes_of,
    beside_steps,
    sizes_of,
    snapshot_count_of,
)
from megatron_async.build.spec import EngineSpec, draft_limit_of
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import memory
from megatron_async.engine import engine as engine_module
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.errors import CacheTooLargeError, ModelTooLargeError
from megatron_async.models.build import build_model
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.description.memory_traffic import weight_bytes
from megatron_async.models.served import ModelDescription
from megatron_async.runner.memory.cache_sizes import CacheSizes
from tests.unit.checkpoint.test_checkpoint_security import CONFIG

GIB = 2**30
CACHED = KVCacheSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
TOKEN_BYTES = CACHED.token_bytes


def described(longest: int, **more: Any) -> ModelDescription:
    return ModelDescription(vocab_size=100, max_sequence_length=longest, kv_cache=CACHED, **more)


def sizes(longest: int, free: int | None = None, **asked: Any) -> CacheSizes:
    return sizes_of(described(longest), None, EngineConfig(**asked), "cuda", free)


def taken(found: CacheSizes) -> int:
    return found.block_count * found.block_size_tokens * TOKEN_BYTES


@pytest.mark.parametrize("free", (3 * GIB, GIB, GIB // 50))
def test_default_cache_fits_what_is_free(free: int) -> None:
    found = sizes(2**19, free)
    assert 0 < taken(found) <= FREE_SHARE * free
    assert found.max_sequence_length == found.block_count * found.block_size_tokens + 1 < 2**19


def test_default_cache_has_its_size_where_memory_is_free() -> None:
    found = sizes(2**17, 100 * GIB)
    assert taken(found) == DEFAULT_CACHE_GIB["cuda"] * GIB
    assert found.max_sequence_length == 2**17
    assert found == sizes(2**17)


def test_a_length_that_was_shortened_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = sizes(2**19, GIB)
    (said,) = caplog.messages
    assert f"up to {found.max_sequence_length:,} tokens of the model's 524,288" in said
    caplog.clear()
    sizes(2**19, GIB, max_sequence_length=100)
    sizes(2**19, GIB, block_count=40)
    assert not caplog.messages


def test_requests_are_as_long_as_the_cache_that_was_given() -> None:
    assert sizes(10**8, block_count=40).max_sequence_length == 40 * 64 + 1
    assert sizes(10**8, block_count=40, max_sequence_length=9000).max_sequence_length == 9000
    found = sizes(10**8, buffer_size_gb=0.25)
    assert found.max_sequence_length == found.block_count * 64 + 1


@pytest.mark.parametrize("longest", (10**7, 10**8, 2**31 - 1))
def test_a_file_does_not_say_how_much_is_made(longest: int) -> None:
    found = sizes(longest, 1000 * GIB)
    assert found.max_sequence_length == MOST_DEFAULT_TOKENS
    assert taken(found) <= DEFAULT_CACHE_GIB["cuda"] * GIB


def test_a_length_that_was_given_is_named_where_memory_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = sizes(2**19, GIB, max_sequence_length=2**19)
    assert taken(found) >= 2**19 * TOKEN_BYTES
    assert found.asked == "max_sequence_length=524288"
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 80 * GIB)
    monkeypatch.setattr(memory, "free_bytes", lambda device: GIB)
    with (
        pytest.raises(
            CacheTooLargeError, match=r"1.0 GiB free of 80.0 GiB; lower it, or free what"
        ),
        memory.must_fit(torch.device("meta"), 2 * GIB, "the cache", "it"),
    ):
        raise AssertionError


def test_no_room_for_one_block_is_one_line() -> None:
    with pytest.raises(
        CacheTooLargeError, match=r"a block of .* and 0.000 GiB are free; lower blo"
    ):
        sizes(2**19, 1000)


@pytest.mark.parametrize("asked", ({}, {"max_sequence_length": 2**16}))
def test_requests_may_be_longer_than_what_a_draft_model_takes(asked: dict[str, int]) -> None:
    def length(draft: ModelDescription | None, **values: Any) -> int:
        config = EngineConfig(**asked, **values)
        return sizes_of(described(2**17), draft, config, "cuda", None).max_sequence_length

    drafting = {"num_speculative_tokens": 2, "draft_model": "tiny"}
    assert length(described(2**10), **drafting) == length(None)


def test_drafts_end_where_their_model_does() -> None:
    made = sizes_of(described(4096), None, EngineConfig(), "cpu", None)
    for draft, limit in (
        (described(1024), 1024),
        (described(8192), None),
        (described(4096), None),
        (described(8192, rotation_limit=256), 256),
    ):
        assert draft_limit_of(draft, made) == limit


def test_drafts_shorten_a_default_to_where_rotations_change() -> None:
    config = EngineConfig(num_speculative_tokens=2, speculative_method="ngram")
    found = sizes_of(described(2**17, rotation_limit=4096), None, config, "cuda", None)
    assert found.max_sequence_length == 4096


def test_default_snapshots_fit_what_is_free() -> None:
    model = described(2**12, state_bytes=2**20)
    config = EngineConfig(max_requests=1000)
    counts = [
        snapshot_count_of(model, sizes(2**12, max_requests=1000), config, "cuda", free)
        for free in (None, 8 * GIB, GIB, 2**20)
    ]
    assert counts == [4000, 1024, 128, 1]


def test_an_engine_asks_what_is_free_and_a_record_says_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 2**20)
    config = EngineConfig(device="cpu", record=str(tmp_path / "run"), max_requests=2)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        chosen = engine.cache.sizes
    assert chosen.block_count * engine.cache.block_size_bytes <= FREE_SHARE * 2**20
    header = json.loads((tmp_path / "run").read_text().splitlines()[0])["config"]
    assert header["block_count"] == chosen.block_count
    assert read_run(tmp_path / "run").config.max_sequence_length == chosen.max_sequence_length


def test_weights_that_do_not_fit_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: weight_bytes(CONFIG, 4) - 1)
    with pytest.raises(
        ModelTooLargeError, match=r"the weights take .* GiB in float32, and .* free"
    ):
        build_model(CONFIG, device="cpu", dtype=torch.float32)


def test_memory_that_runs_out_while_a_model_is_built_is_one_line() -> None:
    with (
        pytest.raises(ModelTooLargeError, match=r"the weights take 0.0 GiB in .*; take a smaller"),
        memory.weights_must_fit(torch.device("cpu"), 1, torch.float32),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def test_a_default_cache_leaves_the_pool_of_automata() -> None:
    """Which comes with the first request that has a table: on a GPU, of one process, unless it is
    turned off; and it is never the reason of a refusal."""
    asked = EngineConfig(max_requests=2, max_sequence_length=64)
    assert automata_bytes_of(asked, "cpu", 64 * GIB) == 0
    assert automata_bytes_of(asked, "cuda", None) == 256 << 20
    assert automata_bytes_of(asked, "cuda", 64 * GIB) == 256 << 20
    assert automata_bytes_of(asked, "cuda", GIB) == GIB // 16
    assert automata_bytes_of(asked, "cuda", 0) == 0
    for given in (0, 5 * GIB):
        config = replace(asked, guided_automata_bytes=given)
        assert automata_bytes_of(config, "cuda", GIB) == given


@pytest.mark.parametrize(
    ("values", "pool"),
    [
        ({}, 1 << 28),
        ({"guided_automata_bytes": 0}, 0),
        ({"guided_automata_bytes": 1 << 30}, 1 << 30),
        ({"enable_sampling_extras": False}, 0),
    ],
)
def test_a_spec_leaves_the_pool_of_automata(values: dict[str, Any], pool: int) -> None:
    """Blocks of the cache take three quarters of what is left."""
    config = EngineConfig(max_requests=4096, max_sequence_length=2048, device="cpu")
    model = load_model("tiny", config)

    def cache_bytes(free: int, **more: Any) -> int:
        each = replace(config, **more)
        return EngineSpec.of(model, each, "cuda", free=free).cache_bytes

    without = {"guided_automata_bytes": 0}
    free = 8 * GIB
    assert cache_bytes(free, **values) == cache_bytes(free - pool, **without)
    assert pool == 0 or cache_bytes(free, **values) < cache_bytes(free, **without)


def test_a_default_cache_leaves_what_steps_take() -> None:
    """Their code and workspaces, and logits of all rows over the vocabulary."""
    model, few, many = described(2**19), EngineConfig(), EngineConfig(max_requests=4096)
    assert beside_steps(model, few, "cpu", GIB) == GIB
    assert beside_steps(model, few, "cuda", None) is None
    small, large = (beside_steps(model, each, "cuda", 3 * GIB) for each in (few, many))
    assert small is not None and large is not None
    assert large < small <= (3 - STEPS_GIB["cuda"]) * GIB
    drafting = EngineConfig(num_speculative_tokens=4, speculative_method="ngram")
    assert beside_steps(model, drafting, "cuda", 3 * GIB) < small
    words = replace(model, vocab_size=2**18)
    with pytest.raises(CacheTooLargeError, match=r"max_requests=4096 take about .* lower max_requ"):
        beside_steps(words, many, "cuda", 3 * GIB)
    given = EngineConfig(max_requests=4096, block_count=10)  # and what is free may be enough
    assert beside_steps(words, given, "cuda", 3 * GIB) == 0


@pytest.mark.parametrize(
    "error",
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("cuModuleLoadData failed: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    ),
)
@pytest.mark.parametrize("captured", (False, True))
def test_memory_that_runs_out_as_an_engine_starts_is_one_line(
    error: RuntimeError, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*given: Any, **more: Any) -> None:
        if not captured:
            raise error
        try:
            raise error
        finally:  # as the end of a capture that has failed
            raise RuntimeError("operation failed due to a previous error during capture")

    config = EngineConfig(device="cpu", max_requests=2)
    defaults = runner_module.open_runner.__kwdefaults__ | {"make": out_of_memory}
    monkeypatch.setattr(runner_module.open_runner, "__kwdefaults__", defaults)
    said = r"^beside a KV cache of .* GiB the engine's steps do not fit: .* free .* lower max_req"
    with pytest.raises(CacheTooLargeError, match=said):
        DynamicInferenceEngine.from_pretrained("tiny", config)


def test_the_machine_says_what_is_free() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    total = memory.memory_bytes(torch.device("cpu"))
    assert free is not None and total is not None and 2**24 < free <= total
