"""Models that the fused decode forward must leave alone: it would compute something else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.kernels.gemm.tile_config import GELU, GELU_TANH, LAYER_NORM, RMS_NORM, SILU_GATE
from megatron_async.models import wrapper
from megatron_async.models.build import build_model
from megatron_async.models.fused import decoder as fused_decode
from megatron_async.models.fused.coverage import epilogue_of, model_why_not, norm_kind, why_not
from megatron_async.models.wrapper import GPTInferenceWrapper
from tests.support import emulator
from tests.unit.test_forward_accuracy import MODELS, Rig, tiny

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip


def our_model(name: str) -> Any:
    config = replace(tiny(MODELS[name]), hidden_size=128, head_dim=32, ffn_hidden_size=256)
    return build_model(config, device="cpu", dtype=torch.bfloat16, initialize=False)


def stock_model(**values: Any) -> Any:
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "use_cpu_initialization": True,
            "params_dtype": torch.bfloat16,
            "bf16": True,
            **values,
        }
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=96,
        max_sequence_length=64,
        parallel_output=False,
        position_embedding_type="rope",
    )
    return GPTInferenceWrapper(model.to(config.params_dtype)).model


SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_this_package_are_covered(name: str) -> None:
    model = our_model(name)
    assert model_why_not(model) is None
    assert why_not(model) == "the model is not on a GPU"


@pytest.mark.parametrize(
    ("values", "epilogue"),
    [
        ({"bias_activation_fusion": False}, GELU),
        ({"bias_activation_fusion": True}, GELU_TANH),
        ({**SWIGLU, "bias_activation_fusion": False}, SILU_GATE),
        ({**SWIGLU, "bias_activation_fusion": True}, SILU_GATE),
    ],
)
def test_stock_models_are_covered(values: dict[str, Any], epilogue: int) -> None:
    model = stock_model(**values)
    assert model_why_not(model) is None
    assert epilogue_of(model.decoder.layers[0].mlp, model.config) == epilogue


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({**SWIGLU, "activation_func_clamp_value": 7.0}, "activation_func_clamp_value=7.0"),
        ({**SWIGLU, "glu_linear_offset": 1.0}, "glu_linear_offset=1.0"),
        ({**SWIGLU, "activation_func": torch.nn.functional.gelu}, "activation"),
        ({"activation_func": torch.nn.functional.relu}, "activation"),
        ({"layernorm_zero_centered_gamma": True}, "zero_centered_gamma"),
        ({"hidden_size": 96}, "a weight of (192, 96)"),
        ({"params_dtype": torch.float32, "bf16": False}, "not all contiguous bfloat16"),
    ],
)
def test_configs_that_compute_something_else_are_not(values: dict[str, Any], reason: str) -> None:
    values = {"bias_activation_fusion": False, **values}
    if values.get("layernorm_zero_centered_gamma"):
        model = stock_model(bias_activation_fusion=False)
        model.config.layernorm_zero_centered_gamma = True
    else:
        model = stock_model(**values)
    found = model_why_not(model)
    assert found is not None and reason in found


class OwnLayer(torch.nn.Linear):
    """Somebody's own module."""


class Gemma(torch.nn.Module):
    """A norm by a well-known name that multiplies by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(4)), 1e-6


def _foreign_norm(layer: Any) -> None:
    layer.pre_mlp_layernorm = type("RMSNorm", (Gemma,), {})().bfloat16()


def _other_width(layer: Any) -> None:
    layer.mlp.linear_fc1.weight = torch.nn.Parameter(torch.zeros(256, 128).bfloat16())


def _odd_place(layer: Any) -> None:
    weight = layer.mlp.linear_fc1.weight
    flat = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
    layer.mlp.linear_fc1.weight = torch.nn.Parameter(flat[1:].view(weight.shape))


def _subclass(module: Any) -> None:
    """Its forward may do anything, such as add what LoRA has learned."""
    kind = type(module)
    module.__class__ = type(f"Own{kind.__name__}", (kind,), {})


@pytest.mark.parametrize("part", ["embedding", "decoder", "output_layer"])
def test_a_part_around_the_layers_that_was_changed_is_not(part: str) -> None:
    model = our_model("llama")
    _subclass(getattr(model, part))
    found = model_why_not(model)
    assert found is not None and found.startswith("Own") and "is not covered" in found


def test_an_output_layer_with_a_bias_is_not() -> None:
    model = our_model("llama")
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(model.vocab_size).bfloat16())
    assert model_why_not(model) == "its output layer has a bias"


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (_foreign_norm, "norm RMSNorm is not covered"),
    (_other_width, "not all built alike"),
    (_odd_place, "multiple of 16 bytes"),
    (lambda layer: setattr(layer, "cross_attention", torch.nn.Linear(1, 1).bfloat16()), "cross"),
    (lambda layer: setattr(layer, "mlp_bda", lambda *_: None), "residual stream"),
    (lambda layer: setattr(layer, "mlp", OwnLayer(1, 1).bfloat16()), "with OwnLayer"),
    (lambda layer: setattr(layer, "__class__", type("Mine", (type(layer),), {})), "Mine is not"),
    (lambda layer: _subclass(layer.self_attention), "OwnPagedSelfAttention with MLP"),
    (lambda layer: _subclass(layer.mlp.linear_fc2), "OwnRowParallelLinear is not"),
    (lambda layer: layer.mlp.register_forward_hook(lambda *_: None), "hooks"),
    (lambda layer: setattr(layer.self_attention, "q_layernorm", None), "norms of the heads"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[reason for _, reason in CHANGES])
def test_a_layer_that_was_changed_is_not(change: Callable[[Any], Any], reason: str) -> None:
    model = our_model("qwen3")
    change(model.decoder.layers[1])
    found = model_why_not(model)
    assert found is not None and reason in found


def test_norms_of_other_libraries_are_known_by_their_home() -> None:
    def norm(name: str, home: str, **values: Any) -> Any:
        made = type(name, (Gemma,), {"__module__": home})()
        for key, value in values.items():
            setattr(made, key, value)
        return made

    engine = "transformer_engine.pytorch.module.rmsnorm"
    assert norm_kind(norm("RMSNorm", engine)) == RMS_NORM
    assert norm_kind(norm("LayerNorm", engine)) == LAYER_NORM
    assert norm_kind(norm("FusedLayerNorm", "megatron.core.fusions")) == LAYER_NORM
    assert norm_kind(norm("RMSNorm", engine, zero_centered_gamma=True)) is None
    assert norm_kind(norm("RMSNorm", "somebody.norms")) is None
    assert norm_kind(norm("L2Norm", "torch.nn")) is None
    assert norm_kind(torch.nn.RMSNorm(4)) is None, "its epsilon follows the dtype"
    assert norm_kind(torch.nn.LayerNorm(4, elementwise_affine=False)) is None


@pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
def test_a_cache_that_the_kernels_do_not_read_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(fused_decode, "why_not", lambda model: None)
    wrapper._warn_of_slow_decoding.cache_clear()
    config = replace(tiny(MODELS["qwen3"]), hidden_size=128, head_dim=32, ffn_hidden_size=256)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rig = Rig(config, torch.bfloat16, "cpu", 3, block_size_tokens=8)
            with rig.engine:
                served = rig.engine.controller.inference_wrapped_model
                assert served.fused_decode_off == "block size 8 is not a multiple of 16"
    (record,) = [r for r in caplog.records if "slower than the fused one" in r.getMessage()]
    assert "block size 8" in record.getMessage()
