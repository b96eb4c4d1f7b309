"""Experts of a decode step in e4m3 and MXFP4 by ``moe_widened.cu``, and the sum of their places."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.kernels.moe import row
from megatron_async.kernels.moe.mxfp4 import NOT_A_NUMBER, arrange, unpack
from megatron_async.kernels.moe.tiles import padded_rows
from megatron_async.kernels.shared_memory import HOPPER_BYTES
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, on_gpu
from tests.support.interpreter import HAS_TRITON, INTERPRETED, interpreted
from tests.support.sweeps import some

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.moe.decode import MoeDecode
    from megatron_async.kernels.moe.shape import Live, MoeShape, ScaleColumns
    from megatron_async.kernels.moe.widened import experts as widened
    from tests.unit.kernels.test_moe_kernels import (
        GPT_OSS,
        LARGE,
        RELU2,
        SWIGLU,
        Case,
        experts_in_float64,
        relative_error,
        settings,
        share_of,
    )

    PACKED: dict[str, Any] = {"packed": True}
    SMALL: Any = (
        # Fewer than a vector for each lane, rows whose last half of a step is there or not, plain
        # and gated ones, experts with more rows than are computed at once, and more than a block.
        (MoeShape(64, 64, settings(2, 1), SWIGLU), 40, PACKED),
        (MoeShape(320, 192, settings(5, 2), GPT_OSS), 17, PACKED | {"bias": True}),
        (MoeShape(128, 64, settings(40, 2), RELU2, center=True), 33, PACKED),
        (MoeShape(80, 48, settings(9, 2), RELU2), 21, {"scale_columns": (80, 48)}),
        (MoeShape(256, 384, settings(3, 2), GPT_OSS), 40, {
            "scale_columns": (128, 64), "bias": True}),
        (MoeShape(192, 64, settings(3, 1), SWIGLU), 64, {"scale_columns": (64, 64)}),
        (MoeShape(144, 80, settings(5, 2), GPT_OSS), 33, {"bias": True}),
    )  # fmt: skip
    LARGE_SHAPES = {name: shape for name, shape in LARGE.items() if not shape.shared}
else:
    SMALL, LARGE_SHAPES = (), {}
both = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[interpreted, pytest.mark.skipif(
            emulator.COMPILER is None, reason="the emulator needs g++")]),
        pytest.param("cuda", marks=[*on_gpu, pytest.mark.skipif(
            INTERPRETED, reason="kernels run as they are")]),
    ],
)  # fmt: skip
SMS = 5
"""Of an emulated GPU."""


@pytest.fixture(autouse=True)
def _any_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "device" in request.fixturenames:
        monkeypatch.setattr(widened, "LEAST_16_BIT_ROWS", 1)


@pytest.fixture(autouse=True)
def _emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        emulator.install(monkeypatch)


def case_of(shape: Any, rows: int, device: str, **options: Any) -> Any:
    """A layer whose experts the kernel takes."""
    columns = options.pop("scale_columns", None)
    if columns is not None:
        options["scale_columns"] = ScaleColumns(*columns)
    case = Case(shape, rows, device, torch.bfloat16, **options)
    case.kernels = widening(case.shape, device)
    return case


def widening(shape: Any, device: str) -> Any:
    assert widened.why_not(shape, torch.bfloat16) is None
    count = SMS if device == "cpu" else row.cuda.sm_count(0)
    given = torch.device(device)
    return MoeDecode(shape, given, sm_count=count, one_kernel=False, widens=True)


@both
@pytest.mark.parametrize("number", some(list(range(len(SMALL))), 2))
def test_small_layers(device: str, number: int) -> None:
    shape, rows, options = SMALL[number]
    case = case_of(shape, rows, device, **options)
    case.check()
    assert case.of_experts() < 2 * LIMIT


@both
def test_rows_do_not_see_each_other_and_every_run_is_the_same(device: str) -> None:
    case = case_of(MoeShape(128, 64, settings(3, 2), SWIGLU), 29, device, **PACKED)
    together, again = case.run(), case.run()
    alone = case.run(slice(20, 22))
    for first, second, few in zip(together, again, alone, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(few, first[20:22])


@both
def test_every_scale_and_number_of_mxfp4_is_exact(device: str) -> None:
    """From the smallest scale to the largest: one column of the weight has all 16 numbers, and a
    row of ones adds them up."""
    shape = MoeShape(64, 64, settings(1, 1), replace(RELU2, function="relu"))
    case = case_of(shape, 1, device, **PACKED)
    weights = case.weights
    weights.w2.copy_(torch.arange(weights.w2.numel()).view_as(weights.w2) % 256)
    weights.w2_scale.copy_(torch.arange(127 - 93, 127 + 34)[:64, None].expand(64, 2))
    weights.w2_scale[32:] += 63
    case.kernels.route(weights, case.hidden, torch.ones(1, 1, 2, device=device), 1e-5)
    kernels = case.kernels._widened
    kernels._activated[:1] = torch.randint(-8, 9, (1, 64)).to(kernels._activated)
    kernels.down(weights, 1, case.kernels.chosen, widened.Sums(torch.empty_like(case.hidden)))
    wide = unpack(weights.w2, weights.w2_scale).double()[0]
    expected = wide @ kernels._activated[0].double()
    assert torch.equal(kernels._of_places[0].double(), expected)


@both
def test_every_number_at_every_place_of_a_word_is_its_value(device: str) -> None:
    """A row that has one column alone gives what the weight has there."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-x for x in numbers]
    shape = MoeShape(64, 64, settings(1, 1), replace(RELU2, function="relu"))
    case = case_of(shape, 8, device, **PACKED)
    weights, kernels = case.weights, case.kernels._widened
    codes = (torch.arange(64)[:, None] + 5 * torch.arange(64)) % 16
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    weights.w2.copy_(arrange(stored))
    weights.w2_scale.fill_(127)
    case.kernels.route(weights, case.hidden, torch.ones(1, 8, 2, device=device), 1e-5)
    meant = torch.tensor(numbers)[codes].to(device)
    for first in range(0, 64, 8):
        kernels._activated[:8] = torch.eye(64)[first : first + 8].to(kernels._activated)
        kernels.down(weights, 8, case.kernels.chosen, widened.Sums(torch.empty_like(case.hidden)))
        assert torch.equal(kernels._of_places[:8], meant[:, first : first + 8].T)


