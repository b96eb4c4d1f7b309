"""Engines on different GPUs of one process: each on its own, whichever is current."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from megatron_async.device import resolve_device
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.build import build_random_model
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = replace(SHAPES["qwen0.6b"], num_layers=2, vocab_size=4096)
PARAMS = [
    SamplingParams(temperature=t, top_k=k, seed=i, num_tokens_to_generate=40, termination_id=-1)
    for i, (t, k) in enumerate([(0.0, 0), (1.0, 0), (0.8, 20)] * 14)
]
"""42 requests: steps of up to 32 rows, and of more."""


def engine_on(name: str, depth: int) -> DynamicInferenceEngine:
    device = resolve_device(name)
    config = config_at(depth, device=name, max_requests=42, max_sequence_length=256)
    model = build_random_model(SHAPE, device=device, dtype=torch.bfloat16)
    cpu = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # the same on each GPU
            drawn = torch.randn(parameter.shape, generator=cpu) * 0.05
            parameter.copy_(drawn + 1 if parameter.dim() == 1 else drawn)
    wrapper = GPTNetwork(model)
    return DynamicInferenceEngine(ServedModel(network=wrapper), config)


def add_all(engine: DynamicInferenceEngine) -> None:
    for index, params in enumerate(PARAMS):
        engine.add_request(index, [7 + index, 11, 13 * index + 1], params)


def tokens_of(engine: DynamicInferenceEngine) -> dict[int, list[int]]:
    found = {}
    while engine.has_unfinished_requests():
        for request in engine.step_modern()["finished_request_records"]:
            found[request.request_id] = request.generated_tokens
    return found


@pytest.mark.parametrize("depth", (0, 1, 4))
def test_each_gives_the_same_tokens_stepped_in_turns_or_by_threads(depth: int) -> None:
    with engine_on("cuda:0", depth) as alone:
        add_all(alone)
        expected = tokens_of(alone)
    assert len(expected) == len(PARAMS) and len({tuple(t) for t in expected.values()}) > 20
    with engine_on("cuda:1", depth) as second, engine_on("cuda:0", depth) as first:
        engines = (first, second)
        for current in (0, 1):  # which GPU is current does not matter
            torch.cuda.set_device(current)
            found: list[dict[int, list[int]]] = [{}, {}]
            for engine in engines:
                add_all(engine)
            while any(engine.has_unfinished_requests() for engine in engines):
                for engine, into in zip(engines, found, strict=True):
                    if engine.has_unfinished_requests():
                        for request in engine.step_modern()["finished_request_records"]:
                            into[request.request_id] = request.generated_tokens
            assert found == [expected, expected]
            assert torch.cuda.current_device() == current
        for engine in engines:
            add_all(engine)
        found = [{}, {}]
        threads = [
            threading.Thread(target=lambda e=engine, f=into: f.update(tokens_of(e)))
            for engine, into in zip(engines, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected, expected]


def test_weights_change_on_the_gpu_where_they_are() -> None:
    with engine_on("cuda:1", 1) as engine:
        torch.cuda.set_device(0)
        add_all(engine)
        before = tokens_of(engine)
        model = engine.model.network.model
        state = {name: value.clone() for name, value in model.named_parameters()}
        engine.update_weights({name: value.to("cuda:0") * 1.3 for name, value in state.items()})
        add_all(engine)
        changed = tokens_of(engine)
        engine.update_weights(state)
        add_all(engine)
        assert tokens_of(engine) == before != changed
