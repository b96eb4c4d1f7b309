"""What ``bench`` says of the experts that steps read."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.benchmark.measuring import experts
from megatron_async.benchmark.measuring.loads import Request
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.kernels.moe import reference
from megatron_async.models.build import build_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.sampling_params import SamplingParams
from tests.support.decode_rig import small
from tests.unit.models.test_forward_accuracy import draw_weights
from tests.unit.models.test_hybrid_models import CONFIG as HYBRID

EXPERTS, TOP_K, NEW = 12, 2, 6


@pytest.fixture(scope="module")
def model() -> BenchmarkModel:
    config = replace(
        small("llama"), num_layers=3, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_ffn_hidden_size=32, moe_layer_freq=(1, 0, 1),
    )  # fmt: skip
    built = build_model(config, device="cpu", dtype=torch.float32, initialize=False)
    draw_weights(built)
    wrapper = GPTNetwork(built)
    return BenchmarkModel("", config, wrapper, torch.device("cpu"), torch.float32, 0.0)


def texts(count: int, prompt: int = 9) -> tuple[list[Request], list[list[int]]]:
    draw = random.Random(count)
    params = SamplingParams(num_tokens_to_generate=NEW)
    requests = [Request([draw.randrange(90) for _ in range(prompt)], params) for _ in range(count)]
    return requests, [[draw.randrange(90) for _ in range(NEW)] for _ in range(count)]


def test_equal_rows_read_the_experts_of_one(model: BenchmarkModel) -> None:
    requests, generated = texts(1)
    assert experts.experts_read(model, requests, generated, 1) == TOP_K
    assert experts.experts_read(model, requests * 5, generated * 5, 1) == TOP_K
    read = experts.experts_read(model, *texts(5), 1)
    assert read is not None and TOP_K < read <= EXPERTS
    more = experts.experts_read(model, *texts(5), 2)
    assert more is not None and more > read


def test_the_experts_are_those_of_the_decoded_positions(
    model: BenchmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that chooses by the number of the call and the position."""
    calls = []

    def route(logits: torch.Tensor, settings: Any, **_: Any) -> reference.Routing:
        request = len(calls) // 2
        calls.append(logits)
        position = torch.arange(len(logits))
        ids = torch.stack([position % EXPERTS, position * 0 + request], 1)
        return reference.Routing(ids, torch.ones_like(ids).float())

    monkeypatch.setattr(experts, "route", route)
    requests, generated = texts(3, prompt=EXPERTS)
    # Step s reads expert s of the position, and one for each request: 0, 1 and 2.
    steps = NEW - 1
    expected = sum(len({step, 0, 1, 2}) for step in range(steps)) / steps
    read = experts.experts_read(model, requests, generated, 1)
    assert read is not None and math.isclose(read, expected)


def test_a_model_without_experts_reads_none(model: BenchmarkModel) -> None:
    dense = build_model(small("llama"), device="cpu", dtype=torch.float32, initialize=False)
    without = replace(model, network=GPTNetwork(dense))
    assert experts.experts_read(without, *texts(2), 1) is None


def test_layers_without_an_mlp_have_no_experts(model: BenchmarkModel) -> None:
    config = replace(HYBRID, num_moe_experts=EXPERTS, moe_router_topk=TOP_K)
    hybrid = build_model(config, device="cpu", dtype=torch.float32, initialize=False)
    draw_weights(hybrid)
    with_mixers = replace(model, config=config, network=GPTNetwork(hybrid))
    assert experts.experts_read(with_mixers, *texts(1), 1) == TOP_K
