"""Norms and activations that quantize their results, beside one after the other; and models with
them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.models.build import build_random_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers import decoder_layer
from megatron_async.models.quantized import inputs, linear
from megatron_async.models.quantized.activations import quantize_activations
from megatron_async.models.quantized.linear import quantize_in_place
from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.compiled_kernels import HOPPER, compiles, compiling_for, empty
from tests.support.interpreter import HAS_TRITON, compiled, interpreted, on_devices
from tests.support.sweeps import some
from tests.unit.kernels.test_fused_kernels import draw, fuse
from tests.unit.kernels.test_scaled_e4m3 import check_same
from tests.unit.models.test_batch_invariant import MODELS, Rig

if HAS_TRITON:
    from megatron_async.kernels.gemm import e4m3_inputs
    from megatron_async.kernels.gemm.scaled_e4m3 import Sums, apply_scales
    from megatron_async.kernels.norm.add_norm import add_norm, add_norm_reference
    from megatron_async.kernels.norm.norm_inputs import add_norm_inputs, norm_rows
    from megatron_async.kernels.norm.swiglu import swiglu
    from megatron_async.kernels.norm.swiglu_inputs import swiglu_inputs
    from megatron_async.models.quantized import feeds, fused_inputs

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
SIZES = ((96, 1), (256, 2), (288, 3))
DTYPES = (torch.bfloat16, torch.float32)


@on_devices
@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize(("columns", "groups"), SIZES)
def test_a_norm_quantizes_what_it_gives(
    device: str, columns: int, groups: int, static: bool
) -> None:
    given = torch.tensor([0.02], device=device) if static else None
    on_cpu = None if given is None else given.cpu()
    for dtype in DTYPES:
        x = draw(5, columns, dtype=dtype, device=device)
        x[1], x[2, 3] = 0, float("nan")
        weight, bias, residual, x_bias = (x[0].flip(0) * n for n in (0.3, 0.1, 2, 0.5))
        residual = residual.repeat(5, 1)
        for case in (
            {"residual": None, "bias": None, "x_bias": None},
            {"residual": residual, "bias": bias, "x_bias": x_bias, "center": True, "offset": 1.0},
        ):
            options = {"center": False, "offset": 0.0, **case}
            hidden, normed, found = add_norm_inputs(
                x, weight=weight, eps=1e-5, groups=groups, static=given, **options
            )
            check_same(found, inputs.quantize_inputs(normed.cpu(), groups, on_cpu))
            meant = add_norm_reference(x, weight=weight, eps=1e-5, **options)
            alone = add_norm(x, weight=weight, eps=1e-5, **options)
            tolerance = 1e-5 if dtype is torch.float32 else 2e-2
            close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
            torch.testing.assert_close(hidden, meant[0], **close)
            torch.testing.assert_close(
                normed,
                add_norm_reference(
                    hidden,
                    None,
                    weight,
                    options["bias"],
                    1e-5,
                    center=options["center"],
                    offset=options["offset"],
                )[1],
                **close,
            )
            assert torch.equal(hidden.nan_to_num(), alone[0].nan_to_num())


@on_devices
@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize(("columns", "groups"), SIZES)
def test_swiglu_quantizes_what_it_would_give(
    device: str, columns: int, groups: int, static: bool
) -> None:
    given = torch.tensor([0.02], device=device) if static else None
    for dtype in DTYPES:
        x = draw(2, 3, 2 * columns, dtype=dtype, device=device)
        x[0, 1], x[1, 2, 7] = 0, float("inf")
        numbers, scale = swiglu_inputs(x, groups, given)
        assert numbers.shape == (2, 3, columns) and scale.shape == (2, 3, groups)
        on_cpu = None if given is None else given.cpu()
        check_same((numbers, scale), inputs.quantize_inputs(swiglu(x).cpu(), groups, on_cpu))
        assert numbers[1, 2].isnan().any() and not numbers[:1].float().isnan().any()


def every_bfloat16(device: str) -> Tensor:
    """``[65536]``: all finite ones; zeros stand for the others."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).nan_to_num(0.0, 0.0, 0.0).to(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fewer_instructions_have_the_bits_of_those_that_say_what_is_meant() -> None:
    """SiLU of all gates, and their quotients by scales from the least that is inverted to the
    largest, and by those that are not."""
    gate = every_bfloat16("cuda").view(-1, 256)
    for up in (1.0, -0.37, 2.0**60, 2.0**-70, 1.7e38):
        x = torch.cat((gate, torch.full_like(gate, up)), -1)
        given = swiglu(x)
        finite = given.isfinite().all(-1)
        check_same(swiglu_inputs(x[finite], 2), inputs.quantize_inputs(given[finite].cpu(), 2))
    chance = torch.Generator().manual_seed(5)
    sizes = torch.randn(256, 256, generator=chance) * 2.0 ** torch.randint(-12, 1, (256, 256))
    for exponent in (*range(-125, 120, 7), -81, -80, -79, 99, 100, 101):
        x = (sizes * (1 + torch.rand(256, 1, generator=chance)) * 2.0**exponent).cuda()
        check_same(e4m3_inputs.quantize_inputs(x, 1), inputs.quantize_inputs(x.cpu(), 1))


