"""Shapes of known models, what a step of them reads, and how fast a GPU's memory delivers it."""

from __future__ import annotations

import pytest
import torch

from megatron_async.inference import bandwidth
from megatron_async.inference.bandwidth import copy_bandwidth
from megatron_async.inference.shapes import SHAPES, build_shape, floor_ms, weight_bytes


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_shape(SHAPES["tiny-llama"], device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("shape", "batch", "floor"),
    [
        ("llama8b", 32, 3.9),
        ("llama8b", 1, 3.5),
        ("qwen0.6b", 32, 0.6),
        ("qwen0.6b", 1, 0.3),
        ("gpt2", 1, 0.06),
    ],
)
def test_floor_of_known_shapes(shape: str, batch: int, floor: float) -> None:
    found = floor_ms(SHAPES[shape], 2, 4.3e12, batch_size=batch, prompt_tokens=128, new_tokens=512)
    assert found == pytest.approx(floor, rel=0.05)


def test_weight_bytes_are_those_of_the_parameters_read(model: torch.nn.Module) -> None:
    read = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "word_embeddings" not in name
    )
    assert weight_bytes(SHAPES["tiny-llama"], 4) == 4 * read


def test_random_weights_are_small_but_not_zero(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert 0.005 < float(parameter.std()) < 0.05, name


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
