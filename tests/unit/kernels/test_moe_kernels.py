"""Kernels of a decode step's experts against their reference in torch."""

from __future__ import annotations

import importlib
import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.gemm.skinny_gemm import statistics_of
from megatron_async.kernels.gemm.tile_config import LAYER_NORM, RMS_NORM
from megatron_async.kernels.moe.mxfp4 import pack, unpack
from megatron_async.kernels.moe.reference import NO_EXPERT, Routing, activate, route
from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings
from megatron_async.kernels.moe.shape import Live, MoeShape, MoeWeights, ScaleColumns
from megatron_async.kernels.moe.tiles import MAX_ROWS, MoeTiles, Tile, choose_tiles, chosen_apart
from megatron_async.models.fused import coverage, where
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import MLP
from megatron_async.models.moe.layer import leaving
from megatron_async.models.quantized.values import quantize
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, relative_error
from tests.support.decode_rig import TOKENS, DecodeRig, bfloat16_model, small
from tests.support.interpreter import HAS_TRITON, INTERPRETED, compiled, interpreted, on_devices

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.moe import decode
    from megatron_async.kernels.moe.decode import MoeDecode
    from megatron_async.kernels.moe.decode_reference import moe_decode_reference, norm_reference

EPS = 1e-5
SWIGLU = ExpertActivation()


def settings(experts: int, top_k: int, **fields: Any) -> RouterSettings:
    return RouterSettings(num_experts=experts, top_k=top_k, **fields)


def tiles(up: tuple[int, int], down: tuple[int, int, int], swap: bool = False) -> MoeTiles:
    return MoeTiles(
        Tile(*up, stages=3, swap=swap), Tile(*down[:2], stages=3, splits=down[2], swap=swap)
    )


