"""What rank 0 plans is what the other ranks build from."""

from __future__ import annotations

import json

import pytest

from megatron_async.build.model import load_model
from megatron_async.build.spec import EngineSpec
from megatron_async.build.spec_dict import spec_from_dict, spec_to_dict
from megatron_async.config.engine_config import EngineConfig


@pytest.mark.parametrize("drafts", (0, 3))
def test_a_spec_is_the_same_after_a_way_through_a_message(drafts: int) -> None:
    config = EngineConfig(
        device="cpu", max_requests=2, num_speculative_tokens=drafts, speculative_method="ngram"
    )
    spec = EngineSpec.of(load_model("tiny", config), config, "cpu")
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec
