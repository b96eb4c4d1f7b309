"""Products of the one kernel for few rows of experts: on tensor cores, and in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.kernels.moe import row
from megatron_async.kernels.moe.mxfp4 import arrange
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, device, emulated, on_both
from tests.support.interpreter import HAS_TRITON, INTERPRETED

__all__ = ["device"]

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform"),
    pytest.mark.skipif(INTERPRETED, reason="not a Triton kernel"),
]

if HAS_TRITON:
    from megatron_async.kernels.moe.shape import MoeShape, ScaleColumns
    from tests.unit.kernels.test_moe_kernels import (
        DEEPSEEK,
        GPT_OSS,
        LARGE,
        RELU2,
        SWIGLU,
        experts_in_float64,
        settings,
    )
    from tests.unit.kernels.test_moe_row import CTAS, RowCase

    def scaled(*columns: int) -> dict[str, Any]:
        return {"scale_columns": ScaleColumns(*columns)}

    PACKED = {"packed": True}
    GROUPED = DEEPSEEK | {"num_groups": 4}
    # Shape, rows, options and loads of a step: rows of a warp's vectors and a part, in one step, in
    # two and in more, and slots that end within a warp.
    CASES: Any = (
        # Scales of whole rows, of which the last lanes have none.
        (MoeShape(528, 64, settings(8, 2), SWIGLU), 1, scaled(528, 64), 8),
        (MoeShape(784, 64, settings(8, 2), GPT_OSS), 2, {"bias": True, **scaled(784, 64)}, 2),
        # Groups of 64 and 128.
        (MoeShape(1152, 192, settings(8, 3), SWIGLU), 1, scaled(128, 64), 2),
        (MoeShape(64, 640, settings(8, 3), RELU2), 1, scaled(64, 128), 1),
        (MoeShape(128, 640, settings(16, 2, **GROUPED), RELU2), 3, scaled(64, 128), 2),
        # Shared experts, which have other groups, or begin within one.
        (MoeShape(192, 64, settings(8, 2), SWIGLU, 2), 2, scaled(64, 64, 192, 128), 8),
        (MoeShape(128, 64, settings(16, 2), SWIGLU, 1), 4, scaled(128, 64, 128, 64), 4),
        # Groups of 16 and 32, and slots that end within four lanes.
        (MoeShape(96, 64, settings(8, 2), SWIGLU), 1, scaled(32, 16), 8),
        (MoeShape(128, 96, settings(8, 3), SWIGLU), 1, scaled(16, 96), 8),
        # MXFP4.
        (MoeShape(1088, 64, settings(8, 2), SWIGLU), 1, PACKED, 2),
        (MoeShape(64, 1056, settings(16, 3), RELU2), 2, PACKED, 1),
        (MoeShape(96, 1120, settings(16, 2), GPT_OSS), 3, {"bias": True, **PACKED}, 2),
        # bfloat16.
        (MoeShape(272, 48, settings(8, 2), SWIGLU), 1, {}, 2),
        (MoeShape(64, 272, settings(24, 3), RELU2), 4, {}, 1),
    )  # fmt: skip
    LARGE_CASES: Any = [
        (LARGE[name], rows, options, row.LOADS)
        for name, columns in (("qwen3-30b-a3b", (2048, 768)), ("gpt-oss", (2880, 2880)))
        for options in (scaled(*columns), scaled(64, 64), PACKED, {})
        for rows in (1, 4)
    ]
    E4M3 = (MoeShape(528, 64, settings(8, 2), SWIGLU), 1, scaled(528, 64))
    BY_GROUP = (MoeShape(128, 640, settings(8, 2), RELU2), 1, scaled(64, 64))
    MXFP4 = (MoeShape(64, 96, settings(8, 2), SWIGLU), 1, PACKED)
    BF16: Any = (MoeShape(64, 272, settings(8, 2), SWIGLU), 1, {})
else:
    CASES = LARGE_CASES = ()


def case_of(
    device: torch.device, shape: Any, rows: int, options: dict[str, Any], loads: int
) -> Any:
    case = RowCase(shape, rows, device, **options)
    ctas = CTAS if device.type == "cpu" else row.cuda.sm_count(0)
    case.kernels._row = row.MoeRow(case.shape, device, ctas, threads=row.THREADS, loads=loads)
    return case


def experts_alone(case: Any) -> torch.Tensor:
    """What experts add to rows, fp64; checked against the reference's."""
    before = case.hidden.clone()
    assert case.of_experts() < 2 * LIMIT
    assert torch.equal(before, case.hidden)
    return experts_in_float64(case, case.kernels.routing(case.rows))


@pytest.mark.sweep(of=3)
@on_both("shape", "rows", "options", "loads", gpu=LARGE_CASES, small=CASES)
def test_products_are_the_reference(
    device: torch.device, shape: Any, rows: int, options: dict[str, Any], loads: int
) -> None:
    case = case_of(device, shape, rows, options, loads)
    case.check()
    assert case.of_experts() < 2 * LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


SIZES: Any = [
    (which, of_inputs, of_weights)
    for which in range(4)
    for of_inputs, of_weights in ((20, 0), (-30, 0), (0, 20), (0, -30), (30, -30))
]