def in_e4m3(weights: MoeWeights, columns: ScaleColumns) -> MoeWeights:
    """The same in e4m3, with scales that differ: of three one is halved, and one is divided by
    four."""
    made: dict[str, Tensor] = {}
    for name, of_group in columns._asdict().items():
        weight = getattr(weights, name)
        if weight is not None and of_group:
            numbers, scale = quantize(weight, weight.shape[-1] // of_group)
            factors = 0.5 ** (torch.arange(scale.numel()) % 3).view_as(scale)
            made |= {name: numbers, f"{name}_scale": scale * factors.to(scale)}
    return weights._replace(**made)


def in_mxfp4(weights: MoeWeights) -> MoeWeights:
    """The same in MXFP4."""
    (w1, w1_scale), (w2, w2_scale) = pack(weights.w1), pack(weights.w2)
    return weights._replace(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)


class Case:
    """A layer with drawn weights, and rows in front of it."""

    def __init__(
        self,
        shape: MoeShape,
        rows: int,
        device: str,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        expert_bias: bool = False,
        gate: bool = False,
        tiles: MoeTiles | None = None,
        scale_columns: ScaleColumns | None = None,
        packed: bool = False,
    ) -> None:
        shape = replace(shape, scale_columns=scale_columns, is_packed=packed)
        self.shape, self.rows, self.one_launch = shape, rows, False
        self._generator = torch.Generator(device).manual_seed(rows)
        self._device, self._dtype = device, dtype
        experts, hidden, inner = shape.settings.num_experts, shape.hidden, shape.inner
        halves = 2 if shape.activation.gated else 1
        first, shared = halves * inner, shape.shared * inner
        drawn = self.drawn
        self.weights = MoeWeights(
            (drawn(hidden) * 0.1 + 1, drawn(hidden) if shape.center else None),
            drawn(experts, hidden) / hidden**0.5,
            drawn(experts, first, hidden) / hidden**0.5,
            drawn(experts, hidden, inner) / inner**0.5,
            router_bias=drawn(experts) if bias else None,
            expert_bias=drawn(experts).float() if expert_bias else None,
            b1=drawn(experts, first) if bias else None,
            b2=drawn(experts, hidden) if bias else None,
            shared_w1=drawn(halves * shared, hidden) / hidden**0.5 if shared else None,
            shared_w2=drawn(hidden, shared) / shared**0.5 if shared else None,
            shared_gate=drawn(1, hidden) / hidden**0.5 if gate else None,
        )
        if scale_columns is not None:
            self.weights = in_e4m3(self.weights, scale_columns)
        if packed:
            self.weights = in_mxfp4(self.weights)
        self.hidden, self.next_weight = drawn(rows, hidden) * 2, drawn(hidden)
        dead = torch.arange(rows) % 5 == 3
        self.live = Live(torch.where(dead, 3, 40 + torch.arange(rows)).to(device), 4)
        self.kernels = MoeDecode(shape, torch.device(device), dtype, tiles=tiles)

    def drawn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self._device, dtype=self._dtype)

    @property
    def norm(self) -> int:
        return LAYER_NORM if self.shape.center else RMS_NORM

    def run(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Output, its statistics, and the output times the next norm's weight."""
        out = self.hidden[rows].clone()
        statistics = statistics_of(out, self.norm, 8)
        scaled, covered = torch.zeros_like(out), self.kernels.statistic_rows(len(out))
        found = torch.zeros(len(out), self.shape.hidden // covered, 2, device=self._device)
        self.kernels(
            self.weights, out.clone(), statistics, EPS, out, live=Live(self.live[0][rows], 4),
            residual=out, statistics_out=found,
            scaled=None if self.shape.center else (self.next_weight, scaled),
            one_launch=self.one_launch,
        )  # fmt: skip
        return out, found, scaled

    def check(self) -> None:
        out, found, scaled = self.run()
        routing = self.kernels.routing(self.rows)
        self._check_routing(routing)
        expected = moe_decode_reference(
            self.shape, self.weights, self.hidden, EPS, live=self.live, residual=self.hidden,
            routing=routing,
        )  # fmt: skip
        tolerance = 2e-5 if self._dtype is torch.float32 else 3e-2
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        per_tile = self.kernels.statistic_rows(self.rows)
        torch.testing.assert_close(
            found, statistics_of(out, self.norm, per_tile), rtol=1e-4, atol=1e-4
        )
        if not self.shape.center:
            torch.testing.assert_close(scaled, out * self.next_weight)
        dead = self.live.values < 4
        assert torch.equal(out[dead], self.hidden[dead]) and not torch.equal(out, self.hidden)
        ids = self.kernels.ids[: self.rows]
        assert (ids[dead] == NO_EXPERT).all() and (ids[~dead] != NO_EXPERT).all()
        read = ids[~dead].unique()
        assert int(self.kernels.count) == len(read)

    def of_experts(self) -> float:
        """The error of what the experts add to rows, against float64."""
        out = torch.empty_like(self.hidden)
        statistics = statistics_of(self.hidden, self.norm, 8)
        self.kernels(self.weights, self.hidden, statistics, EPS, out, live=self.live)
        routing = self.kernels.routing(self.rows)
        return relative_error(out, experts_in_float64(self, routing))

    def _check_routing(self, routing: Routing) -> None:
        """As the reference routes, but for experts between which the last bits decide."""
        _, logits = norm_reference(self.shape, self.weights, self.hidden, EPS)
        settings, live = self.shape.settings, self.live.values >= 4
        wanted = route(logits, settings, expert_bias=self.weights.expert_bias, live=live)
        tolerance = 1e-5 if self._dtype is torch.float32 else 2e-2
        for row in live.nonzero()[:, 0].tolist():
            got, expected = (
                dict(zip(found.ids[row].tolist(), found.weights[row].tolist(), strict=True))
                for found in (routing, wanted)
            )
            assert len(got) == settings.top_k
            other, missed = set(got) - set(expected), set(expected) - set(got)
            tied = logits[row, [*other, *missed]].tolist()
            assert not tied or max(tied) - min(tied) < tolerance, (row, tied)
            for expert in set(got) & set(expected):
                assert got[expert] == pytest.approx(expected[expert], abs=tolerance)


def experts_in_float64(case: Case, routing: Routing) -> Tensor:
    """What the experts add to the rows of a case, one after the other."""
    shape, weights, activation = case.shape, case.weights, case.shape.activation
    size, (norm, bias) = (shape.hidden,), weights.norm
    x = case.hidden.double()
    if shape.center:
        x = F.layer_norm(x, size, norm.double(), None if bias is None else bias.double(), EPS)
    else:
        x = F.rms_norm(x, size, norm.double(), EPS)
    x = x.to(case.hidden.dtype).double()

    def of(name: str, n: Any = slice(None)) -> Tensor:
        weight, scale = getattr(weights, name)[n], getattr(weights, f"{name}_scale")
        if shape.is_packed:
            return unpack(weight, scale[n]).double()
        weight = weight.double()
        if scale is None:
            return weight
        columns = weight.shape[-1] // scale.shape[-1]
        return weight * scale[n].double().repeat_interleave(columns, -1)

    def of_expert(n: int, row: Tensor) -> Tensor:
        first = of("w1", n) @ row + (0 if weights.b1 is None else weights.b1[n].double())
        second = of("w2", n) @ activate(first, activation)
        return second + (0 if weights.b2 is None else weights.b2[n].double())

    total = torch.zeros_like(x)
    for row, (ids, shares) in enumerate(zip(routing.ids, routing.weights, strict=True)):
        for expert, share in zip(ids.tolist(), shares.double(), strict=True):
            if expert != NO_EXPERT:
                total[row] += share * of_expert(expert, x[row])
        if shape.shared and case.live.values[row] >= case.live.first:
            added = of("shared_w2") @ activate(of("shared_w1") @ x[row], activation)
            gate = weights.shared_gate
            total[row] += added if gate is None else added * (gate.double() @ x[row]).sigmoid()
    return total


GPT_OSS = ExpertActivation(function="quick_gelu", limit=1.0, offset=1.0)
RELU2 = ExpertActivation(function="squared_relu", gated=False)
DEEPSEEK = {
    "score_function": "sigmoid", "normalize": True, "num_groups": 3, "kept_groups": 2,
    "group_score_experts": 2, "scaling_factor": 2.5,
}  # fmt: skip
SMALL = (
    (MoeShape(48, 32, settings(8, 2), SWIGLU), 5, {"tiles": tiles((32, 16), (16, 16, 2))}),
    (
        MoeShape(48, 24, settings(6, 3, pre_softmax=True, normalize=True), GPT_OSS),
        21,
        {"tiles": tiles((16, 32), (16, 16, 1)), "bias": True},
    ),
    (
        MoeShape(32, 32, settings(12, 4, **DEEPSEEK), RELU2, shared=2, center=True),
        21,
        {"tiles": tiles((32, 16), (16, 32, 3), swap=True), "expert_bias": True, "gate": True},
    ),
)


@on_devices
@pytest.mark.parametrize(("shape", "rows", "options"), SMALL)
def test_small_layers(device: str, shape: MoeShape, rows: int, options: dict[str, Any]) -> None:
    Case(shape, rows, device, torch.float32, **options).check()


def listed(kernels: Any) -> dict[str, Tensor]:
    """What the router left: experts that have rows, in order, and rows of each; of all rows their
    experts and weights."""
    count = int(kernels.count)
    found = {"experts": kernels._experts[:count], "bits": kernels._bits[:count]}
    found |= {"ids": kernels.ids, "weights": kernels.weights, "of": kernels._weight_of}
    return {name: each.clone() for name, each in found.items()}


CHOSEN = [
    *[(shape, rows, options, ranks) for (shape, rows, options) in SMALL for ranks in (1,)],
    (MoeShape(32, 16, settings(40, 5), SWIGLU), 33, {}, 2),
]


@on_devices
@pytest.mark.parametrize(("shape", "rows", "options", "ranks"), CHOSEN)
def test_a_kernel_that_chooses_apart_leaves_the_same_bits(
    device: str, shape: MoeShape, rows: int, options: dict[str, Any], ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Launch after launch, with other rows; of one rank's experts too."""
    case = Case(shape, rows, device, torch.float32, **options)
    held = replace(shape, expert_end=shape.settings.num_experts // ranks)
    found: dict[bool, list[dict[str, Tensor]]] = {}
    for apart in (False, True):
        monkeypatch.setattr(decode, "chosen_apart", lambda *_, given=apart: given)
        fixed = case.kernels._fixed
        kernels = MoeDecode(held, torch.device(device), torch.float32, tiles=fixed)
        found[apart] = []
        for step in range(3):
            x = case.hidden.roll(step, 0).roll(step, 1)
            live = Live(case.live.values.roll(step), 4)
            kernels.route(case.weights, x, statistics_of(x, case.norm, 8), EPS, live)
            found[apart].append(listed(kernels))
        assert not kernels._row_bits.any() and not kernels._arrivals.any()
    for together, apart_ in zip(found[False], found[True], strict=True):
        assert len(together["experts"]) > 1
        assert all(torch.equal(together[name], apart_[name]) for name in together)
    assert not torch.equal(found[True][0]["ids"], found[True][1]["ids"])


def test_who_chooses_apart() -> None:
    """Those of many rows, or of many experts."""
    asked = ((1, 512), (1, 64), (1, 32), (32, 32), (33, 32), (64, 512))
    assert [chosen_apart(*each) for each in asked] == [True, True, False, False, True, True]


@on_devices
def test_a_layer_on_a_device_with_little_shared_memory(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "block_limit", lambda device: 6000)
    layer = Case(SMALL[1][0], 5, device, torch.float32, bias=True)
    assert layer.kernels.tiles(5) != choose_tiles(48, 24, 16, 132)
    layer.check()


@on_devices
@pytest.mark.parametrize(("case", "ranks"), [(SMALL[1], 2), (SMALL[2], 3)])
def test_ranks_with_some_experts_each_add_up_to_all(
    device: str, case: tuple[MoeShape, int, dict[str, Any]], ranks: int
) -> None:
    """The first of them has the shared experts. Of the other experts a rank has no weights."""
    shape, _, options = case
    layer = Case(shape, 5, device, torch.float32, **options)
    total, given = torch.zeros_like(layer.hidden), statistics_of(layer.hidden, layer.norm, 8)
    seen: list[Tensor] = []
    for rank in range(ranks):
        part, weights = share_of(shape, layer.weights, rank, ranks)
        kernels = MoeDecode(part, torch.device(device), torch.float32, tiles=options["tiles"])
        out = torch.full_like(total, torch.nan)
        kernels(weights, layer.hidden, given, EPS, out, live=layer.live)
        routing = kernels.routing(5)
        alone = moe_decode_reference(
            part, weights, layer.hidden, EPS, live=layer.live, routing=routing
        )
        torch.testing.assert_close(out, alone, rtol=2e-5, atol=2e-5)
        seen.append(torch.where(routing.ids < 0, NO_EXPERT, routing.ids + part.expert_begin))
        read = seen[-1].unique()
        assert int(kernels.count) == len(read[read != NO_EXPERT]) + part.shared
        total += out
    expected = moe_decode_reference(shape, layer.weights, layer.hidden, EPS, live=layer.live)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    live = layer.live.values >= 4
    assert ((torch.stack(seen) != NO_EXPERT).sum(0)[live] == 1).all(), "each has one rank"


def share_of(
    shape: MoeShape, weights: MoeWeights, rank: int, ranks: int
) -> tuple[MoeShape, MoeWeights]:
    """The experts of a rank, in order, and the shared ones of the first."""
    held = shape.settings.num_experts // ranks
    begin, end = rank * held, (rank + 1) * held
    part = replace(shape, expert_begin=begin, expert_end=end, shared=0 if rank else shape.shared)
    own: dict[str, Tensor | None] = {}
    for name in ("w1", "w2", "b1", "b2"):
        value = getattr(weights, name)
        own[name] = None if value is None else value[begin:end].clone()
    if rank:
        own |= {"shared_w1": None, "shared_w2": None, "shared_gate": None}
    return part, weights._replace(**own)


@on_devices
def test_rows_do_not_see_each_other_and_every_run_is_the_same(device: str) -> None:
    shape = MoeShape(32, 16, settings(8, 2), SWIGLU, shared=1)
    case = Case(shape, 13, device, torch.float32, tiles=tiles((16, 16), (16, 16, 1)))
    together = case.run()
    again = case.run()
    alone = case.run(slice(4, 6))
    for first, second, few in zip(together, again, alone, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(few, first[4:6])


@on_devices
def test_equal_logits_and_nan_have_experts_that_exist(device: str) -> None:
    case = Case(MoeShape(32, 16, settings(6, 3), SWIGLU), 4, device, torch.float32)
    case.weights.router.zero_()
    case.hidden[1, 0] = float("nan")
    out, _, _ = case.run()
    assert case.kernels.ids[:4].tolist() == [[0, 1, 2]] * 3 + [[NO_EXPERT] * 3]
    assert out[1].isnan().all() and not out[[0, 2, 3]].isnan().any()


@on_devices
def test_a_step_of_dead_rows_reads_no_expert(device: str) -> None:
    case = Case(MoeShape(32, 16, settings(6, 3), SWIGLU, shared=1), 4, device, torch.float32)
    for weight in (case.weights.w1, case.weights.w2, case.weights.shared_w2):
        assert weight is not None
        weight.fill_(float("nan"))
    case.live.values.zero_()
    out, _, _ = case.run()
    assert torch.equal(out, case.hidden) and int(case.kernels.count) == 0


def model_with_experts(device: str, shared: bool) -> Any:
    """Two layers, the first of them dense; bfloat16."""
    config = replace(
        small("llama"), num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=32,
        moe_layer_freq=(0, 1), moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=64 if shared else None, moe_shared_expert_gate=shared,
    )  # fmt: skip
    model = bfloat16_model(config, torch.device(device))
    # Each token has the same two: the last bits of its hidden state do not decide.
    bias = model.decoder.layers[1].mlp.router.expert_bias
    with torch.no_grad():
        bias.copy_(torch.tensor([0.0, 4, 0, 0, 4, 0]))
    return config, model


def experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels run interpreted, and the other blocks their modules."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    for name in ("embedding_why_not", "head_why_not", "attention_why_not", "_linears_why_not"):
        monkeypatch.setattr(coverage, name, lambda *_: "another test's")


def as_partial_sums(model: Any, rig: DecodeRig, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits of a model whose experts are of several ranks."""
    mlp, ranks = model.decoder.layers[1].mlp, Ranks()
    with monkeypatch.context() as patched:
        patched.setattr(mlp, "ranks", ranks)
        patched.setattr(model.config, "expert_model_parallel_size", 2)
        found = rig.decode(FusedDecoder(model).forward)
    assert len(ranks.sums) == TOKENS
    return found


class Ranks:
    """Ranks of which this one has all experts. What is left is the way of the sums."""

    expert_rank, expert_tensor_rank, expert_words = 0, 0, None

    class layout:  # noqa: N801
        tensor = 1

    def __init__(self) -> None:
        self.sums: list[torch.Size] = []

    def sum_experts_(self, x: Tensor) -> Tensor:
        self.sums.append(x.shape)
        return x


@pytest.mark.parametrize(
    ("device", "shared"),
    [
        pytest.param("cpu", True, marks=interpreted),
        pytest.param("cuda", True, marks=compiled),
        pytest.param("cuda", False, marks=compiled),
    ],
)
def test_a_block_of_experts_is_that_of_its_module(
    device: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the other blocks run their modules."""
    config, model = model_with_experts(device, shared)
    if device == "cpu":
        experts_alone(monkeypatch)
    rig = DecodeRig(config, torch.device(device))
    monkeypatch.setattr(trial, "MOE", False)
    with pytest.raises(ValueError, match="on trial") if device == "cpu" else nullcontext():
        assert FusedDecoder(model).coverage.fused(MLP) == (1,)
    monkeypatch.setattr(trial, "MOE", True)
    fused = FusedDecoder(model)
    assert fused.coverage.fused(MLP) == ((2,) if device == "cpu" else (1, 2))
    context = rig.context()
    left: list[tuple[Any, list[Any]]] = []
    monkeypatch.setattr(leaving, "to", lambda layer, ids: left.append((layer, ids.tolist())))
    found = rig.decode(fused.forward, context)
    of_kernels = left.copy()
    left.clear()

    def modules(ids: Tensor, positions: Tensor, context: Any, out: Tensor) -> None:
        out.copy_(
            model(ids[None], positions[None], None, inference_context=context,
                  runtime_gather_output=True)[0]
        )  # fmt: skip

    expected = rig.decode(modules)  # rounded to 16 bits as often as what it is compared with
    assert len(left) == TOKENS and of_kernels == left  # each layer leaves its experts
    monkeypatch.setattr(leaving, "to", None)
    assert relative_error(found, expected.double()) < 2 * LIMIT
    partial = as_partial_sums(model, rig, monkeypatch)
    assert relative_error(partial, found.double()) < LIMIT
    with torch.no_grad():
        model.decoder.layers[1].mlp.experts.linear_fc2.weight.mul_(-1)
    assert relative_error(found, rig.decode(modules).double()) > 6 * LIMIT


def test_the_benchmark_times_what_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    script = importlib.import_module("bench_moe")
    for rows, name in itertools.product((16, 32, 64), script.SHAPES):
        found = [*script.up_tiles(rows), *script.down_tiles(script.SHAPES[name], rows, 132)]
        assert len(found) >= 10
        for tile in found:
            stage = (tile.block_n + rows) * tile.block_k * 2
            assert tile.stages >= 3 and (tile.stages - 1) * stage < script.SM_SHARED_BYTES
    if not INTERPRETED:
        return
    monkeypatch.setattr(script, "microseconds", lambda call: call(0) or 1.0)
    monkeypatch.setattr(script, "LAYERS", {1: 1})
    for name in ("up_tiles", "down_tiles"):
        monkeypatch.setattr(script, name, lambda *_: [Tile(16, 16, 3, splits=2)])
    for columns, packed, of_element in ((None, False, 2), (0, False, 1), (None, True, 0.5)):
        size = 32 if packed else 16
        shape = MoeShape(size, size, settings(3, 1), SWIGLU)
        shape = script.with_scales(shape, columns, packed=packed)
        bench = script.Bench(shape, 1, 1e12, torch.device("cpu"), 132)
        assert bench.error() < 3e-2 and bench.experts == 1
        assert bench.weight_bytes == (2 * size * size * of_element, size * size * of_element)
        bench.chosen()
        bench.sweep()
        # A row of 16 numbers of e4m3 is what the kernel that widens takes; of MXFP4 it has 64.
        is_widened = bench.is_widened
        assert is_widened == (columns is not None)
        assert len(capsys.readouterr().out.splitlines()) == 4 + is_widened + 2 + 1


LARGE = {
    "qwen3-30b-a3b": MoeShape(
        2048, 768, settings(128, 8, pre_softmax=True, normalize=True), SWIGLU
    ),
    "mixtral": MoeShape(1024, 3584, settings(8, 2, pre_softmax=True, normalize=True), SWIGLU),
    "deepseek-v2-lite": MoeShape(2048, 1408, settings(64, 6, pre_softmax=True), SWIGLU, shared=2),
    "gpt-oss": MoeShape(2880, 2880, settings(32, 4), GPT_OSS),
}


@pytest.mark.parametrize("rows", [1, 7, 32, 33, 64])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_large_layers(device: str, name: str, rows: int) -> None:
    case = Case(LARGE[name], rows, device, torch.bfloat16, bias=name == "gpt-oss")
    case.check()
    first, second = case.run(), case.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_swapped_operands_on_tensor_cores(device: str) -> None:
    swapped = MoeTiles(Tile(64, 128, 3, swap=True), Tile(64, 64, 4, splits=4, swap=True))
    Case(LARGE["qwen3-30b-a3b"], 40, device, torch.bfloat16, tiles=swapped).check()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_in_a_graph_nothing_waits_for_the_host(device: str) -> None:
    case = Case(LARGE["qwen3-30b-a3b"], 9, device, torch.bfloat16)
    expected = case.run()[0]
    given, statistics = case.hidden, statistics_of(case.hidden, RMS_NORM, 8)
    out = torch.empty_like(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.kernels(case.weights, given, statistics, EPS, out, live=case.live, residual=given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    # The next replay routes other rows elsewhere.
    case.hidden.copy_(case.hidden.flip(0))
    statistics.copy_(statistics.flip(0))
    case.live.values.copy_(case.live.values.flip(0))
    graph.replay()
    torch.testing.assert_close(out, expected.flip(0), rtol=0, atol=0)


def test_tiles_fill_the_sms() -> None:
    for hidden, inner in ((2048, 768), (4096, 14336), (2880, 2880), (2048, 1408), (64, 32)):
        for rows in (16, 32, MAX_ROWS):
            found = choose_tiles(hidden, inner, rows, 132)
            assert hidden % found.down.block_n == 0
            for tile in (found.up, found.down):
                assert tile.stages >= 3
                assert (tile.block_n + rows) * tile.block_k * 2 * (tile.stages - 1) < 227 * 1024
            programs = hidden // found.down.block_n * found.down.splits
            assert programs >= 200 or inner <= 64, (hidden, inner, found)
