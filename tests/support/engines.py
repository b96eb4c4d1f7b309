"""Small engines for tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.testing_options import TestingOptions
from megatron_async.device.protocol import Device
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.oracle import Ask

DEPTHS = (0, 1, 2, 4)


KNOBS = {field.name for field in dataclasses.fields(TestingOptions)}


def config_at(depth: int, **values: Any) -> EngineConfig:
    """A configuration at ``depth``; 0 is serial. ``values`` may have those of TestingOptions.
    Masks come from the host unless ``values`` have a pool of automata, whose tables are made with
    their requests unless ``values`` say otherwise."""
    values.setdefault("device", "cpu")
    if values.setdefault("guided_automata_bytes", 0):
        values.setdefault("automata_at_once", True)
    knobs = {name: values.pop(name) for name in KNOBS if name in values}
    return EngineConfig(depth=depth, testing=TestingOptions(**knobs), **values)


def hash_engine(
    depth: int,
    *,
    model: Any = None,
    draft: Any = None,
    device: Device | None = None,
    device_name: str = "cpu",
    tokenizer: Any = None,
    **values: Any,
) -> DynamicInferenceEngine:
    """An engine over the hash model, with debug checks on; ``draft`` is a network that drafts for
    it. A request may have all tokens of the model, however small the cache is."""
    values.setdefault("debug", True)
    model = model or HashModel(device_name)
    values.setdefault("max_sequence_length", model.max_sequence_length)
    drafts = getattr(model, "num_speculative_tokens", 0)
    config = config_at(depth, device=device_name, **{"num_speculative_tokens": drafts, **values})
    return DynamicInferenceEngine(
        ServedModel(network=model, tokenizer=tokenizer, draft=draft), config, device=device
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


def sampling_params(ask: Ask, **extra: Any) -> SamplingParams:
    """The API's parameters of an oracle request; ``extra`` are further ones."""
    return SamplingParams(
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        seed=ask.seed,
        num_tokens_to_generate=ask.max_new,
        termination_id=-1,
        stop_token_ids=ask.stop_ids,
        min_p=ask.min_p,
        repetition_penalty=ask.repetition_penalty,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        logit_bias=dict(ask.logit_bias) or None,
        allowed_token_ids=ask.allowed,
        bad_words=ask.bad_words or None,
        min_tokens=ask.min_tokens,
        stop_words=list(ask.stop_words) or None,
        structured_outputs=None if ask.regex is None else {"regex": ask.regex},
        logits_processors=[ban_the_next] if ask.bans_the_next else None,
        **extra,
    )


def ban_the_next(tokens: list[int], logits: Any) -> Any:
    """A logits processor: never the id behind the last one."""
    logits[(tokens[-1] + 1) % VOCAB_SIZE] = -float("inf")
    return logits


def extras_of(rng: random.Random, max_new: int) -> dict[str, Any]:
    """Some of the penalties and filters, as an :class:`Ask` has them."""
    words = tuple(
        tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        for _ in range(rng.randint(1, 30))
    )
    ids = rng.sample(range(VOCAB_SIZE), 40)
    choices: dict[str, Any] = {
        "min_p": rng.choice((0.05, 0.3)),
        "repetition_penalty": rng.choice((0.8, 1.5)),
        "presence_penalty": rng.choice((-1.0, 1.5)),
        "frequency_penalty": rng.choice((-0.5, 0.7)),
        "logit_bias": tuple((token, rng.choice((-4.0, 2.5))) for token in ids[:9]),
        "allowed": tuple(sorted(ids)),
        "bad_words": words,
        "min_tokens": rng.randint(0, max_new // 2),
        "stop_words": tuple(rng.sample(("a", "b1", "é", "}", "12", '":', "e"), 4)),
    }
    names = rng.sample(sorted(choices), rng.randint(1, 4))
    return {name: choices[name] for name in names}


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


def tokens_with_pauses(
    engine: DynamicInferenceEngine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> list[list[int]]:
    """The tokens of at least three requests, of which three are paused for a step each."""
    futures = [
        engine.add_request(n, prompt, of)
        for n, (prompt, of) in enumerate(zip(prompts, params, strict=True))
    ]
    for number in (0, 2, 1):
        for _ in range(4):
            engine.step_modern()
        paused = engine.pause_request(number)
        engine.step_modern()
        if paused:
            engine.resume_request(number)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [future.result().generated_tokens for future in futures]
