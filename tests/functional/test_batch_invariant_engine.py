"""Recomputation gives the same bits: evictions and prefix hits on the embedded model."""

from __future__ import annotations

import functools

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import EngineCounters
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, config_at


@functools.cache
def embedded(model: str, device: str, dtype: str) -> DynamicInferenceEngine:
    """The weights that the engines of a model share."""
    config = config_at(0, device=device, dtype=dtype, max_requests=1, batch_invariant=True)
    return DynamicInferenceEngine.from_pretrained(model, config)


def decode_under_pressure(
    depth: int, *, roomy: bool, device: str = "cpu", dtype: str = "float32", model: str = "tiny"
) -> tuple[list[list[int]], EngineCounters]:
    """An embedded model with shared prefixes, in a cache that forces evictions or a roomy one."""
    params = [
        SamplingParams(
            num_tokens_to_generate=90, temperature=t, seed=i, termination_id=-1, stop_token_ids=s
        )
        for i, (t, s) in enumerate(((0.0, ()), (0.8, ()), (1.0, (10,)), (0.8, (41, 58))))
    ]
    prompts = ["import os\n\ndef main(argv):\n    " + tail for tail in ("return", "if", "x", "")]
    config = config_at(
        depth,
        device=device,
        dtype=dtype,
        max_requests=16 if roomy else 6,
        block_size_tokens=8,
        block_count=600 if roomy else 50,
        prefill_chunk_tokens=16,
        batch_invariant=True,
        enable_prefix_caching=not roomy,
    )
    with embedded(model, device, dtype).with_config(config) as engine:
        requests = engine.generate(
            [prompt for prompt in prompts for _ in params], params * len(prompts)
        )
        return [request.generated_tokens for request in requests], engine.counters


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return decode_under_pressure(0, roomy=True)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_stay_through_evictions_and_prefix_hits(
    depth: int, expected: list[list[int]]
) -> None:
    tokens, counters = decode_under_pressure(depth, roomy=False)
    assert tokens == expected
    assert counters.evictions > 0
    assert counters.stalls > 0
    assert counters.tokens_cached > 0
    assert counters.tokens_replayed > 0
    assert (counters.tokens_discarded > 0) == (depth > 0)
