"""Configurations: what is refused, and what must fit into memory."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.testing_options import TestingOptions
from megatron_async.device import memory
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CacheTooLargeError, CheckpointError, ConfigError
from tests.support.engines import engine_at, small_engine
from tests.support.hash_model import HashModel

BAD_CONFIGS = [
    ({"max_requests": 0}, "max_requests=0"),
    ({"depth": 2, "inference_async_scheduling": False}, "depth=2 is asynchronous"),
    ({"depth": 0, "inference_async_scheduling": True}, "depth=0 is serial"),
    ({"depth": 65, "inference_async_scheduling": True}, "depth=65"),
    ({"block_size_tokens": 0}, "block_size_tokens=0"),
    ({"buffer_size_gb": -1.0}, "buffer_size_gb=-1.0"),
    ({"buffer_size_gb": 1.0, "block_count": 4}, "contradict"),
    ({"max_requests": 8, "max_tokens": 100}, "max_tokens=100"),
    ({"dtype": "int8"}, "int8"),
    ({"max_sequence_length": 1}, "max_sequence_length=1"),
    ({"random_seed": None}, "random_seed=None"),
    ({"random_seed": 1.5}, "random_seed=1.5"),
    ({"max_requests": 2**16 + 1}, "max_requests=65537"),
    ({"guided_automata_bytes": -1}, "guided_automata_bytes=-1"),
    ({"guided_automata_bytes": 2**36 + 1}, "guided_automata_bytes=68719476737"),
    ({"guided_automata_bytes": 1.5}, "guided_automata_bytes=1.5"),
    ({"buffer_size_gb": math.inf}, "buffer_size_gb=inf"),
    ({"buffer_size_gb": 1e300}, "buffer_size_gb=1e+300"),
    ({"buffer_size_gb": "3"}, "buffer_size_gb='3'"),
    ({"inference_async_scheduling": "false"}, "inference_async_scheduling='false' must be True"),
    ({"enable_prefix_caching": None}, "enable_prefix_caching=None must be True or False"),
    ({"debug": 1}, "debug=1 must be True or False"),
    ({"gemm_autotune_seconds": -1.0}, "gemm_autotune_seconds=-1.0 must be between 0 and 300"),
    ({"gemm_autotune_seconds": math.nan}, "gemm_autotune_seconds=nan must be"),
    ({"gemm_autotune_seconds": True}, "gemm_autotune_seconds=True must be"),
    ({"testing": {"jitter_seed": [1]}}, "jitter_seed=[1]"),
    ({"testing": {"synthetic_acceptance": 1.5}}, "synthetic_acceptance=1.5 must be between 0"),
    ({"testing": {"jitter": 1}}, "unexpected keyword argument 'jitter'"),
    ({"testing": 3}, "testing=3 must be a TestingOptions"),
    *(
        ({name: 2**31}, f"{name}={2**31} must be at most {2**31 - 1}; lower it")
        for name in (
            "block_size_tokens",
            "block_count",
            "prefill_chunk_tokens",
            "max_sequence_length",
        )
    ),
]


@pytest.mark.parametrize(("values", "named"), BAD_CONFIGS)
def test_bad_configuration_names_the_value(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**values)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("values", "depth"),
    [
        ({}, 0),
        ({"depth": 2}, 2),
        ({"depth": 0}, 0),
        ({"inference_async_scheduling": True}, 1),
        ({"inference_async_scheduling": False}, 0),
        ({"inference_async_scheduling": True, "depth": 3}, 3),
        ({"inference_async_scheduling": False, "depth": 0}, 0),
    ],
)
def test_depth_alone_decides_and_its_alias_may_agree(values: dict[str, Any], depth: int) -> None:
    config = EngineConfig(**values)
    assert config.effective_depth == depth
    if values.get("inference_async_scheduling") is None:
        assert dataclasses.replace(config, depth=5).effective_depth == 5


def test_knobs_of_tests_stand_in_one_field() -> None:
    knobs = {field.name for field in dataclasses.fields(TestingOptions)}
    assert knobs == {
        "automata_at_once", "jitter_seed", "speculative_step_costs", "synthetic_acceptance"
    }  # fmt: skip
    assert not knobs & {field.name for field in dataclasses.fields(EngineConfig)}
    given = EngineConfig(testing=TestingOptions(jitter_seed=3))
    assert EngineConfig(**dataclasses.asdict(given)) == given
    assert "synthetic_acceptance" not in inspect.signature(DynamicInferenceEngine).parameters


def test_unknown_configuration_is_an_error() -> None:
    with pytest.raises(TypeError, match="max_request"):
        EngineConfig(max_request=3)  # type: ignore[call-arg]


def test_cache_too_small_for_a_block_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="buffer_size_gb=1e-09"):
        small_engine(block_count=None, buffer_size_gb=1e-9)
    with pytest.raises(ConfigError, match="max_sequence_length=999"):
        small_engine(max_sequence_length=999)


@pytest.mark.parametrize(
    ("values", "named", "lower"),
    [
        ({"block_count": 10**9}, "block_count=1000000000", "block_count or block_size_tokens"),
        (
            {"block_count": None, "buffer_size_gb": 1e6},
            "buffer_size_gb=1000000.0",
            "buffer_size_gb or block_size_tokens",
        ),
        (
            {"max_requests": 2**16, "depth": 64, "max_sequence_length": 256},
            "4259841 slots",
            "max_requests, depth",
        ),
    ],
)
def test_what_exceeds_memory_is_refused_before_it_is_taken(
    values: dict[str, Any], named: str, lower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 10**9)
    values = {**values}
    with pytest.raises(CacheTooLargeError) as error:
        small_engine(values.pop("depth", 0), **values)
    assert named in str(error.value)
    assert "device cpu has 0.9 GiB; lower " + lower in str(error.value)


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        MemoryError("Unable to allocate 20. GiB for an array"),
    ],
)
def test_an_allocator_that_fails_says_what_to_lower(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*shape: int, **_: Any) -> None:
        raise failure

    model = HashModel()
    monkeypatch.setattr(np, "zeros", fail)
    with pytest.raises(CacheTooLargeError, match="less free; lower block_count"):
        small_engine(model=model)


def test_the_machine_says_how_much_memory_it_has() -> None:
    total = memory.memory_bytes(torch.device("cpu"))
    assert total is not None and 2**28 < total < 2**50


def test_integers_of_numpy_configure_an_engine() -> None:
    config = EngineConfig(max_requests=np.int64(4), random_seed=np.int32(7))  # type: ignore[arg-type]
    assert type(config.max_requests) is type(config.random_seed) is int
    assert config == EngineConfig(max_requests=4, random_seed=7)


def test_engines_are_configured_by_a_configuration() -> None:
    with pytest.raises(ConfigError, match="config is a dict; give an EngineConfig"):
        DynamicInferenceEngine.from_pretrained("tiny", {"max_requests": 3})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="path=None must be"):
        DynamicInferenceEngine.from_pretrained(None)  # type: ignore[arg-type]
    with (
        engine_at(1) as engine,
        pytest.raises(ConfigError, match="config is a NoneType; give an EngineConfig"),
    ):
        engine.with_config(None)  # type: ignore[arg-type]
