"""Fused blocks of layers of experts of which a part is e4m3, and of those of MTP layers. On the CPU
routed experts are computed by their reference, and all else by emulated kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import RMS_NORM
from megatron_async.kernels.moe import row
from megatron_async.models.build import build_model
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks.gemms import SkinnyGemms
from megatron_async.models.fused.blocks.moe_block import ExpertKernels, MoeBlock, is_mixture
from megatron_async.models.fused.blocks.residual import HALF, LAYER, Norm, Residual, Workspace
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, HEAD, MLP, PROJECTION, DecodeCoverage
from megatron_async.models.fused.shared_experts import SharedExperts
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.quantized.linear import (
    keep,
    quantizable,
    quantize_in_place,
    quantized,
)
from tests.support import emulator, reference_experts
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.decode_rig import bfloat16_model, small
from tests.unit.models.test_forward_accuracy import TOLERANCE
from tests.unit.models.test_fused_mtp import LAYERS, DraftRig

__all__ = ["device"]

LIMIT = TOLERANCE[torch.bfloat16]
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip
ROUTED = (".experts.linear_fc1", ".experts.linear_fc2")
SHARED = ("shared_experts.linear_fc1", "shared_experts.linear_fc2")


@pytest.fixture(autouse=True)
def ran(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As a GPU that runs the kernels; the shapes of experts that the reference computed."""
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    is_cpu = "cuda" not in request.node.name
    return reference_experts.install(monkeypatch) if is_cpu else []


def model_of(device: torch.device, e4m3: tuple[str, ...], groups: int = 1, **values: Any) -> Any:
    """A model whose layers of experts have e4m3 in the named parts alone."""
    config = replace(small("llama"), **{**EXPERTS, **values})
    plain = bfloat16_model(config, device)
    model = build_model(
        config, device=device, dtype=torch.bfloat16, initialize=False, may_be_quantized=True
    ).eval()
    for layer in quantizable(model).values():
        keep(layer, None)
    state = plain.state_dict()
    for name in state:
        if name.endswith(f"{SHARED[1]}.weight"):
            state[name] *= 16  # else routed ones are most of the sum
    model.load_state_dict(state, strict=False)
    for name, layer in quantizable(model).items():
        if name.endswith(e4m3):
            quantize_in_place(layer, groups)
    assert len(quantized(model)) == len(e4m3) * sum(is_mixture(m) for m in model.modules())
    return model


CASES = {
    "routed": (ROUTED, 2),
    "shared": (SHARED, 1),
    "all but the last": (ROUTED + SHARED[:1], 1),
    "the last": (SHARED[1:], 2),
}


def added_by(layer: Any, config: Any, hidden: Tensor) -> Tensor:
    """What the fused block of a layer's experts adds to a residual stream, fp32; what it leaves for
    the next norm is checked."""
    gemms = SkinnyGemms(hidden.device)
    beside = partial(SharedExperts, config, gemms)
    block = MoeBlock(layer, ExpertKernels(hidden.device, gemms.sm_count), HALF, beside)
    rows, size = hidden.shape
    context = SimpleNamespace(
        slot_mapping=torch.full((rows,), 99, device=hidden.device), block_size_tokens=16,
        grids_may_wait=False,
    )  # fmt: skip
    assert block.why_not(8, context) is None
    residual = Workspace(size, hidden.device).residual(rows)
    given, reader = residual.replace(hidden, block.norm, LAYER), block.norm
    step: Any = SimpleNamespace(residual=residual, context=context)
    statistics = block(step, given, reader)
    assert statistics is not None
    check_statistics(statistics, residual, reader)
    return residual.hidden.float() - hidden.float()


def check_statistics(statistics: Tensor, residual: Residual, reader: Norm) -> None:
    tiles = residual.hidden.float().unflatten(1, (statistics.shape[1], -1))
    mean = tiles.mean(2)
    if reader.kind == RMS_NORM:
        mean = torch.zeros_like(mean)
        scaled = residual.hidden * reader.weight
        assert relative_error(residual.input_of(reader), scaled.double()) < LIMIT
    square = (tiles - mean[..., None]).square().sum(2)
    for found, meant in ((statistics[..., 0], mean), (statistics[..., 1], square)):
        assert torch.allclose(found, meant, rtol=1e-2, atol=1e-2)


def random_hidden(device: torch.device) -> Tensor:
    return torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).to(device).bfloat16()


