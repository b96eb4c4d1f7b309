"""The one kernel of a layer of experts for few rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.gemm.skinny_gemm import Sending, statistics_of
from megatron_async.kernels.gemm.tile_config import RMS_NORM
from megatron_async.kernels.moe import row
from megatron_async.kernels.moe.mxfp4 import NOT_A_NUMBER
from megatron_async.kernels.moe.reference import NO_EXPERT
from megatron_async.kernels.ranks.peer_sum import LAUNCHES, word_count
from megatron_async.models.fused.decoder import FusedDecoder
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, device, emulated, on_both, on_gpu, relative_error
from tests.support.decode_rig import DecodeRig
from tests.support.interpreter import HAS_TRITON, INTERPRETED

__all__ = ["device"]

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform"),
    pytest.mark.skipif(INTERPRETED, reason="not a Triton kernel"),
]

if HAS_TRITON:
    from megatron_async.kernels.moe.decode import MoeDecode
    from megatron_async.kernels.moe.decode_reference import moe_decode_reference
    from megatron_async.kernels.moe.shape import MoeShape, ScaleColumns
    from tests.unit.kernels.test_moe_kernels import (
        DEEPSEEK,
        EPS,
        GPT_OSS,
        LARGE,
        RELU2,
        SWIGLU,
        Case,
        model_with_experts,
        settings,
    )

    QWEN = MoeShape(64, 32, settings(8, 2, pre_softmax=True, normalize=True), SWIGLU)
    SMALL: Any = (
        (QWEN, 1, {}),
        (MoeShape(528, 48, settings(160, 3), GPT_OSS), 2, {"bias": True}),
        (
            MoeShape(96, 32, settings(36, 4, **DEEPSEEK), RELU2, shared=2, center=True),
            4,
            {"expert_bias": True, "gate": True},
        ),
    )
    ON_GPU: Any = [
        (LARGE[name], rows, {"bias": name == "gpt-oss"})
        for name in LARGE
        for rows in (1, 2, 3, 4)
        if row.why_not(LARGE[name], rows, torch.bfloat16, 132) is None
    ]
    ON_GPU += [
        (
            MoeShape(7168, 2048, settings(16, 4, **{**DEEPSEEK, "num_groups": 4}), SWIGLU, 1),
            1,
            {"expert_bias": True},
        ),
        (MoeShape(2048, 512, settings(512, 10), SWIGLU, 1), 4, {"gate": True}),
        (MoeShape(2688, 1856, settings(128, 6, **{**DEEPSEEK, "num_groups": 1, "kept_groups": 1}),
                  RELU2, 2), 4, {"expert_bias": True}),
    ]  # fmt: skip
    E4M3: Any = (
        # A scale a row, and groups of columns, in which shared experts may begin.
        (QWEN, 1, {"scale_columns": ScaleColumns(64, 32)}),
        (MoeShape(528, 48, settings(160, 3), GPT_OSS), 2, {
            "bias": True, "scale_columns": ScaleColumns(528, 48)}),
        (
            MoeShape(192, 96, settings(36, 4, **DEEPSEEK), RELU2, shared=2, center=True),
            4,
            {"expert_bias": True, "gate": True, "scale_columns": ScaleColumns(64, 32, 32, 64)},
        ),
        (
            MoeShape(512, 128, settings(8, 2), SWIGLU, shared=1),
            2,
            {"scale_columns": ScaleColumns(128, 128, 512, 32)},
        ),
    )  # fmt: skip
    E4M3_ON_GPU: Any = [
        (shape, rows, options | {"scale_columns": ScaleColumns(*columns, *shared)})
        for shape, rows, options in ON_GPU
        for columns, shared in (
            ((shape.hidden, shape.inner), (shape.hidden, shape.shared * shape.inner)),
            ((64, 64), (64, 64)) if shape.inner % 128 or shape.hidden % 128 else
            ((128, 128), (128, 128)),
        )
        if shape.inner % columns[1] == shape.hidden % columns[0] == 0
    ]  # fmt: skip
    MXFP4: Any = (
        # One vector a row, rows of which a step of loads has a part, and gated and plain ones.
        (QWEN, 1, {}),
        (MoeShape(544, 96, settings(160, 3), GPT_OSS), 2, {"bias": True}),
        (MoeShape(1088, 64, settings(16, 2, **DEEPSEEK | {"num_groups": 4}), RELU2, center=True),
         4, {"expert_bias": True}),
    )  # fmt: skip
    MXFP4_ON_GPU: Any = [each for each in ON_GPU if not each[0].shared]
else:
    SMALL, ON_GPU, E4M3, E4M3_ON_GPU, MXFP4, MXFP4_ON_GPU = (), [], (), [], (), []
CTAS = 3
"""Of an emulated GPU."""


class RowCase(Case if HAS_TRITON else object):  # type: ignore[misc]
    """A layer whose rows the one kernel takes."""

    def __init__(
        self, shape: Any, rows: int, device: torch.device, one_launch: bool = True, **options: Any
    ) -> None:
        super().__init__(shape, rows, device.type, torch.bfloat16, **options)
        ctas = CTAS if device.type == "cpu" else row.cuda.sm_count(0)
        self.kernels = MoeDecode(self.shape, device, sm_count=ctas, one_kernel=True, widens=False)
        assert self.kernels._of_few(rows) is self.kernels._row is not None
        self.one_launch = one_launch

    def error(self) -> float:
        """Of the experts alone: the residual stream would hide it."""
        out = torch.empty_like(self.hidden)
        statistics = statistics_of(self.hidden, self.norm, 16)
        self.kernels(
            self.weights, self.hidden, statistics, EPS, out, live=self.live,
            one_launch=self.one_launch,
        )  # fmt: skip
        expected = moe_decode_reference(
            self.shape, self.weights, self.hidden, EPS, live=self.live,
            routing=self.kernels.routing(self.rows),
        )  # fmt: skip
        return relative_error(out, expected.double())


@on_both("shape", "rows", "options", gpu=ON_GPU, small=SMALL)
def test_layers(device: torch.device, shape: Any, rows: int, options: dict[str, Any]) -> None:
    case = RowCase(shape, rows, device, **options)
    case.check()
    assert case.error() < LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    if rows > 1 and device.type == "cuda":  # a row has the same bits alone
        for together, alone in zip(first, case.run(slice(1, 2)), strict=True):
            assert torch.equal(together[1:2], alone)


@pytest.mark.sweep(of=2)
@on_both("shape", "rows", "options", gpu=E4M3_ON_GPU, small=E4M3)
def test_layers_in_e4m3(
    device: torch.device, shape: Any, rows: int, options: dict[str, Any]
) -> None:
    case = RowCase(shape, rows, device, **options)
    case.check()
    assert case.error() < LIMIT and case.of_experts() < 2 * LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    if device.type == "cuda":
        case.one_launch = False
        assert all(torch.equal(*pair) for pair in zip(first, case.run(), strict=True))


@pytest.mark.sweep(of=2)
@on_both("shape", "rows", "options", gpu=MXFP4_ON_GPU, small=MXFP4)
def test_layers_in_mxfp4(
    device: torch.device, shape: Any, rows: int, options: dict[str, Any]
) -> None:
    case = RowCase(shape, rows, device, packed=True, **options)
    case.check()
    assert case.error() < LIMIT and case.of_experts() < 2 * LIMIT
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    if device.type == "cuda":
        case.one_launch = False
        assert all(torch.equal(*pair) for pair in zip(first, case.run(), strict=True))


@on_both(gpu=[()], small=[()])
def test_a_scale_that_is_no_number_makes_none(device: torch.device) -> None:
    case = RowCase(QWEN, 1, device, packed=True)
    assert case.weights.w2_scale is not None
    case.weights.w2_scale[:, 3] = NOT_A_NUMBER
    out = case.run()[0] - case.hidden
    assert not out[0, 3].isfinite() and out[0, :3].isfinite().all() and out[0, :3].all()


@on_both(gpu=[()], small=[()])
def test_large_scales_are_exact(device: torch.device) -> None:
    """Up to ``2 ** 40``, which the other kernels of MXFP4 do not reach."""
    case = RowCase(QWEN, 1, device, packed=True)
    before = case.run()[0].float() - case.hidden.float()
    assert case.weights.w2_scale is not None
    case.weights.w2_scale[:, 3] += 127 + 40 - int(case.weights.w2_scale[:, 3].max())
    case.check()
    out = case.run()[0][0, 3].float()
    assert out.isfinite() and out.abs() > 2.0**20 * before.abs().max()


@on_both("rows", gpu=[(1,), (4,)], small=[(1,)])
def test_three_launches_are_the_one(device: torch.device, rows: int) -> None:
    shape = QWEN if device.type == "cpu" else LARGE["qwen3-30b-a3b"]
    one, three = (RowCase(shape, rows, device, one_launch) for one_launch in (True, False))
    for mine, other in zip(one.run(), three.run(), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(one.kernels.weights, three.kernels.weights)
    one.one_launch = False  # on the same words
    changed = one.run()
    one.one_launch = True
    for mine, other in zip(one.run(), changed, strict=True):
        assert torch.equal(mine, other)


class RanksOfExperts:
    """Ranks with a share of each expert, which have the same rows and routers."""

    CAPACITY = 4096 * 8

    def __init__(self, ranks: int, shape: Any, rows: int, device: torch.device, **options: Any):
        ctas = CTAS if device.type == "cpu" else row.cuda.sm_count(0) // ranks
        self.cases = [RowCase(shape, rows, device, **options) for _ in range(ranks)]
        count = word_count(ranks, self.CAPACITY)
        memory = tuple(torch.zeros(count, dtype=torch.int64, device=device) for _ in range(ranks))
        self.sums = []
        for rank, case in enumerate(self.cases):
            case.kernels = MoeDecode(
                case.shape, device, sm_count=ctas, one_kernel=True, widens=False
            )
            names = ["w1", "w2"] if rank else []  # the shares
            names += ["b1", "b2"] if rank and options.get("bias") else []
            for name in names:
                weight = getattr(case.weights, name)
                drawn = case.drawn(*weight.shape) / weight.shape[-1] ** 0.5
                weight.copy_(drawn.to(weight.dtype))
            if ranks > 2 and rank in (0, ranks - 1):
                # fp32 rounds what is between these two, so another order has other bits.
                first, weights = self.cases[0].weights, case.weights
                for mine, other in ((weights.w2, first.w2), (weights.b2, first.b2)):
                    if mine is not None:
                        mine.copy_(-other if rank else other * 2**20)
                if rank:
                    weights.w1.copy_(first.w1)
                    if weights.b1 is not None:
                        weights.b1.copy_(first.b1)
            launches = torch.zeros(LAUNCHES, dtype=torch.int32, device=device)
            self.sums.append(Sending(memory, rank, launches, self.CAPACITY, sums=True))
        self.streams: list[Any] = [None] * ranks
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(ranks)]
            self.kernel()  # none is built meanwhile

    def kernel(self) -> Any:
        """What all ranks launch."""
        case = self.cases[0]
        ((source, macros),) = case.kernels.work(
            case.rows, gate=case.weights.shared_gate is not None, one_launch=True, sums=self.sums[0]
        )
        return row.kernel(source, macros, self.sums[0].launches.device)

    def hidden(self, number: int) -> Tensor:
        """The rows of a launch, of as many in a row."""
        return self.cases[0].hidden.roll(number, 1)

    def expected(self, number: int) -> Tensor:
        """The sum over ranks of what each alone puts out, rounded, and the rows."""
        hidden = self.hidden(number)
        total = torch.zeros(hidden.shape, device=hidden.device)
        for case in self.cases:
            covered, out = case.kernels.statistic_rows(case.rows), torch.empty_like(hidden)
            case.kernels(
                case.weights, hidden, statistics_of(hidden, case.norm, covered), EPS, out,
                live=case.live, one_launch=True,
            )  # fmt: skip
            total += out.float()
        return (total + hidden.float()).bfloat16()

    def run(self, in_a_row: int = 1) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        """Of each launch, and of each rank, the sum, its statistics, and the sum times the next
        norm's weight."""
        launches: list[Any] = []
        for case in self.cases:
            for number in range(in_a_row):
                covered, out = case.kernels.statistic_rows(case.rows), self.hidden(number)
                given = statistics_of(out, case.norm, 8)
                statistics = given.new_zeros(case.rows, case.shape.hidden // covered, 2)
                launches.append((given, out, statistics, torch.zeros_like(out)))
        if self.streams[0] is not None:
            torch.cuda.synchronize()  # what is drawn is there, and nobody waits yet
        for place, (given, out, statistics, scaled) in enumerate(launches):
            rank = place // in_a_row
            case = self.cases[rank]
            with torch.cuda.stream(self.streams[rank]):
                case.kernels(
                    case.weights, out, given, EPS, out, live=case.live, residual=out,
                    statistics_out=statistics, one_launch=True, sums=self.sums[rank],
                    scaled=None if case.shape.center else (self.cases[0].next_weight, scaled),
                )  # fmt: skip
        if self.streams[0] is not None:
            torch.cuda.synchronize()
        return [[each[1:] for each in launches[n::in_a_row]] for n in range(in_a_row)]

    def check(self, in_a_row: int = 1) -> None:
        """Each launch of each rank has the bits of the sum in the order of ranks."""
        norm, weight = self.cases[0].norm, self.cases[0].next_weight
        covered = self.cases[0].kernels.statistic_rows(self.cases[0].rows)
        for number, of_ranks in enumerate(self.run(in_a_row)):
            expected = self.expected(number)
            wanted = statistics_of(expected, norm, covered)
            for out, statistics, scaled in of_ranks:
                assert out.equal(expected)
                torch.testing.assert_close(statistics, wanted, rtol=1e-4, atol=1e-5)
                assert self.cases[0].shape.center or scaled.equal(expected * weight)


@on_both(
    *("ranks", "shape", "rows", "options"),
    gpu=[
        (2, LARGE["qwen3-30b-a3b"], 1, {}),
        (2, LARGE["gpt-oss"], 1, {"bias": True}),
        (3, LARGE["qwen3-30b-a3b"], 4, {}),
        (2, LARGE["gpt-oss"], 4, {"bias": True, "packed": True}),
    ]
    if HAS_TRITON
    else [],
    small=[
        (2, *SMALL[0]),
        (3, *SMALL[1]),
        (2, *SMALL[2]),
        (2, QWEN, 1, {"scale_columns": ScaleColumns(64, 32)}),
    ]
    if HAS_TRITON
    else [],
)
def test_ranks_with_a_share_of_each_expert_sum_where_they_end(
    device: torch.device, ranks: int, shape: Any, rows: int, options: dict[str, Any]
) -> None:
    group = RanksOfExperts(ranks, shape, rows, device, **options)
    for _ in range(3):
        group.check()
    assert all((each.launches == 3).all() for each in group.sums)


@emulated
def test_a_rank_whose_experts_sum_may_be_a_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has several launches, and waits for the others' words alone."""
    emulator.install(monkeypatch)
    shape, rows, options = SMALL[0]
    for in_a_row in (4, 3):
        group = RanksOfExperts(2, shape, rows, torch.device("cpu"), **options)
        kernel = group.kernel()
        monkeypatch.setattr(kernel, "in_a_row", in_a_row)
        group.check(in_a_row)
        monkeypatch.setattr(kernel, "in_a_row", 1)


def in_place(case: Any, hidden: Tensor, statistics: Tensor) -> None:
    """As a step has it: the residual stream and its statistics are written over."""
    case.kernels(
        case.weights, hidden, statistics, EPS, hidden, live=case.live, residual=hidden,
        statistics_out=statistics, scaled=(case.next_weight, torch.empty_like(hidden)),
        one_launch=case.one_launch,
    )  # fmt: skip


@on_both(gpu=[()], small=[()])
def test_input_may_be_written_over(device: torch.device) -> None:
    case = RowCase(QWEN if device.type == "cpu" else LARGE["qwen3-30b-a3b"], 1, device)
    covered = case.kernels.statistic_rows(1)
    expected = case.hidden
    for _ in range(3):  # a layer on top of the one before
        expected = moe_decode_reference(case.shape, case.weights, expected, EPS, residual=expected)
    for _ in range(3):  # launches count on
        hidden = case.hidden.clone()
        statistics = statistics_of(hidden, RMS_NORM, covered)
        for _ in range(3):
            in_place(case, hidden, statistics)
        assert relative_error(hidden, expected.double()) < LIMIT


@on_both(gpu=[()], small=[()])
def test_equal_logits_and_nan_have_experts_that_exist(device: torch.device) -> None:
    case = RowCase(QWEN, 1, device)
    case.weights.router.zero_()
    out, _, _ = case.run()
    assert case.kernels.ids[:1].tolist() == [[0, 1]] and not out.isnan().any()
    case.weights.router[5].fill_(float("nan"))
    case.weights.router[3, 0] = float("nan")
    case.run()
    assert case.kernels.ids[:1].tolist() == [[0, 1]]  # the softmax over all is NaN
    case.hidden[0, 0] = float("nan")
    assert case.run()[0].isnan().all()


@on_both(gpu=[()], small=[()])
def test_of_many_equal_experts_the_first_are_chosen(device: torch.device) -> None:
    shape, rows, options = SMALL[1]
    case = RowCase(shape, rows, device, **options)
    case.weights.router.zero_()
    case.weights.router_bias.zero_()
    case.weights.router_bias[150] = 1.0
    case.run()
    assert case.kernels.ids[:rows].tolist() == [[150, 0, 1]] * rows


@on_both(gpu=[()], small=[()])
def test_a_dead_row_reads_no_expert(device: torch.device) -> None:
    case = RowCase(QWEN, 1, device)
    expected = case.run()[0]
    values = case.live.values.clone()
    case.live.values.zero_()
    kept = case.weights.w1.clone()
    case.weights.w1.fill_(float("nan"))
    out, _, _ = case.run()
    assert torch.equal(out, case.hidden) and int(case.kernels.count) == 0
    assert (case.kernels.ids[:1] == NO_EXPERT).all()
    # Words of the step in which it was dead are not taken for those of the next.
    case.live.values.copy_(values)
    case.weights.w1.copy_(kept)
    assert torch.equal(case.run()[0], expected)


@on_both("claimed", gpu=[(0,), (8,), (16,)], small=[(0,), (8,), (16,)])
def test_who_claims_rows_does_not_change_bits(device: torch.device, claimed: int) -> None:
    """No row, half of them and all of them, over launches whose counters take turns."""
    shape = QWEN if device.type == "cpu" else LARGE["qwen3-30b-a3b"]
    case = RowCase(shape, 1, device)
    expected = case.run()
    ctas = CTAS if device.type == "cpu" else row.cuda.sm_count(0)
    case.kernels._row = row.MoeRow(shape, device, ctas, claimed=claimed)
    for _ in range(3):
        assert all(map(torch.equal, case.run(), expected))
    counters = case.kernels._row._words[0][3].tolist()
    assert (sum(counters) > 0) == (claimed > 0)


@emulated
def test_the_number_of_launches_may_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    case = RowCase(QWEN, 1, torch.device("cpu"))
    expected = case.run()
    for before in (0xFFFF - 1, 0xFFFFFFFF - 1):
        assert case.kernels._row is not None
        launches, _, _, claims = case.kernels._row._words[0]
        launches.copy_(torch.tensor(before).to(torch.int32))
        claims.zero_()  # numbers come one after the other: the launch before cleared them
        for _ in range(3):
            assert all(map(torch.equal, case.run(), expected))
        assert launches.unique().tolist() == [int(torch.tensor(before + 3).to(torch.int32))]


@emulated
def test_words_of_a_dead_row_are_not_taken_when_numbers_come_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch)
    case = RowCase(QWEN, 1, torch.device("cpu"))
    assert case.kernels._row is not None
    case.run()
    launches, _, _, claims = case.kernels._row._words[0]
    launches.fill_(0xFFFF)
    claims.zero_()
    case.live.values.zero_()
    case.run()
    case.live.values.fill_(9)
    case.weights.w1.mul_(2)
    assert case.error() < LIMIT


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_graphs_replay_in_any_order(device: str) -> None:
    """One and four rows, other kernels between, and nothing waits for the host."""
    cases = [RowCase(LARGE["qwen3-30b-a3b"], rows, torch.device(device)) for rows in (1, 4)]
    cases[1].kernels = cases[0].kernels
    outs, graphs, expected = [], [], [case.run()[0] for case in cases]
    of_cases = [statistics_of(case.hidden, RMS_NORM, 8) for case in cases]
    for case, statistics in zip(cases * 2, of_cases * 2, strict=True):
        given = case.hidden
        out = torch.empty_like(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                case.kernels(
                    case.weights, given.clone(), statistics, EPS, out, live=case.live,
                    residual=given, one_launch=True,
                )  # fmt: skip
        graphs.append(graph)
        outs.append(out)
    order = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in order:
            graphs[number].replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for out, wanted in zip(outs, expected * 2, strict=True):
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("shared", [True, False])
def test_a_block_of_experts_is_that_of_its_module(
    device: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MOE", True)
    config, model = model_with_experts(device, shared)
    rig = DecodeRig(config, torch.device(device), rows=1)
    found = []
    for one_kernel in (False, True):
        monkeypatch.setattr(trial, "MOE_ROW", one_kernel)
        fused = FusedDecoder(model)
        found.append(rig.decode(fused.forward, rig.context()))
    assert relative_error(found[1], found[0].double()) < LIMIT


def test_refusals_name_the_shape() -> None:
    def reason(rows: int = 1, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> str | None:
        sizes = {"hidden": 2048, "inner": 768, "experts": 128, "top_k": 8, **changes}
        routing = settings(sizes.pop("experts"), sizes.pop("top_k"))
        return row.why_not(MoeShape(settings=routing, activation=SWIGLU, **sizes), rows, dtype, 132)

    assert reason() is None and reason(rows=4) is None
    assert "5 rows" in str(reason(rows=5))
    assert "several times" in str(reason(rows=3, experts=8, top_k=2))
    assert "float32" in str(reason(dtype=torch.float32))
    assert "768 x 2040" in str(reason(hidden=2040))
    assert "8 of 1024 experts" in str(reason(experts=1024))
    assert "shared memory" in str(reason(inner=16384))
    assert reason(is_packed=True) is None
    assert "MXFP4 weights beside shared" in str(reason(is_packed=True, shared=1))


def test_the_busiest_cta_has_few_columns() -> None:
    for hidden, wanted in ((2048, 16), (2880, 8), (2688, 8), (4096, 16), (7168, 8)):
        assert row.tile(hidden, 132) == wanted


@emulated
def test_shared_memory_is_what_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "MIN_SHARED_BYTES", 0)
    cases = [(shape, rows) for shape, rows, _ in [*SMALL, *ON_GPU]]
    macros = []
    for shape, rows in cases:
        kernel = row.MoeRow(shape, torch.device("cpu"), 132)
        macros.append(kernel.defines(rows, gate=False))
    for (shape, rows), taken in zip(cases, emulator.shared_bytes("moe_row", macros), strict=True):
        counted = row.shared_bytes(shape, rows, 132, row.most_threads(shape, 132))
        assert 0 <= counted - taken < 8192


def test_the_benchmark_times_what_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator.install(monkeypatch)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    script = importlib.import_module("bench_moe")
    monkeypatch.setattr(script, "microseconds", lambda call: call(0) or 1.0)
    monkeypatch.setattr(script, "LAYERS", {1: 1})
    monkeypatch.setattr(MoeDecode, "route", lambda *_: None)
    bench = script.Bench(QWEN, 1, 1e12, torch.device("cpu"), CTAS)
    assert bench.few(False) < script.ERROR_LIMIT
    assert capsys.readouterr().out.count("one kernel") == 2
    bench.rows = 9
    assert bench.few(False) == 0.0 and "9 rows" in capsys.readouterr().out


@on_both("half", gpu=[(0,), (1,)], small=[(0,), (1,)])
def test_nan_stays_whatever_the_limit_of_the_activation(device: torch.device, half: int) -> None:
    """In the gate and in what it is multiplied by: a GPU's minimum of NaN and a number is none."""
    case = RowCase(MoeShape(64, 32, settings(8, 2), GPT_OSS), 1, device)
    case.weights.w1[:, half * 32 + 5, 7] = float("nan")
    assert case.run()[0].isnan().all()