@pytest.mark.sweep(of=2)
@on_both("which", "of_inputs", "of_weights", gpu=SIZES, small=SIZES)
def test_large_and_small_numbers_stay(
    device: torch.device, which: int, of_inputs: int, of_weights: int
) -> None:
    """Normed rows and weights times powers of two. Those of the first layer make activations so
    as well, up to ``2 ** 40`` and down to ``2 ** -60``."""
    case = case_of(device, *(E4M3, BY_GROUP, MXFP4, BF16)[which], row.LOADS)
    case.weights.norm[0].mul_(2.0**of_inputs)
    weights = case.weights
    if weights.w1_scale is None:
        weights.w1.mul_(2.0**of_weights)
    elif weights.w1_scale.dtype is torch.uint8:
        weights.w1_scale.add_(of_weights)
    else:
        weights.w1_scale.mul_(2.0**of_weights)
    wanted = experts_alone(case)
    assert wanted.isfinite().all() and wanted.abs().max() > 0


@on_both("which", gpu=[(0,), (1,), (2,)], small=[(0,), (1,), (2,)])
def test_the_smallest_numbers_count(device: torch.device, which: int) -> None:
    """Subnormal ones of e4m3 and halves of MXFP4, whose bits in place are subnormal too."""
    case = case_of(device, *(E4M3, BY_GROUP, MXFP4)[which], row.LOADS)
    for weight in (case.weights.w1, case.weights.w2):
        if weight.dtype is torch.uint8:
            weight.copy_(arrange((weight & 0x88) | 0x11))
        else:
            weight.view(torch.uint8).bitwise_and_(0x87)
    wanted = experts_alone(case)
    assert wanted.isfinite().all() and wanted.abs().max() > 0


@on_both(gpu=[()], small=[()])
def test_an_infinite_scale_stays_with_its_column(device: torch.device) -> None:
    """Products of other lanes, which no sum has, are infinite beside it."""
    shape, rows, options = MXFP4
    case = case_of(device, shape, rows, options, row.LOADS)
    before = case.run()[0]
    case.weights.w2_scale[:, 3] = 254
    out = case.run()[0]
    assert not out[0, 3].isfinite()
    out[0, 3] = before[0, 3]
    assert torch.equal(out, before)


@emulated
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("which", "there", "instead"),
    [
        (0, "sum, 9)", "sum, 8)"),  # a lane that has nothing of the diagonal
        (1, "sum, 18)", "sum, 16)"),
        (0, "? odd : even", "? even : odd"),
        (1, "c[1][2], odd", "c[1][0], odd"),
        (2, "if (CHAINS == 2)", "if (false)"),
        (0, "if (LAST) even", "if (false) even"),
        (0, "* MISSING", ""),
        (0, "min(of(u), OF_ROW - 1)", "of(u)"),  # beyond the row
        (0, "loaded[u] = Vec{0, 0, 0, 0};", "loaded[u] = Vec{~0u, 7, ~0u, 7};"),
        (0, "if (UP_BY_ROW && GATED) factor *= from.scale[LOADS - DEPTH];", ""),
        (1, "const float scale = from.scale[u];", "const float scale = from.scale[0];"),
        (1, "lane * 16 / COLUMNS :", "0 :"),  # another group's scale
        (0, "k % 2 ? of.z : of.x", "of.x"),
        (1, "eight % PARTS * OF_ROW", "eight % PARTS"),
        (0, "v = Vec{mul2(v.x, UP_FACTOR)", "v = Vec{v.x"),
        (1, "b = mul2(b, DOWN_FACTOR)", "b = b"),
        (1, "row.of(u) >= (begin + 1) * INNER_VECTORS", "row.of(u) > (begin + 1) * INNER_VECTORS"),
        (2, "lower_halves(v.x, v.z), upper_halves(v.x, v.z)", "v.x, v.y"),
        (2, "into[2] = (u16)(a >> 16), into[4] = (u16)b", "into[4] = (u16)(a >> 16)"),
        (2, "mxfp4_bits<PLACE + 1>(other), of_other", "mxfp4_bits<PLACE + 1>(other), factor"),
        (2, "+ 82u) * 0x800080u", "+ 83u) * 0x800080u"),
        (3, "v = Vec{v.x, v.z, v.y, v.w};", ""),
        (3, "into[0] = a, into[2] = b;", "into[0] = a, into[1] = b;"),
        (3, "x.part[0];\n  mma(c[0], a.x, a.y", "x.part[0];\n  mma(c[0], a.y, a.x"),
    ],
)  # fmt: skip
def test_the_reference_notices(
    which: int, there: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    text = emulator.source_text("moe_row")
    assert there in text
    case = case_of(torch.device("cpu"), *(E4M3, BY_GROUP, MXFP4, BF16)[which], row.LOADS)
    assert case.of_experts() < 2 * LIMIT
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    monkeypatch.setattr(
        row, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )
    assert not case.of_experts() < 2 * LIMIT


def test_threads_and_loads_follow_the_rows_of_a_warp() -> None:
    """A rank's share of an expert has fewer rows."""

    def of(inner: int, **options: Any) -> tuple[int, int]:
        shape = replace(LARGE["qwen3-30b-a3b"], inner=inner, **options)
        macros = row.MoeRow(shape, torch.device("cpu"), 132).defines(1, gate=False)
        return macros["THREADS"], macros["LOADS"]

    assert of(768) == (256, 8) and of(384) == (256, 16)
    for inner, expected in ((768, (512, 8)), (384, (256, 8))):
        assert of(inner, scale_columns=ScaleColumns(2048, inner)) == expected
        assert of(inner, is_packed=True) == (256, 8)
