"""Shapes of known models, what a step of them reads, and how fast a GPU's memory delivers it."""

from __future__ import annotations

import dataclasses
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from megatron_async.benchmark import runner
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.cli.main import main
from megatron_async.device import bandwidth, memory
from megatron_async.device.bandwidth import copy_bandwidth
from megatron_async.errors import ModelTooLargeError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.made_up_tokenizer import made_up_tokenizer
from megatron_async.models.description.memory_traffic import (
    expected_experts,
    floor_ms,
    mtp_weight_bytes,
    weight_bytes,
)
from megatron_async.models.description.shapes import SHAPES


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_random_model(SHAPES["tiny-llama"], device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        ("llama8b", 32, 3.9),
        ("llama8b", 1, 3.5),
        ("qwen0.6b", 32, 0.6),
        ("qwen0.6b", 1, 0.3),
        ("gpt2", 1, 0.06),
        ("qwen3-30b-a3b", 1, 1.4),
        ("qwen3-30b-a3b", 32, 12.5),
        ("nemotron-h-8b", 1, 3.6),
        ("nemotron-h-8b", 32, 5.1),
    ],
)
def test_floor_of_known_shapes(shape: str, batch: int, expected: float) -> None:
    found = floor_ms(SHAPES[shape], 2, 4.3e12, batch_size=batch, prompt_tokens=128, new_tokens=512)
    assert found == pytest.approx(expected, rel=0.05)


def test_experts_that_are_read_count_alone() -> None:
    config = dataclasses.replace(
        SHAPES["tiny-qwen-moe"], moe_layer_freq=(0, 1), moe_latent_size=32, moe_router_bias=True,
        moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True, mlp_bias=True,
    )  # fmt: skip
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    read = sum(size for name, size in sizes.items() if "word_embeddings" not in name)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert weight_bytes(config, 4) == 4 * read
    assert weight_bytes(config, 4, 2) == 4 * (read - experts * 6 // 8)
    assert expected_experts(config, 1) == 2
    assert expected_experts(config, 2) == pytest.approx(2 + 2 * 6 / 8)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-nemotron-h"])
def test_weight_bytes_are_those_of_the_parameters_read(shape: str) -> None:
    model = build_random_model(SHAPES[shape], device=torch.device("cpu"), dtype=torch.float32)
    read = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "word_embeddings" not in name
    )
    assert weight_bytes(SHAPES[shape], 4) == 4 * read
    behind = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "output_layer" in name or "final" in name
    )
    assert weight_bytes(SHAPES[shape], 4, layer_itemsize=1) == read - behind + 4 * behind


@pytest.mark.parametrize("shape", ("tiny-llama", "gpt2"))
def test_a_draft_reads_a_layer_of_its_own_and_the_output_layer(shape: str) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    sizes = {"num_layers": 1, "ffn_hidden_size": 96, "vocab_size": 56, "mtp_num_layers": 2}
    config = dataclasses.replace(SHAPES[shape], **small, **sizes)
    mtp = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32).mtp
    layer = sum(parameter.numel() for parameter in mtp.layers[1].parameters())
    assert mtp_weight_bytes(config, 4) == 4 * (layer + 56 * 64)
    load = {"batch_size": 3, "prompt_tokens": 10, "new_tokens": 20}
    floors = [floor_ms(config, 4, 1e3, drafts=drafts, **load) for drafts in (0, 1, 2)]
    each = mtp_weight_bytes(config, 4) + 2 * 2 * 16 * 4 * 3 * 20
    assert floors[2] - floors[1] == pytest.approx(floors[1] - floors[0]) == pytest.approx(each)
    # A model that drafts is read whole.
    own = floor_ms(config, 4, 1e3, drafts=2, draft_model=config, **load)
    assert own == pytest.approx(3 * floors[0])


