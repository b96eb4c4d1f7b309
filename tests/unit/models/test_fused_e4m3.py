"""Fused blocks of models whose linear layers have e4m3 weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.tile_config import FEW_ROWS, MAX_ROWS
from megatron_async.models.build import build_model
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks.moe_block import (
    ExpertKernels,
    MoeBlock,
    experts_why_not,
)
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, EMBEDDING, HEAD, MLP
from megatron_async.models.quantized.linear import (
    keep,
    quantizable,
    quantize_in_place,
    quantized,
    weight_of,
)
from tests.support import emulator
from tests.support.cuda_kernels import device, on_both
from tests.support.decode_rig import DecodeRig, bfloat16_model, small
from tests.support.e4m3_modules import (
    linears_of,
    make_e4m3,
    make_layers_e4m3,
    widened_state,
)
from tests.unit.models.test_forward_accuracy import TOLERANCE

__all__ = ["device"]

LIMIT = TOLERANCE[torch.bfloat16]
ALL = {"qkv": 64, "projection": 0, "fc1": 32, "fc2": 128}
"""Columns that share a scale, by role; 0 for a scale for each row."""


@pytest.fixture(autouse=True)
def _emulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that runs the kernels."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(where, "device_why_not", lambda model: None)


@pytest.mark.sweep
@on_both(
    *("name", "columns"),
    gpu=[
        ("qwen3", ALL),
        ("gpt2", dict.fromkeys(ALL, 128)),
        ("llama", dict.fromkeys(ALL, 32)),
        ("llama", {"qkv": 0, "fc1": 0}),
    ],
    small=[("qwen3", ALL), ("gpt2", {"projection": 32, "fc1": 64, "fc2": 0})],
)
def test_a_decode_step_multiplies_with_weights_times_scales(
    device: torch.device, name: str, columns: dict[str, int]
) -> None:
    config = replace(small(name), num_layers=1)
    model = bfloat16_model(config, device)
    make_layers_e4m3(model, columns)
    fused = FusedDecoder(model)
    assert not fused.coverage.fallbacks
    rig = DecodeRig(config, device)
    assert rig.error(rig.decode(fused.forward), widened_state(model)) < LIMIT


@on_both("name", gpu=[("qwen3",), ("llama",)], small=[("llama",)])
def test_a_model_that_is_built_with_e4m3_has_fused_blocks(device: torch.device, name: str) -> None:
    """Those of ``quantization="fp8"``, whose classes are others."""
    config = replace(small(name), num_layers=1)
    plain = bfloat16_model(config, device)
    made = build_model(
        config, device=device, dtype=torch.bfloat16, initialize=False, may_be_quantized=True
    ).eval()
    for layer in quantizable(made).values():
        keep(layer, None)
    made.load_state_dict(plain.state_dict(), strict=False)
    for layer in quantizable(made).values():
        quantize_in_place(layer)
    assert len(quantized(made)) == 4
    fused = FusedDecoder(made)
    assert not fused.coverage.fallbacks
    layers = quantized(made).items()
    meant = dict(made.named_parameters()) | {
        f"{name}.weight": weight_of(layer, torch.float32) for name, layer in layers
    }
    rig = DecodeRig(config, device)
    assert rig.error(rig.decode(fused.forward), meant) < LIMIT


Change = Callable[[Any], None]


def _scales(linear: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    linear.weight_scale = Parameter(change(linear.weight_scale.data), requires_grad=False)


def _transpose(linear: Any) -> None:
    linear.weight = Parameter(linear.weight.data.t().contiguous().t(), requires_grad=False)


def _narrow(linear: Any) -> None:
    linear.weight = Parameter(linear.weight.data[:, :192].contiguous(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda linear: delattr(linear, "weight_scale"), "its e4m3 weight has no scales"),
        (lambda linear: _scales(linear, torch.Tensor.bfloat16), "not contiguous float32"),
        (lambda linear: _scales(linear, lambda s: s.t().contiguous().t()), "not contiguous"),
        (lambda linear: _scales(linear, lambda s: s[:, :3].contiguous()), r"scales \(128, 3\)"),
        (lambda linear: _scales(linear, lambda s: s[:64]), r"scales \(64, 4\) of an e4m3"),
        (lambda linear: _scales(linear, lambda s: s.repeat(1, 4)), r"scales \(128, 16\) of"),
        (_transpose, "its e4m3 weight is not contiguous"),
        (_narrow, r"scales \(128, 4\) of an e4m3 weight of 128 x 192"),
    ],
)
def test_scales_that_no_kernel_takes_leave_the_block_to_its_module(
    change: Change, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    model = bfloat16_model(small("llama"), torch.device("cpu"))
    linear = model.decoder.layers[1].mlp.linear_fc2
    make_e4m3(linear, 64)
    assert not FusedDecoder(model).coverage.fallbacks
    change(linear)
    found = FusedDecoder(model).coverage
    assert found.fused(MLP) == (1,) and found.fused(ATTENTION) == (1, 2)
    ((reason, _),) = {(b.reason, b.kind) for b in found.blocks if b.reason is not None}
    assert re.search(says, str(reason)), reason


def experts_in_e4m3(groups: int = 1) -> Any:
    """A model whose second layer has experts, and they e4m3, as shared ones are."""
    config = replace(
        small("llama"), num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64,
        moe_layer_freq=(0, 1), moe_shared_expert_intermediate_size=128,
    )  # fmt: skip
    plain = bfloat16_model(config, torch.device("cpu"))
    made = build_model(
        config, device=torch.device("cpu"), dtype=torch.bfloat16, initialize=False,
        may_be_quantized=True,
    ).eval()  # fmt: skip
    for layer in quantizable(made).values():
        keep(layer, None)
    made.load_state_dict(plain.state_dict(), strict=False)
    for layer in quantizable(made).values():
        quantize_in_place(layer, groups)
    return made


def test_experts_in_e4m3_are_given_to_their_kernels_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch)
    model = experts_in_e4m3(2)
    mlp = model.decoder.layers[1].mlp
    assert experts_why_not(mlp, model.config) is None
    block = MoeBlock(model.decoder.layers[1], ExpertKernels(torch.device("cpu"), 132))
    given = block._weights()
    assert given.w1 is mlp.experts.linear_fc1.weight
    assert given.w2_scale is mlp.experts.linear_fc2.weight_scale
    assert given.shared_w2 is mlp.shared_experts.linear_fc2.weight
    assert given.shared_w1_scale is mlp.shared_experts.linear_fc1.weight_scale
    assert block._kernels.shape.scale_columns == (64, 32, 64, 64)
    assert block._kernels.shape.scale_steps == (64, 32)


def _change_scales(linear: Any, scale: torch.Tensor) -> None:
    linear.weight_scale = scale


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda mlp: _change_scales(mlp.experts.linear_fc1, torch.ones(4, 128, 8)),
            "a scale for 16 columns of its e4m3 w1 is not covered",
        ),
        (
            lambda mlp: _change_scales(mlp.experts.linear_fc2, torch.ones(4, 64, 1)),
            r"scales \(4, 64, 1\) of its e4m3 w2 are not covered",
        ),
        (
            lambda mlp: _change_scales(
                mlp.experts.linear_fc2, mlp.experts.linear_fc2.weight_scale.bfloat16()
            ),
            "the scales of its e4m3 w2 are not contiguous float32",
        ),
        (
            lambda mlp: delattr(mlp.shared_experts.linear_fc1, "weight_scale"),
            "its e4m3 shared_w1 has no scales",
        ),
    ],
)
def test_experts_whose_scales_no_kernel_takes_are_left_to_their_module(
    change: Callable[[Any], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    model = experts_in_e4m3()
    assert FusedDecoder(model).coverage.fused(MLP) == (1, 2)
    change(model.decoder.layers[1].mlp)
    found = FusedDecoder(model).coverage
    assert found.fused(MLP) == (1,) and found.fused(ATTENTION) == (1, 2)
    assert re.search(says, str([b.reason for b in found.blocks if b.reason])), found.blocks


def test_ends_of_a_model_are_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    model = bfloat16_model(small("llama"), torch.device("cpu"))
    make_layers_e4m3(model, ALL)
    make_e4m3(model.output_layer)
    found = FusedDecoder(model).coverage
    assert found.fused(HEAD) == () and found.fused(EMBEDDING) == (None,)
    assert [b.reason for b in found.blocks if b.reason] == ["its output layer has e4m3 weights"]


def test_more_than_64_rows_are_fused_as_a_whole_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of bfloat16 beside those of e4m3 leave them to modules, and no others do."""
    emulator.install(monkeypatch)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)
    config, cpu = replace(small("llama"), hidden_size=256, head_dim=64), torch.device("cpu")
    model = bfloat16_model(config, cpu)
    make_layers_e4m3(model, {"fc1": 0, "fc2": 0})
    fused, context = FusedDecoder(model), DecodeRig(config, cpu).context()
    assert not fused.covered([1, 8, 32], context).fallbacks
    found = fused.covered([FEW_ROWS], context)
    assert found.fused(MLP) == found.fused(ATTENTION) == (1, 2)
    assert fused.covered([MAX_ROWS], context).off == f"more than {FEW_ROWS} rows"
    assert fused.covered([8, MAX_ROWS], context) == fused.covered([8], context)
    plain = FusedDecoder(bfloat16_model(config, cpu))
    assert not plain.covered([8, MAX_ROWS], context).fallbacks
    context.num_speculative_tokens = 1
    assert not plain.covered([MAX_ROWS], context).fallbacks
    assert fused.covered([MAX_ROWS], context).off == f"more than {FEW_ROWS} rows"


def test_layers_of_one_shape_and_different_formats_have_kernels_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.install(monkeypatch)
    model = bfloat16_model(small("llama"), torch.device("cpu"))
    make_e4m3(linears_of(model.decoder.layers[1])["fc1"], 32)
    gemms = FusedDecoder(model).gemms
    assert (gemms["fc1"].scale_columns, gemms["fc1 of layer 2"].scale_columns) == (0, 32)
    assert gemms["fc1 of layer 2"] != gemms["fc1"] and "qkv of layer 2" not in gemms