@on_both(
    *("case", "normalization"),
    gpu=[(case, norm) for case in CASES for norm in ("RMSNorm", "LayerNorm")],
    small=[("routed", "RMSNorm"), ("the last", "LayerNorm")],
)
@torch.inference_mode()
def test_shared_experts_of_another_format_are_computed_beside_the_others(
    device: torch.device, case: str, normalization: str, ran: list[Any]
) -> None:
    model = model_of(device, *CASES[case], normalization=normalization)
    fused = FusedDecoder(model)
    assert not fused.coverage.fallbacks
    assert {"shared fc1", "shared fc2"} <= fused.gemms.keys()
    layer, hidden = model.decoder.layers[0], random_hidden(device)
    got = added_by(layer, model.config, hidden)
    assert all(shape.shared == 0 for shape in ran)
    normed = layer.pre_mlp_layernorm(hidden[:, None])
    assert relative_error(got, layer.mlp(normed)[0].squeeze(1).double()) < LIMIT
    layer.mlp.shared_experts.linear_fc2.weight.view(torch.uint8).zero_()
    assert relative_error(got, layer.mlp(normed)[0].squeeze(1).double()) > 4 * LIMIT


@on_both(
    *("e4m3", "kept"),
    gpu=[(ROUTED[:1] + SHARED[:1], (64, 0, 64, 0)), (ROUTED[1:] + SHARED[1:], (0, 32, 0, 64))],
    small=[(ROUTED[:1] + SHARED[:1], (64, 0, 64, 0)), (ROUTED[1:] + SHARED[1:], (0, 32, 0, 64))],
)
@torch.inference_mode()
def test_one_of_an_experts_two_weights_may_be_e4m3(
    device: torch.device, e4m3: tuple[str, ...], kept: tuple[int, ...]
) -> None:
    """A checkpoint may leave all second layers in 16 bits, those of shared experts too."""
    model = model_of(device, e4m3, 2)
    fused = FusedDecoder(model)
    assert not fused.coverage.fallbacks and "shared fc1" not in fused.gemms
    layer, hidden = model.decoder.layers[0], random_hidden(device)
    kernels = ExpertKernels(device, 132)
    shape = MoeBlock(layer, kernels)._kernels.shape
    assert shape.scale_columns == kept
    assert row.why_not(shape, 1, torch.bfloat16, 132) == "weights of two formats are not covered"
    found = layer.mlp(layer.pre_mlp_layernorm(hidden[:, None]))[0].squeeze(1)
    assert relative_error(added_by(layer, model.config, hidden), found.double()) < LIMIT


@emulated
@torch.inference_mode()
def test_of_ranks_those_with_shared_experts_add_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with half of the experts each, one after the other: what they hand out for the sum
    is together what one rank adds."""
    emulator.install(monkeypatch)
    model = model_of(torch.device("cpu"), ROUTED)
    layer, hidden = model.decoder.layers[0], random_hidden(torch.device("cpu"))
    fc1, fc2 = layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2
    whole = added_by(layer, model.config, hidden)
    handed_out: list[Tensor] = []
    kept = [(each.weight, each.weight_scale) for each in (fc1, fc2)]
    for rank, experts in enumerate((slice(2), slice(2, None))):
        layer.mlp.ranks = SimpleNamespace(
            expert_rank=rank, layout=SimpleNamespace(tensor=1), expert_tensor_rank=0,
            expert_words=None, sum_experts_=lambda x: handed_out.append(x.float()),
        )  # fmt: skip
        for each, (weight, scale) in zip((fc1, fc2), kept, strict=True):
            each.weight = torch.nn.Parameter(weight[experts], requires_grad=False)
            each.weight_scale = scale[experts]
        added_by(layer, model.config, hidden)
    first, second = handed_out
    assert relative_error(first + second, whole.double()) < LIMIT
    assert relative_error(first, whole.double()) > 4 * LIMIT < second.norm() / whole.norm()


@on_both("e4m3", gpu=[((),), (ROUTED,), (ROUTED + SHARED,)], small=[(ROUTED,)])
@torch.inference_mode()
def test_experts_of_mtp_layers_draft_as_modules_do(
    device: torch.device, e4m3: tuple[str, ...], ran: list[Any]
) -> None:
    model = model_of(device, e4m3, num_layers=2, mtp_num_layers=2)
    wrapper = GPTNetwork(model)
    covered = DecodeCoverage(wrapper.decode_coverage().drafting)
    for kind in (PROJECTION, ATTENTION, MLP, HEAD):
        assert covered.fused(kind) == LAYERS, kind
    wanted = DraftRig(model, device, 1, 1).run(wrapper, fused=False)
    assert not ran
    got = DraftRig(model, device, 1, 1).run(wrapper, fused=True)
    assert device.type == "cuda" or len(ran) == 2
    for one, other in zip(got, wanted, strict=True):
        assert one.isfinite().all()
        assert relative_error(one, other.double()) < LIMIT


def test_a_gate_or_another_activation_leaves_them_to_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch)
    for values, says in (
        ({"moe_shared_expert_gate": True}, "shared experts of another format than the others have"),
        ({"activation": "geglu"}, "the activation of its shared experts is not covered"),
    ):
        model = model_of(torch.device("cpu"), ROUTED, **values)
        found = FusedDecoder(model).coverage
        assert found.fused(MLP) == () and found.fused(ATTENTION) == (1, 2)
        assert says in str([block.reason for block in found.blocks])
