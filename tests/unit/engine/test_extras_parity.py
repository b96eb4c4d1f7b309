"""Sampling extras at every depth and in every event of a request's life, against the oracle.

Each run has a request for each feature, and its witness: without the feature the oracle gives other
tokens. Log-probabilities are the same bits at every depth, and near those of a float64 softmax.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.request.request import DynamicInferenceRequest
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, hash_engine, sampling_params
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.log_probs import check_log_probs
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep

IDS = random.Random(3).sample(range(VOCAB_SIZE), VOCAB_SIZE)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "min_p": {"min_p": 0.4},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.3},
    "negative": {"presence_penalty": -1.5, "frequency_penalty": -0.4, "repetition_penalty": 0.7},
    "bias": {"logit_bias": tuple((token, (-5.0, 3.5)[token % 2]) for token in IDS[:20])},
    "allowed": {"allowed": tuple(sorted(IDS[:12]))},
    "bad_words": {
        "allowed": tuple(sorted(IDS[:4])),
        "bad_words": (*((a, b) for a in IDS[:4] for b in IDS[:2]), (IDS[3],)),
    },
    "min_tokens": {"stop_ids": tuple(IDS[:25]), "min_tokens": 9},
    "many_stops": {"stop_ids": tuple(IDS[:14])},
    "everything": {
        "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.3, "logit_bias": ((5, 2.0), (6, -3.0)),
        "allowed": tuple(sorted(IDS[:50])), "bad_words": ((9,), (4, 5), (1, 2, 3)),
        "min_tokens": 3, "stop_ids": (1, 2, 3), "top_k": 20, "top_p": 0.95,
    },
}  # fmt: skip
EVENTS = (
    "none", "arrivals", "pauses", "evictions", "pressure", "aborts", "prefixes", "updates",
    "drafts", "weights",
)  # fmt: skip
LENGTH = 18


def plain(ask: Ask) -> Ask:
    """The request without what its feature asks of S."""
    return Ask(ask.prompt, ask.max_new, (), ask.temperature, seed=ask.seed)


@functools.cache
def asks() -> dict[str, Ask]:
    """A request for each feature, greedy and sampled, whose feature shows in its tokens."""
    found = {}
    for name, values in FEATURES.items():
        for temperature in (0.0, 1.4):
            if name == "min_p" and not temperature:
                continue
            for seed in range(1000):
                rng = random.Random(seed)
                prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 20)))
                ask = Ask(prompt, LENGTH, temperature=temperature, seed=seed)
                ask = dataclasses.replace(ask, **values)
                tokens, reason = decode_alone(ask)
                bare = dataclasses.replace(ask, min_tokens=0)
                if name == "min_tokens" and tokens == decode_alone(bare)[0]:
                    continue
                if name == "many_stops" and (
                    reason != "stop" or len(tokens) < 3 or tokens[-1] in sorted(ask.stop_ids)[:8]
                ):
                    continue
                shows = name == "plain" or tokens != decode_alone(plain(ask))[0]
                if len(tokens) > 2 and shows:
                    found[f"{name} at {temperature}"] = ask
                    break
            else:
                raise AssertionError(f"{name} at {temperature} has no witness")
    return found


Event = Callable[[DynamicInferenceEngine, int], None]


def no_event(engine: DynamicInferenceEngine, step: int) -> None:
    """Nothing happens."""


def pauses(engine: DynamicInferenceEngine, step: int) -> None:
    for request_id in range(len(asks())):
        if (step + request_id) % 7 == 3:
            engine.pause_request(request_id)
        if (step + request_id) % 7 == 6:
            engine.resume_request(request_id)


def evictions(engine: DynamicInferenceEngine, step: int) -> None:
    if step % 3 == 2:
        engine.evict_request(step // 3 % len(asks()))


def weights(engine: DynamicInferenceEngine, step: int) -> None:
    if step == 6:
        engine.update_weights({"salt": 0})  # the same ones: everything is computed again


def run(
    event: str, depth: int, device: str = "cpu"
) -> tuple[dict[str, DynamicInferenceRequest], Any]:
    """All requests of :func:`asks` through an engine, with ``event``; the counters too."""
    values: dict[str, Any] = {
        "max_requests": 6, "block_size_tokens": 4, "block_count": 120, "prefill_chunk_tokens": 8,
        "jitter_seed": depth if device == "cpu" else None, "device_name": device,
    }  # fmt: skip
    model: HashModel = HashModel(device)
    if event == "pressure":
        values["block_count"] = 24
    if event == "drafts":
        model = DraftingHashModel(2, 0.2)
    during: Event = {"pauses": pauses, "evictions": evictions, "weights": weights}.get(
        event, no_event
    )
    neighbours = event in ("aborts", "updates")
    with hash_engine(depth, model=model, **values) as engine:
        futures = {}

        def add(index: int, name: str, ask: Ask) -> None:
            params = sampling_params(
                ask,
                return_log_probs=index % 3 != 0 and not name.startswith("plain"),
                top_n_logprobs=3 * (index % 3 == 1 and not name.startswith("plain")),
                skip_prompt_log_probs=index % 2 == 0,
                log_probs_mode="processed" if index % 5 == 4 else "raw",
            )
            futures[name] = engine.add_request(index, list(ask.prompt), params)

        # Plain ones last: slots of the others are theirs then.
        listed = list(enumerate(asks().items()))
        listed = [*listed[2:], *listed[:2]]
        if event == "prefixes":
            for index, (_, ask) in listed[::2]:
                engine.add_request(900 + index, list(ask.prompt), sampling_params(plain(ask)))
            while engine.has_unfinished_requests():
                engine.step_modern()
        if neighbours:
            for index, (_, ask) in listed[::2]:
                engine.add_request(900 + index, list(ask.prompt), sampling_params(plain(ask)))
        waiting = list(listed)
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (event != "arrivals" or step % 2 == 0):
                index, (name, ask) = waiting.pop(0)
                add(index, name, ask)
                if event == "arrivals":
                    break
            during(engine, step)
            if event == "aborts" and step % 4 == 3:
                engine.abort_request(900 + step // 4 * 2)
            if event == "updates" and step % 4 == 3:
                engine.update_sampling_params(900 + step // 4 * 2, temperature=0.5, top_k=3)
            engine.step_modern()
            step += 1
            assert step < 2000
        requests = {name: future.result(0) for name, future in futures.items()}
        return requests, engine.counters


def check(requests: dict[str, DynamicInferenceRequest]) -> None:
    for name, ask in asks().items():
        request = requests[name]
        got = request.generated_tokens, request.finish_reason
        assert got == decode_alone(ask), name
        check_log_probs(request)
        counts = request.counters
        assert counts.launched + counts.accepted == counts.committed + counts.discarded


@functools.cache
def serial_log_probs() -> dict[str, Any]:
    return {name: log_probs_of(request) for name, request in run("none", 0)[0].items()}


def log_probs_of(request: DynamicInferenceRequest) -> Any:
    return (
        request.generated_log_probs,
        request.generated_top_n_logprobs,
        request.prompt_log_probs,
        request.prompt_top_n_logprobs,
    )


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_extras_at_every_depth_in_every_event(depth: int, event: str) -> None:
    requests, counters = run(event, depth)
    check(requests)
    for name, request in requests.items():
        assert log_probs_of(request) == serial_log_probs()[name], name
    witness = {
        "evictions": counters.evictions, "weights": counters.evictions, "pauses": counters.pauses,
        "pressure": counters.evictions, "prefixes": counters.tokens_cached,
        "updates": counters.steps_with_control, "drafts": counters.tokens_accepted,
    }  # fmt: skip
    assert witness.get(event, 1) > 0
    if depth and event == "none":
        # Nothing of this is a barrier, and nothing breaks the chain but its end.
        assert counters.barriers == 0
        assert counters.steps_overlapped == counters.steps_committed - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "drafts"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_extras_on_a_gpu_are_the_references_bits(depth: int, event: str) -> None:
    requests, counters = run(event, depth, "cuda")
    check(requests)
    for name, request in requests.items():
        assert log_probs_of(request) == serial_log_probs()[name], name
    if depth and event == "none":
        assert counters.barriers == 0
        assert counters.steps_overlapped == counters.steps_committed - 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_plain_requests_run_plain_steps(depth: int) -> None:
    ask = Ask((1, 2, 3), 12, temperature=1.0, seed=5)
    with hash_engine(depth, max_requests=2, block_count=20) as engine:
        (request,) = engine.generate([list(ask.prompt)], sampling_params(ask))
        assert engine.counters.steps_with_extras == 0
        (other,) = engine.generate([list(ask.prompt)], sampling_params(ask, return_log_probs=True))
        assert engine.counters.steps_with_extras == 12
    assert request.generated_tokens == other.generated_tokens == decode_alone(ask)[0]