@on_devices
@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("columns", (96, 256))
def test_rows_of_a_fused_step_are_quantized_as_elsewhere(
    device: str, columns: int, static: bool
) -> None:
    """Into memory that stays, alone and behind either norm; rows behind them stay as they are."""
    given = torch.tensor([0.02], device=device) if static else None
    x = draw(5, columns, dtype=torch.bfloat16, device=device)
    x[1], x[2, 3] = 0, float("nan")
    weight, bias = x[0].flip(0) * 0.3, x[3] * 0.1
    numbers = torch.full((6, columns), 7.0, device=device).to(torch.float8_e4m3fn)
    scale = torch.full((6, 1), 7.0, device=device)
    kept = numbers[:5], scale[:5]
    e4m3_inputs.quantize_rows(x, *kept, given)
    check_same(kept, inputs.Inputs(*(e.cpu() for e in e4m3_inputs.quantize_inputs(x, 1, given))))
    for of_bias, center in ((None, False), (bias, True)):
        norm_rows(
            x, weight, of_bias, 1e-5, numbers=kept[0], scale=kept[1], static=given, center=center
        )
        meant = add_norm_inputs(
            x, None, weight, of_bias, 1e-5, groups=1, static=given, center=center
        )[2]
        check_same(kept, inputs.Inputs(*(each.cpu() for each in meant)))
    assert (numbers[5].float() == 7).all() and scale[5] == 7


def quantized_rig(
    name: str, dtype: torch.dtype, device: str, groups: int, *, invariant: bool = True
) -> Rig:
    rig = Rig(name, dtype, device)
    config = replace(MODELS[name], num_layers=1) if device == "cpu" else MODELS[name]
    model = build_random_model(config, device=torch.device(device), dtype=dtype, quantize=True)
    for layer in linear.quantizable(model).values():
        layer.weight.data = linear.weight_of(layer, dtype)
        quantize_in_place(layer, groups)
    quantize_activations(model)
    rig.wrapper = GPTNetwork(model, batch_invariant=invariant)
    return rig


