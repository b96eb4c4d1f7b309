"""Small engines for tests."""

from __future__ import annotations

import random
from typing import Any

from megatron_async.config import EngineConfig
from megatron_async.device.protocol import Device
from megatron_async.engine.build import build_context, resolve_device
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.runner.controller import TextGenerationController
from megatron_async.sampling_params import SamplingParams
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.oracle import Ask

DEPTHS = (0, 1, 2, 4)


def config_at(depth: int, **values: Any) -> EngineConfig:
    """A configuration at ``depth``; 0 is serial."""
    values.setdefault("device", "cpu")
    return EngineConfig(
        inference_async_scheduling=depth > 0, depth=depth if depth else None, **values
    )


def hash_engine(
    depth: int,
    *,
    model: Any = None,
    device: Device | None = None,
    device_name: str = "cpu",
    **values: Any,
) -> DynamicInferenceEngine:
    """An engine over the hash model, with debug checks on."""
    values.setdefault("debug", True)
    config = config_at(depth, device=device_name, **values)
    model = model or HashModel(device_name)
    context = build_context(model, config, resolve_device(device_name))
    return DynamicInferenceEngine(
        TextGenerationController(model), context, config=config, device=device
    )


def engine_at(depth: int, **values: Any) -> DynamicInferenceEngine:
    """A hash engine of three rows and 60 small blocks."""
    return hash_engine(depth, max_requests=3, block_size_tokens=4, block_count=60, **values)


def small_engine(depth: int = 1, **values: Any) -> DynamicInferenceEngine:
    """A hash engine of two rows and 12 small blocks, unless ``values`` say otherwise."""
    values = {"max_requests": 2, "block_size_tokens": 4, "block_count": 12, **values}
    return hash_engine(depth, **values)


def greedy(count: int, **values: Any) -> SamplingParams:
    """The ``count`` likeliest tokens, without an end."""
    return SamplingParams(
        temperature=0.0, num_tokens_to_generate=count, termination_id=-1, **values
    )


def drive(engine: DynamicInferenceEngine) -> list[int]:
    """Step to the end; the ids of the requests that ended."""
    ended = []
    while engine.has_unfinished_requests():
        ended += [r.request_id for r in engine.step_modern()["finished_request_records"]]
    return ended


def sampling_params(ask: Ask) -> SamplingParams:
    """The API's parameters of an oracle request."""
    return SamplingParams(
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        seed=ask.seed,
        num_tokens_to_generate=ask.max_new,
        termination_id=-1,
        stop_token_ids=ask.stop_ids,
    )


def random_ask(rng: random.Random, max_prompt: int = 40, max_new: int = 30) -> Ask:
    """A random request: half greedy, a third with stop ids that are likely to hit."""
    sampled = rng.random() < 0.5
    stops = tuple(rng.sample(range(VOCAB_SIZE), 6)) if rng.random() < 0.35 else ()
    return Ask(
        prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max_prompt))),
        max_new=rng.randint(1, max_new),
        stop_ids=stops,
        temperature=rng.choice((0.7, 1.0, 2.0)) if sampled else 0.0,
        top_k=rng.choice((0, 5)) if sampled else 0,
        top_p=rng.choice((0.0, 0.9)) if sampled else 0.0,
        seed=rng.randrange(-(2**63), 2**63),
    )
