"""Skinny GEMMs by themselves: what is timed computes what it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels.gemm.skinny_gemm import scaled_product
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    STORE,
    GemmProblem,
    TileConfig,
)
from megatron_async.kernels.gemm.untuned import timing
from megatron_async.kernels.gemm.untuned.timing import TimedGemm, bytes_needed, random_weights
from tests.support.cuda_kernels import LIMIT, device, on_both, on_gpu, relative_error

__all__ = ["device"]


def needs_a_gpu(test: Callable[[], None]) -> Callable[[], None]:
    for mark in on_gpu:
        test = mark(test)
    return test


@on_both(
    *("norm", "epilogue", "columns", "reader"),
    gpu=[(RMS_NORM, STORE, 0, NO_NORM), (NO_NORM, ADD, 0, RMS_NORM), (NO_NORM, ADD, 0, LAYER_NORM)],
    small=[(NO_NORM, ADD, 128, RMS_NORM)],
)
def test_a_timed_gemm_computes_the_product_and_nothing_else(
    device: torch.device,
    norm: int,
    epilogue: int,
    columns: int,
    reader: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = GemmProblem(8, 128, 256, norm, epilogue, columns)
    monkeypatch.setattr(timing, "ROUND_BYTES", 2 * timing.weight_bytes(problem))
    memory = random_weights(bytes_needed(problem), device)
    if columns:
        draw = torch.randn(2 * 128 * 256, device=device).to(torch.float8_e4m3fn)
        memory.copy_(draw.view(torch.uint8))
    timed = TimedGemm(problem, reader, memory)
    x, weights = timed.x.float(), timed.weights
    assert len(weights) == 2
    if norm != NO_NORM:
        x = F.layer_norm(x, (256,)) if norm == LAYER_NORM else F.rms_norm(x, (256,))
    config = TileConfig(1, 2, 1, 2, 2)
    launch = timed.launcher(config)
    for number in (1, 0):
        launch(number)
        wanted = x @ weights[number].float().t()
        if columns:
            wanted = scaled_product(x, weights[number], torch.ones(128, 2, device=device))
        assert relative_error(timed.out, wanted.double()) < LIMIT

    first = timed.weights.float()
    timed.weights.copy_((-first).to(timed.weights.dtype))
    with pytest.raises(ArithmeticError, match="relative error"):
        timed.launcher(config)


@needs_a_gpu
def test_times_are_of_one_launch() -> None:
    problem = GemmProblem(8, 4096, 4096, RMS_NORM, STORE)
    memory = random_weights(bytes_needed(problem), torch.device("cuda", 0))
    timed = TimedGemm(problem, NO_NORM, memory)
    assert len(timed.weights) * timing.weight_bytes(problem) >= timing.ROUND_BYTES
    assert 1.0 < timed.time_us(TileConfig(1, 8, 1, 6, 5)) < 1000.0


@on_both("epilogue", gpu=[(STORE,), (ADD,)], small=[(STORE,)])
def test_inputs_in_e4m3_meet_weights_that_are_numbers(
    device: torch.device, epilogue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = GemmProblem(32, 128, 256, NO_NORM, epilogue, 256, True)
    monkeypatch.setattr(timing, "ROUND_BYTES", 2 * timing.weight_bytes(problem))
    timed = TimedGemm(problem, RMS_NORM, random_weights(bytes_needed(problem), device))
    timed.launcher(TileConfig(4, 1, 1, 2, 2, stream_x=True, tma=True))(1)
    weight, ones = timed.weights[1], torch.ones(128, 1, device=device)
    assert weight.float().isfinite().all()
    wanted = scaled_product(timed.x.double(), weight, ones)
    assert relative_error(timed.out, wanted) < LIMIT
