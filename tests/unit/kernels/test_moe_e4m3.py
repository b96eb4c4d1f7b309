"""Kernels of a decode step's experts with e4m3 weights, and engines whose experts have such."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint import save_native
from megatron_async.kernels.moe.shape import MoeShape, ScaleColumns
from megatron_async.kernels.moe.tiles import MoeTiles, Tile
from megatron_async.models.fused.report import MLP
from megatron_async.models.moe import layer as moe_layer
from tests.support.cuda_kernels import LIMIT
from tests.support.interpreter import HAS_TRITON, compiled, interpreted, on_devices

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from tests.unit.kernels.test_moe_kernels import (
        DEEPSEEK,
        LARGE,
        RELU2,
        SMALL,
        SWIGLU,
        Case,
        experts_alone,
        model_with_experts,
        settings,
        tiles,
    )

    # A scale a row, of rows that are no multiple of 128; and groups of columns, of which a second
    # layer has three of four and a shared expert begins within one.
    CASES: Any = (
        (SMALL[0][0], 5, {**SMALL[0][2], "scale_columns": ScaleColumns(48, 32)}),
        (SMALL[1][0], 21, {"bias": True, "scale_columns": ScaleColumns(48, 24)}),
        (
            MoeShape(64, 96, settings(6, 2), SWIGLU, shared=2),
            5,
            {
                "tiles": tiles((32, 32), (16, 32, 2)),
                "gate": True,
                "scale_columns": ScaleColumns(32, 32, 64, 64),
            },
        ),
        (
            MoeShape(128, 64, settings(6, 2, **DEEPSEEK), RELU2, shared=2, center=True),
            21,
            {"expert_bias": True, "gate": True, "scale_columns": ScaleColumns(64, 64, 128, 128)},
        ),
        # One of the two weights alone.
        (SMALL[0][0], 5, {**SMALL[0][2], "scale_columns": ScaleColumns(48, 0)}),
        (
            MoeShape(32, 48, settings(4, 2), SWIGLU, shared=1),
            3,
            {"tiles": tiles((32, 32), (16, 16, 2)), "scale_columns": ScaleColumns(0, 16, 0, 48)},
        ),
    )
else:
    CASES = ()


@on_devices
@pytest.mark.parametrize(("shape", "rows", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_layers(
    device: str, dtype: torch.dtype, shape: Any, rows: int, options: dict[str, Any]
) -> None:
    case = Case(shape, rows, device, dtype, **options)
    if dtype is torch.float32:
        case.check()
    assert case.of_experts() < (1e-6 if dtype is torch.float32 else 2 * LIMIT)


def test_a_step_has_one_scale() -> None:
    def steps(*columns: int, inner: int = 96, shared: int = 2) -> tuple[int, int]:
        shape = MoeShape(128, inner, settings(8, 2), SWIGLU, shared)
        return replace(shape, scale_columns=ScaleColumns(*columns)).scale_steps

    assert steps(128, 96, 128, 192) == (0, 0) == steps(128, 128, inner=128, shared=0)
    assert steps(128, 96, 64, 192) == (64, 0) == steps(64, 96, 128, 192)
    assert steps(128, 32, 128, 192) == (0, 32) == steps(128, 96, 128, 64)
    assert steps(128, 64, 128, 128, inner=128) == (0, 64)
    assert MoeShape(128, 96, settings(8, 2), SWIGLU, 2).scale_steps == (0, 0)
    assert steps(0, 32, 0, 64) == (0, 32) and steps(64, 0, 128, 0) == (64, 0)


def scale_columns(shape: Any, of_group: int | None) -> ScaleColumns:
    """A scale for ``of_group`` columns, or what of them divides a row; None is for all of a row."""
    rows = shape.hidden, shape.inner, shape.hidden, shape.shared * shape.inner
    found = [each if of_group is None else next(
        size for size in (of_group, 64, 32) if each % size == 0) for each in rows]  # fmt: skip
    return ScaleColumns(*found[: 4 if shape.shared else 2])


@pytest.mark.parametrize("of_group", [None, 128])
@pytest.mark.parametrize("rows", [1, 7, 32, 33, 64])
@pytest.mark.parametrize("name", LARGE if HAS_TRITON else ())
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_large_layers(device: str, name: str, rows: int, of_group: int | None) -> None:
    columns = scale_columns(LARGE[name], of_group)
    case = Case(
        LARGE[name], rows, device, torch.bfloat16, bias=name == "gpt-oss", scale_columns=columns
    )
    case.check()
    assert case.of_experts() < 2 * LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("of_group", [None, 128])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_swapped_operands_on_tensor_cores(device: str, of_group: int | None) -> None:
    swapped = MoeTiles(Tile(64, 128, 3, swap=True), Tile(64, 64, 4, splits=4, swap=True))
    shape = LARGE["qwen3-30b-a3b"]
    case = Case(
        shape, 40, device, torch.bfloat16, tiles=swapped,
        scale_columns=scale_columns(shape, of_group),
    )  # fmt: skip
    case.check()
    assert case.of_experts() < 2 * LIMIT


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_bytes_of_experts_are_those_of_e4m3(device: str) -> None:
    """Nothing as large as a weight in bfloat16 is made in a step."""
    shape = LARGE["qwen3-30b-a3b"]
    case = Case(
        shape, 9, device, torch.bfloat16, scale_columns=ScaleColumns(shape.hidden, shape.inner)
    )
    case.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.run()
    assert torch.cuda.max_memory_allocated() - before < 2**22


def tokens_of(engine: DynamicInferenceEngine) -> list[list[int]]:
    """Greedy tokens of three requests."""
    params = SamplingParams(temperature=0, num_tokens_to_generate=3, termination_id=-1)
    done = [engine.add_request(n, [3 + n, 9, 5 * n], params) for n in range(3)]
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [each.result().generated_tokens for each in done]


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=compiled)],
)
def test_an_engine_decodes_with_experts_in_e4m3_at_all_depths(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts as well. Without a GPU the other blocks run their modules."""
    config, model = model_with_experts(device, shared=True)
    save_native(tmp_path / "model", model, config)
    if device == "cpu":
        experts_alone(monkeypatch)
    multiplied: list[Any] = []
    weight_of = moe_layer.weight_of
    monkeypatch.setattr(
        moe_layer, "weight_of", lambda *given: [multiplied.append(given), weight_of(*given)][1]
    )
    found = []
    for depth in (0, 1, 2):
        asked = EngineConfig(
            device=device, dtype="bfloat16", quantization="fp8", depth=depth, max_requests=3,
            block_size_tokens=16, block_count=12, max_sequence_length=32, num_cuda_graphs=1,
        )  # fmt: skip
        multiplied.clear()
        with DynamicInferenceEngine.from_pretrained(tmp_path / "model", asked) as engine:
            covered = engine.model.network.decode_coverage()
            assert covered.fused(MLP) == ((2,) if device == "cpu" else (1, 2))
            found.append(tokens_of(engine))
        if device == "cpu":  # a captured step calls nothing
            assert len(multiplied) == 2, "the prompts' step alone multiplies out, both weights"
    assert found[0] == found[1] == found[2]
    assert len({token for tokens in found[0] for token in tokens}) > 1