def test_random_weights_are_small_but_not_zero(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert 0.005 < float(parameter.std()) < 0.05, name


def test_bandwidth_is_measured_before_the_model_takes_the_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    order: list[str] = []
    load = runner.load_benchmark_model

    def measure(device: torch.device) -> float:
        order.append(str(device))
        return 1e12

    def load_after(*args: Any, **kwargs: Any) -> BenchmarkModel:
        order.append("model")
        return load(*args, **kwargs)

    monkeypatch.setattr(runner, "resolve_device", lambda name: torch.device("cuda", 3))
    monkeypatch.setattr(
        runner, "environment", lambda device: {"device": str(device), "device_name": "A GPU"}
    )
    monkeypatch.setattr(runner, "copy_bandwidth", measure)
    monkeypatch.setattr(runner, "load_benchmark_model", load_after)
    path = tmp_path / "report.json"
    options = [
        "--shape",
        "tiny-llama",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "24",
        "--depths",
        "1",
        "--rounds",
        "1",
    ]
    assert main(["bench", "--device", "cpu", *options, "--json", str(path)]) == 0
    assert order == ["cuda:3", "model"]
    report = json.loads(path.read_text())
    (row,) = report["results"]
    assert report["bandwidth_bytes_per_second"] == 1e12
    load_of = {"batch_size": 1, "prompt_tokens": 8, "new_tokens": 24}
    assert row["floor_ms"] == floor_ms(SHAPES["tiny-llama"], 4, 1e12, **load_of)
    assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["step_ms_mean"])
    assert "floor at 1.00 TB/s" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_measures_the_bandwidth_of_a_gpu_that_has_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    known = copy_bandwidth(device)
    monkeypatch.setattr(bandwidth, "COPY_BANDWIDTH", {})
    # Other processes may copy too; more than the memory delivers no copy can measure.
    assert 0.02 * known < copy_bandwidth(device) < 1.15 * known


def test_random_weights_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES["tiny-llama"]
    needed = weight_bytes(config, 4)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ModelTooLargeError, match=r"in float32, and device cpu has .* GiB free of "):
        build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)


def test_ranks_read_their_shares_at_the_same_time() -> None:
    """Half of the weights each, or of the experts; stages read theirs for each micro-batch."""
    load: dict[str, Any] = {"batch_size": 4, "prompt_tokens": 8, "new_tokens": 16}

    def floor(config: ModelConfig, **layout: int) -> float:
        return floor_ms(config, 2, 1e9, **load, **layout)

    dense = SHAPES["qwen0.6b"]
    experts = SHAPES["qwen3-30b-a3b"]
    assert floor(dense, tensor=2) == pytest.approx(floor(dense) / 2)
    assert floor(dense, pipeline=2) == pytest.approx(floor(dense) / 2)
    twice = floor(dense, pipeline=2, micro_batches=2)
    assert floor(dense) / 2 < twice < floor(dense), "keys and values are read once"
    assert floor(experts, expert=2) > floor(experts) / 2, "attention is whole on each rank"
    assert floor(experts, tensor=2, expert=2) == pytest.approx(floor(experts) / 2)


class _Doubles:
    """Two ranks with the same parts."""

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        return 2 * partial


def test_parts_are_added_up_here_unless_experts_do_it(model: Any) -> None:
    linear = model.decoder.layers[0].mlp.linear_fc2
    x = torch.randn(3, 1, linear.weight.shape[1])
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patched:
        alone, _ = linear(x)
        patched.setitem(linear.__dict__, "_ranks", _Doubles())
        assert torch.equal(linear(x)[0], 2 * alone)
        patched.setattr(linear, "explicit_expert_comm", True)
        assert torch.equal(linear(x)[0], alone)


def test_a_made_up_vocabulary_is_drawn_as_it_always_was() -> None:
    """Figures of models with random weights go on to be comparable."""
    source, size = random.Random(0), 3000
    characters = string.ascii_letters + string.digits + string.punctuation + "Ġ" * 20
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < size - 1:
        words["".join(source.choices(characters, k=source.randint(2, 8)))] = None
    expected = {word: number for number, word in enumerate([*words, "<end>"])}
    assert made_up_tokenizer(size).vocabulary == expected