@pytest.mark.parametrize(
    ("device", "name", "groups"),
    [
        pytest.param("cpu", "llama", 1, marks=interpreted),
        *(pytest.param("cuda", *each, marks=compiled) for each in (("llama", 1), ("gpt2", 2))),
    ],
)
def test_a_model_computes_the_same_with_and_without_kernels(
    device: str, name: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its norms and activations quantize for the layer behind them, so that kernels are
    launched for the outputs of attention alone, and in gpt2 for those of its activation."""
    rig = quantized_rig(name, torch.float32, device, groups)
    chunks, others, quantize = [9, 1], 2, e4m3_inputs.quantize_inputs
    asked: list[int] = []

    def counted(x: Tensor, *more: object) -> tuple[Tensor, Tensor]:
        asked.append(x.shape[-1])
        return quantize(x, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(e4m3_inputs, "quantize_inputs", counted)
    monkeypatch.setattr(linear, "product_of", inputs.product_by_kernels)
    if device == "cpu":
        feeds.link(rig.wrapper.model)
        fuse(monkeypatch, True)
        chunks, others = [5], 0
    found = rig.compute(chunks, others=others)
    config = MODELS[name]
    once = {config.num_attention_heads * config.head_dim}
    assert set(asked) == once | ({config.ffn_hidden_size} if name == "gpt2" else set())
    fuse(monkeypatch, False)
    monkeypatch.setattr(linear, "product_of", meant_product)
    plain = rig.compute(chunks, others=others)
    for one, other in zip(found, plain, strict=True):
        assert (one.double() - other.double()).norm() < 0.03 * other.double().norm()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_prefill_by_cublas_is_that_of_the_reference(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 with scales by row, and not batch-invariant."""
    rig = quantized_rig(name, torch.bfloat16, device, 1, invariant=False)
    found = rig.compute([64], others=3)
    fuse(monkeypatch, False)
    monkeypatch.setattr(linear, "product_of", meant_product)
    plain = rig.compute([64], others=3)
    for one, other in zip(found, plain, strict=True):
        assert (one.double() - other.double()).norm() < 0.05 * other.double().norm()


def meant_product(layer: object, x: Tensor) -> Tensor:
    """By the reference, on any device."""
    made: SimpleNamespace = layer  # type: ignore[assignment]
    quantized = inputs.quantize_inputs(x, made.weight_scale.shape[1], made.input_scale)
    return inputs.product(quantized, made.weight, made.weight_scale, x.dtype)


def test_numbers_are_taken_by_the_layer_that_they_are_made_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantized_rig("llama", torch.float32, "cpu", 1).wrapper.model
    feeds.link(model)
    first = model.decoder.layers[0]
    qkv, fc1, fc2 = first.self_attention.linear_qkv, first.mlp.linear_fc1, first.mlp.linear_fc2
    assert first.input_layernorm.feeds is qkv and first.pre_mlp_layernorm.feeds is fc1
    assert first.mlp.activation_func.feeds is fc2 and model.decoder.final_layernorm.feeds is None
    assert len(list(model.parameters())) == len(set(map(id, model.parameters())))
    assert "feeds" not in dict(first.input_layernorm.named_children())

    from megatron_async.kernels.gemm import scaled_e4m3

    taken: list[Tensor] = []
    monkeypatch.setattr(
        scaled_e4m3, "multiply", lambda *given, **_: taken.append(given[0]) or given[1]
    )
    monkeypatch.setattr(e4m3_inputs, "quantize_inputs", inputs.quantize_inputs)
    x = torch.ones(8, 48)
    numbers, scale = inputs.quantize_inputs(x * 3, 1)
    x.quantized = fused_inputs.Quantized(qkv, numbers, scale, x.dtype)  # type: ignore[attr-defined]
    inputs.product_by_kernels(qkv, x)
    inputs.product_by_kernels(fc1, x)
    assert taken[0] is numbers and taken[1] is not numbers
    lone = numbers.clone()
    lone.quantized = fused_inputs.Quantized(fc1, None, scale, x.dtype)  # type: ignore[attr-defined]
    inputs.product_by_kernels(fc1, lone)
    assert taken[2] is lone
    with pytest.raises(TypeError, match="numbers in e4m3 have come without their scale"):
        inputs.product_by_kernels(qkv, lone)


@compiles
@pytest.mark.parametrize("groups", some([1, 32], 1))
def test_kernels_compile_for_hopper(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_async.kernels.norm import norm_inputs
    from megatron_async.kernels.norm import swiglu_inputs as of_swiglu

    for module in (norm_inputs, of_swiglu, e4m3_inputs):
        monkeypatch.setattr(module, "rounds_once", lambda device: True)
    for module in (norm_inputs, e4m3_inputs):
        monkeypatch.setattr(module, "uses_pdl", lambda device: True)
    x, weight = empty(300, 4096, dtype=torch.bfloat16), empty(4096, dtype=torch.bfloat16)
    with compiling_for(HOPPER) as kernels:
        add_norm_inputs(x, x, weight, None, 1e-5, groups=groups)
        swiglu_inputs(empty(300, 2 * 14336, dtype=torch.bfloat16), 14336 // (4096 // groups))
        rows = empty(64, 4096, dtype=torch.float8_e4m3fn), empty(64, 1, dtype=torch.float32)
        e4m3_inputs.quantize_rows(x[:64], *rows, None)
        norm_rows(
            x[:64], weight, None, 1e-5, numbers=rows[0], scale=rows[1], static=None, center=False
        )
    assert len(kernels) == 4
    for kernel, reads_weight in zip(kernels[2:], (False, True), strict=True):
        before, waited = kernel.ptx.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in waited and "ld.global" in waited
        assert ("ld.global" in before) == reads_weight and "st.global" not in before
    for kernel in kernels:
        assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx and kernel.shared <= 8192


@on_devices
@pytest.mark.parametrize("has_bias", (False, True))
def test_a_norm_applies_the_scales_of_sums(device: str, has_bias: bool) -> None:
    """The very numbers of a kernel that applies them, and of the norm behind it."""
    rows, columns = 6, 96
    sums = draw(rows, columns, dtype=torch.float32, device=device) * 300
    scale = draw(rows, 1, dtype=torch.float32, device=device).abs() * 0.01
    weight_scale = draw(columns, 1, dtype=torch.float32, device=device).abs() * 0.02
    sums[2, 3], scale[4] = float("nan"), float("inf")
    product = Sums(sums, scale, weight_scale)
    residual, weight = (draw(n, columns, dtype=torch.bfloat16, device=device) for n in (rows, 1))
    residual = residual.view(rows, 1, columns)
    x_bias = weight[0].flip(0) if has_bias else None
    options = {"groups": 1, "offset": 1.0, "x_bias": x_bias}
    applied = apply_scales(product, torch.bfloat16).view(residual.shape)
    assert (applied[0].float() - sums[0] * scale[0] * weight_scale[:, 0]).abs().max() < 0.1
    found = add_norm_inputs(product, residual, weight[0], None, 1e-5, **options)
    meant = add_norm_inputs(applied, residual, weight[0], None, 1e-5, **options)
    for one, other in zip((*found[:2], *found[2]), (*meant[:2], *meant[2]), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0))


def joins_of(layer: Any, hidden: Tensor, sums: Sums | None) -> tuple[list[str], Tensor]:
    """What is called where a layer adds its output projection, and what comes out."""
    called: list[str] = []
    norm, proj = layer.pre_mlp_layernorm, layer.self_attention.linear_proj
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "sums_by_kernels", lambda *given: called.append("sums") or sums)
        patch.setattr(type(norm), "add", lambda self, x, *more: called.append("add") or x)
        patch.setattr(type(norm), "add_scaled", lambda self, x, *more: called.append("scaled") or x)
        made = decoder_layer._add_scaled(proj, hidden, norm, hidden)
    return called, made


def test_scales_are_applied_by_a_norm_only_where_nobody_else_sees_the_product() -> None:
    model = quantized_rig("llama", torch.float32, "cpu", 1).wrapper.model
    layer = model.decoder.layers[0]
    proj, norm = layer.self_attention.linear_proj, layer.pre_mlp_layernorm
    x = torch.ones(3, 1, proj.weight.shape[1])
    sums = Sums(x, x, x)
    assert joins_of(layer, x, sums)[0] == ["add"], "the norm quantizes for nobody"
    feeds.link(model)
    called, made = joins_of(layer, x, sums)
    assert called == ["sums", "scaled"] and made is sums
    assert joins_of(layer, x, None)[0] == ["sums", "add"], "the product is not made so"
    watched = proj.register_forward_hook(lambda *given: None)
    assert joins_of(layer, x, sums)[0] == ["add"]
    watched.remove()
    proj.quantizes_input = False
    assert joins_of(layer, x, sums)[0] == ["add"]
    proj.quantizes_input = True
    proj.skip_bias_add, proj.bias = False, torch.nn.Parameter(torch.zeros(len(proj.weight)))
    assert joins_of(layer, x, sums)[0] == ["add"], "a bias is added to the rounded product"
    proj.skip_bias_add = True
    assert joins_of(layer, x, sums)[0] == ["sums", "scaled"]
    assert layer._joins_scales()
    norm.feeds = None


def in_any_order(context: ForwardBatch) -> ForwardBatch:
    context.batch_invariant = False
    return context


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=compiled)],
)
def test_a_layer_whose_norms_apply_scales_is_the_same(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, beside kernels that apply them."""
    from megatron_async.kernels.gemm import scaled_e4m3

    rig = quantized_rig("llama", torch.bfloat16, device, 1, invariant=False)
    monkeypatch.setattr(linear, "product_of", inputs.product_by_kernels)
    monkeypatch.setattr(scaled_e4m3, "_has_scales_by_row", lambda device: True)
    for layer in linear.quantizable(rig.wrapper.model).values():
        layer.unit_scale = torch.ones((), device=device)
    chunks, others = [24], 3
    if device == "cpu":
        feeds.link(rig.wrapper.model)
        fuse(monkeypatch, True)
        chunks, others = [5], 0
    applied: list[int] = []
    apply = scaled_e4m3.apply_scales

    def counted(product: Sums, dtype: torch.dtype) -> Tensor:
        applied.append(product.sums.shape[1])
        return apply(product, dtype)

    monkeypatch.setattr(scaled_e4m3, "apply_scales", counted)
    monkeypatch.setattr(rig, "context", lambda slots: in_any_order(Rig.context(rig, slots)))
    joined = rig.compute(chunks, others=others)
    config = MODELS["llama"]
    few = len(applied)
    applied.clear()
    monkeypatch.setattr(decoder_layer.DecoderLayer, "_joins_scales", lambda self: False)
    apart = rig.compute(chunks, others=others)
    assert set(applied) >= {config.hidden_size} and len(applied) > few > 0
    for one, other in zip(joined, apart, strict=True):
        assert torch.equal(one, other)
