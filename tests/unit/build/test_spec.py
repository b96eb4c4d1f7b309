"""The spec of an engine on its way to other ranks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_async.build.model import load_model
from megatron_async.build.spec import EngineSpec
from megatron_async.build.spec_dict import spec_from_dict, spec_to_dict
from megatron_async.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    "more",
    [{}, {"num_speculative_tokens": 2}, {"depth": 2, "max_requests": 3, "block_size_tokens": 16}],
)
def test_a_rank_builds_what_rank_0_does(more: dict[str, int]) -> None:
    config = EngineConfig(device="cpu", record="run.jsonl", **more)  # type: ignore[arg-type]
    spec = EngineSpec.of(load_model("tiny", config), config, "cpu")
    told = spec_from_dict(json.loads(json.dumps(spec_to_dict(spec))))
    # A rank records nothing.
    assert told.config == dataclasses.replace(spec.config, record=None)
    assert dataclasses.replace(told, config=spec.config) == spec