@both
@pytest.mark.parametrize("scale", [127 + 34, NOT_A_NUMBER])
def test_a_scale_that_is_too_large_is_no_number(device: str, scale: int) -> None:
    case = case_of(MoeShape(64, 64, settings(1, 1), GPT_OSS), 1, device, **PACKED)
    assert case.run()[0].isfinite().all()
    case.weights.w2_scale[0, 3] = scale
    out = case.run()[0]
    assert not out[:, 3].isfinite().any() and out[:, :3].isfinite().all()
    kept = case.weights.w1_scale.clone()
    for column in (5, 64 + 5):  # of the gate, and of what it is multiplied by
        case.weights.w1_scale.copy_(kept)
        case.weights.w1_scale[0, column] = NOT_A_NUMBER
        case.weights.w1[0, column] = 0  # of NaN and zero NaN is left, whatever the limit
        assert not case.run()[0].isfinite().any()


@both
def test_no_row_needs_an_expert(device: str) -> None:
    case = case_of(MoeShape(64, 64, settings(4, 1), SWIGLU), 3, device, **PACKED)
    case.live = Live(torch.zeros(3, dtype=torch.int64, device=device), 4)
    assert torch.equal(case.run()[0], case.hidden)


@both
@pytest.mark.parametrize(("experts", "top_k", "rows"), [(6, 3, 9), (2, 2, 40)])
def test_ranks_with_some_experts_each_add_up_to_all(
    device: str, experts: int, top_k: int, rows: int
) -> None:
    """Also ranks of fewer experts than a row chooses, which have room for all of its places."""
    shape, held = MoeShape(64, 64, settings(experts, top_k), GPT_OSS), experts // 2
    case = case_of(shape, rows, device, **PACKED, bias=True)
    total = torch.zeros_like(case.hidden).double()
    for rank in range(2):
        part, weights = share_of(case.shape, case.weights, rank, 2)
        own = slice(rank * held, rank * held + held)
        weights = weights._replace(
            w1_scale=case.weights.w1_scale[own].clone(), w2_scale=case.weights.w2_scale[own].clone()
        )
        out = torch.full_like(case.hidden, torch.nan)
        widening(part, device)(weights, case.hidden, statistics(case), 1e-5, out, live=case.live)
        total += out
    case.run()
    expected = experts_in_float64(case, case.kernels.routing(rows))
    assert relative_error(total, expected) < 2 * LIMIT


def statistics(case: Any) -> torch.Tensor:
    from megatron_async.kernels.gemm.skinny_gemm import statistics_of

    return statistics_of(case.hidden, case.norm, 8)


