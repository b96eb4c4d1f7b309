"""What rank 0 plans is what the other ranks build from."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megatron_async.build.model import load_model
from megatron_async.build.spec import EngineSpec
from megatron_async.build.spec_dict import spec_from_dict, spec_to_dict
from megatron_async.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 3, "speculative_method": "ngram"},
        {"depth": 2, "max_requests": 3, "block_size_tokens": 16},
    ],
)
def test_a_spec_is_the_same_after_a_way_through_a_message(more: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", record="run.jsonl", **more)
    spec = EngineSpec.of(load_model("tiny", config), config, "cpu")
    told = spec_from_dict(json.loads(json.dumps(spec_to_dict(spec))))
    # A rank records nothing.
    assert told.config == dataclasses.replace(spec.config, record=None)
    assert dataclasses.replace(told, config=spec.config) == spec
