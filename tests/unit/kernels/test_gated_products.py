"""SwiGLU in the product in front of it, of many rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels.gemm import gated
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.layers import decoder_layer
from tests.support.compiled_kernels import HOPPER, LIMIT_OF, compiles, compiling_for

try:
    from megatron_async.kernels.gemm.invariant import wide_triton
except ImportError:
    wide_triton = None  # type: ignore[assignment]

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU with wgmma",
)


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_what_no_kernel_takes_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all; on a GPU few rows, other dtypes, an odd number of columns, and other GPUs."""
    x, weight = torch.zeros(gated.LEAST_ROWS, 16).bfloat16(), torch.zeros(6, 16).bfloat16()
    assert gated.swiglu_of_many(x, weight) is None
    meta = x.to("meta")

    def asked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        return gated.swiglu_of_many(x.as_subclass(OnGpu), weight)  # type: ignore[arg-type]

    monkeypatch.setattr(gated.cuda, "has_wgmma", lambda index: True)
    monkeypatch.setattr(gated.cuda, "sm_count", lambda index: 132)
    assert asked(meta[1:], weight) is None
    assert asked(meta[: gated.TILE_ROWS.start - 1], weight) is None
    assert asked(meta.float(), weight.float()) is None
    assert asked(meta, weight.half()) is None
    assert asked(meta, weight[1:]) is None
    monkeypatch.setattr(gated.cuda, "has_wgmma", lambda index: False)
    assert asked(meta, weight) is None


def test_it_is_taken_where_multiprocessors_are_busy() -> None:
    """As measured: where it was quicker, and where it was not."""
    for rows, columns, is_quicker in (
        (1024, 28672, True), (512, 28672, False), (512, 24576, True), (1024, 14336, False),
        (2048, 14336, True), (1024, 6144, False), (2048, 6144, True), (1024, 37888, True),
        (100_000, 28672, True), (1024, 1024, False), (256, 28672, False), (384, 24576, False),
        (128, 28672, True), (128, 27648, True), (128, 22016, True), (128, 24576, True),
        (113, 28672, True), (112, 28672, False), (129, 28672, False), (128, 14336, False),
        (128, 35840, False), (128, 37888, False), (128, 12288, False), (1, 28672, False),
    ):  # fmt: skip
        tiles = -(-rows // 128) * -(-columns // 256)
        assert gated.is_quicker(rows, tiles, 132) == is_quicker, (rows, columns)


def test_a_gpu_without_the_kernel_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once for each dtype, and the log says so."""
    pytest.importorskip("triton")
    x, weight = torch.zeros(4096, 64).bfloat16(), torch.zeros(8448, 64).bfloat16()
    tried = []

    def fails(*given: object) -> torch.Tensor:
        tried.append(given)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(gated, "_refused", set())
    monkeypatch.setattr(gated.cuda, "has_wgmma", lambda index: True)
    monkeypatch.setattr(gated.cuda, "sm_count", lambda index: 132)
    monkeypatch.setattr(wide_triton, "wide_gated_product", fails)
    monkeypatch.setattr(wide_triton, "takes", lambda a, b: True)
    given = x.as_subclass(OnGpu)  # type: ignore[arg-type]
    assert gated.swiglu_of_many(given, weight) is None
    assert gated.swiglu_of_many(given, weight) is None
    assert len(tried) == len(caplog.records) == 1

    def has_no_memory(*given: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    gated._refused.clear()
    monkeypatch.setattr(wide_triton, "wide_gated_product", has_no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        gated.swiglu_of_many(given, weight)
    assert not gated._refused


@torch.inference_mode()
def test_a_layer_takes_it_where_nobody_watches_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where they compute nothing else: no bias, no other activation, no numbers in FP8."""
    monkeypatch.setattr(gated, "swiglu_of_many", in_torch)
    config = ModelConfig(
        num_layers=1, hidden_size=48, num_attention_heads=3, num_kv_heads=3, head_dim=16,
        ffn_hidden_size=80, vocab_size=7, max_sequence_length=64,
    )  # fmt: skip
    mlp = build_model(config, device="cpu", dtype=torch.float32).decoder.layers[0].mlp
    x = torch.randn(9, 1, 48)
    inner = decoder_layer._swiglu_of_many(mlp, x)
    assert inner is not None
    torch.testing.assert_close(mlp.linear_fc2(inner)[0], mlp(x)[0])
    for module in (mlp, mlp.linear_fc1, mlp.activation_func):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda *_: None)
            assert decoder_layer._swiglu_of_many(mlp, x) is None
            handle.remove()
    mlp.activation_func.__dict__["feeds"] = mlp.linear_fc2
    assert decoder_layer._swiglu_of_many(mlp, x) is None
    for other in ({"activation": "geglu"}, {"mlp_bias": True}):
        model = build_model(replace(config, **other), device="cpu", dtype=torch.float32)
        assert decoder_layer._swiglu_of_many(model.decoder.layers[0].mlp, x) is None


def in_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, weight).float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@compiles
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_it_fits_a_block_of_hopper_and_multiplies_by_wgmma(dtype: torch.dtype) -> None:
    x, weight = torch.empty(300, 1024, dtype=dtype), torch.empty(1032, 1024, dtype=dtype)
    with compiling_for(HOPPER) as found:
        wide_triton.wide_gated_product(x, weight.t(), 132)
    assert found[0].shared <= LIMIT_OF[HOPPER] and "wgmma.mma_async" in found[0].ptx


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("columns", (28672, 6144, 4900))
def test_it_is_that_of_the_product(columns: int, dtype: torch.dtype) -> None:
    """Beside float64; the last tiles have rows and columns that are not there."""
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(1, 4101, 512, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(columns, 512, generator=generator, device="cuda").to(dtype) / 16
    out = gated.swiglu_of_many(x, weight)
    assert out is not None and out.shape == (1, 4101, columns // 2) and out.dtype is dtype
    exact = F.linear(x.double(), weight.double())
    gate, up = exact.to(dtype).double().chunk(2, dim=-1)
    expected = F.silu(gate) * up
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < 4 * torch.finfo(dtype).eps
    assert gated.swiglu_of_many(x[:, : gated.LEAST_ROWS - 1], weight) is None
    step = gated.swiglu_of_many(x[0, :128], weight)
    assert (step is not None) == (columns == 28672)
    if step is not None:
        expected = expected[0, :128]
        error = float((step.double() - expected).norm() / expected.norm())
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.gpu
@on_hopper
def test_it_is_captured_and_reads_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4096, 256, device="cuda").bfloat16()
    weight = torch.randn(8192, 256, device="cuda").bfloat16()
    gated.swiglu_of_many(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated.swiglu_of_many(x, weight)
    for _ in range(2):
        x.normal_()
        weight.normal_()
        graph.replay()
        found = gated.swiglu_of_many(x, weight)
        assert out is not None and found is not None and torch.equal(out, found)