@pytest.mark.parametrize(("rows", "name"), list(itertools.product((2, 9, 32, 64), LARGE_SHAPES)))
@pytest.mark.parametrize("columns", [None, 0, 128, 16], ids=["mxfp4", "rows", "groups", "bf16"])
@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=[*on_gpu, pytest.mark.sweep])]
)  # fmt: skip
def test_large_layers(device: str, rows: int, name: str, columns: int | None) -> None:
    shape, options = LARGE_SHAPES[name], dict(PACKED)
    if columns == 16:
        options = {}
    elif columns is not None:
        given = (columns or shape.hidden, columns or shape.inner)
        if shape.hidden % given[0] or shape.inner % given[1]:
            pytest.skip("groups of columns do not divide rows")
        options = {"scale_columns": given}
    case = case_of(shape, rows, device, bias=name == "gpt-oss", **options)
    case.check()
    assert case.of_experts() < 2 * LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shared": 1}, "shared experts are not covered"),
        ({"is_packed": True, "shared": 1}, "shared experts are not covered"),
        ({"is_packed": True, "inner": 96}, "experts of 96 x 2880 are not covered"),
        ({"is_packed": True, "hidden": 1 << 16}, "do not fit into shared memory"),
        ({"scale_columns": (32, 2880)}, "a scale for 32 columns is not covered"),
        ({"scale_columns": (2880, 0)}, "weights of two formats are not covered"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(changes: dict[str, Any], says: str) -> None:
    if "scale_columns" in changes:
        changes = changes | {"scale_columns": ScaleColumns(*changes["scale_columns"])}
    reason = widened.why_not(replace(LARGE["gpt-oss"], **changes), torch.bfloat16)
    assert reason is not None and says in reason
    packed = replace(LARGE["gpt-oss"], is_packed=True)
    assert widened.why_not(packed, torch.bfloat16) is None
    # DeepSeek-V3's experts have room with fewer warps; Mixtral-8x7B's rows do not fit.
    wide = replace(LARGE["qwen3-30b-a3b"], hidden=7168, inner=2048)
    assert (
        widened.why_not(replace(wide, scale_columns=ScaleColumns(128, 128)), torch.bfloat16) is None
    )
    rows = replace(LARGE["mixtral"], hidden=4096, inner=14336)
    reason = widened.why_not(replace(rows, scale_columns=ScaleColumns(4096, 14336)), torch.bfloat16)
    assert reason is not None and "do not fit" in reason
    assert widened.why_not(packed, torch.float32) == "torch.float32 is not covered"


def test_which_rows_the_one_kernel_keeps() -> None:
    """As measured: few rows in 16 bits, one in e4m3, none in MXFP4, unless it is all there is."""
    cpu, shape, rows = torch.device("cpu"), LARGE["qwen3-30b-a3b"], (1, 2, 4)
    e4m3 = replace(shape, scale_columns=ScaleColumns(2048, 768))
    packed = replace(LARGE["gpt-oss"], is_packed=True)
    for given, kept in ((shape, rows), (e4m3, (1,)), (packed, ())):
        for widens in (True, False):
            found = MoeDecode(given, cpu, sm_count=132, one_kernel=True, widens=widens)
            sources = [found.work(n, gate=False, one_launch=True) for n in rows]
            of_row = tuple(n for n, work in zip(rows, sources, strict=True)
                           if [source for source, _ in work] == [row.SOURCE])  # fmt: skip
            assert of_row == (kept if widens else rows)
            assert found.has_one_kernel == bool(of_row)


def test_which_rows_of_experts_in_16_bits_it_takes() -> None:
    """33 and more, beside Triton's kernels; of fewer bits all."""
    cpu = torch.device("cpu")
    wide = MoeDecode(LARGE["qwen3-30b-a3b"], cpu, sm_count=132, one_kernel=False, widens=True)
    columns = ScaleColumns(2048, 768)
    narrow = replace(LARGE["qwen3-30b-a3b"], scale_columns=columns)
    e4m3 = MoeDecode(narrow, cpu, sm_count=132, one_kernel=False, widens=True)
    for rows in (1, 16, 32, 33, 64):
        work = [source for source, _ in wide.work(rows, gate=False, one_launch=False)]
        assert set(work) == ({widened.SOURCE} if rows > 32 else set())
        own = widened.statistic_rows(2048) if rows > 32 else wide.tiles(rows).down.statistic_rows
        assert wide.statistic_rows(rows) == own
        assert e4m3.work(rows, gate=False, one_launch=False)


@pytest.mark.skipif(INTERPRETED, reason="nothing is launched")
def test_steps_of_more_rows_have_nothing_of_it_to_compile() -> None:
    shape = replace(LARGE["qwen3-30b-a3b"], is_packed=True)
    kernels = MoeDecode(shape, torch.device("cpu"), one_kernel=False, widens=True)
    found = [len(kernels.work(rows, gate=False, one_launch=False)) for rows in (64, 65, 128, 512)]
    assert found == [2, 0, 0, 0]


@pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
def test_shared_memory_is_what_the_kernel_takes() -> None:
    shapes = [replace(LARGE["gpt-oss"], is_packed=True)]
    shapes += [
        replace(LARGE["qwen3-30b-a3b"], scale_columns=ScaleColumns(*columns))
        for columns in ((2048, 768), (128, 128))
    ]
    defines, expected = [], []
    for shape, rows, down in itertools.product(shapes, (7, 32, 64), (0, 1)):
        kernels = widened.WidenedExperts(shape, torch.device("cpu"), 132)
        given = kernels.defines(rows, down)
        sizes = given["PASS"], given["THREADS"], given["ST"]
        defines.append(given)
        expected.append(widened.shared_bytes(shape, padded_rows(rows), down, *sizes))
    assert emulator.shared_bytes("moe_widened", defines) == expected
    assert max(expected) <= HOPPER_BYTES
