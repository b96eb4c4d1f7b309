"""Blocks that the fused decode forward must leave alone: it would compute something else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels import trial
from megatron_async.kernels.gemm.tile_config import (
    FEW_ROWS,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    MAX_ROWS,
    RMS_NORM,
    SILU_GATE,
)
from megatron_async.models import gpt_network
from megatron_async.models.adapt import adapt_model
from megatron_async.models.batch import Batch
from megatron_async.models.build import build_model
from megatron_async.models.fused import coverage, report, where
from megatron_async.models.fused.blocks.kernel_parameters import epilogue_of, norm_kind
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    DecodeCoverage,
    lines,
    ranges,
)
from megatron_async.models.fused.where import device_why_not
from megatron_async.models.gpt_network import GPTNetwork
from tests.support import emulator
from tests.unit.models.test_forward_accuracy import MODELS, Rig, tiny

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
    return adapt_model(model.to(config.params_dtype))


SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}


@pytest.fixture(autouse=True)
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that runs the kernels; what is said once is said again."""
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    for warning in (report.warn_of_own_forward, report.warn_of_module, gpt_network._log_many_rows):
        warning.cache_clear()


def cover(model: Any) -> DecodeCoverage:
    return DecodeCoverage(coverage.blocks(model))


def said(model: Any) -> list[str]:
    return [str(fallback) for fallback in cover(model).fallbacks]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_this_package_are_covered(name: str) -> None:
    model = our_model(name)
    assert said(model) == []
    covered = cover(model)
    assert covered.off is None and covered.fused(ATTENTION) == covered.fused(MLP) == (1, 2)
    assert covered.fused(EMBEDDING) == covered.fused(HEAD) == (None,)
    assert device_why_not(model) == "the model is not on a GPU"


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
    assert said(model) == []
    assert epilogue_of(model.decoder.layers[0].mlp, model.config) == epilogue


BOTH = "of layers 1-2:"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {**SWIGLU, "activation_func_clamp_value": 7.0},
            [f"the MLP {BOTH} config activation_func_clamp_value=7.0"],
        ),
        (
            {**SWIGLU, "glu_linear_offset": 1.0},
            [f"the MLP {BOTH} config glu_linear_offset=1.0"],
        ),
        (
            {**SWIGLU, "activation_func": torch.nn.functional.gelu},
            [f"the MLP {BOTH} its activation is not covered"],
        ),
        (
            {"activation_func": torch.nn.functional.relu},
            [f"the MLP {BOTH} its activation is not covered"],
        ),
    ],
)
def test_an_mlp_that_computes_something_else_leaves_attention_fused(
    values: dict[str, Any], expected: list[str]
) -> None:
    assert said(stock_model(**{"bias_activation_fusion": False, **values})) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layernorm_zero_centered_gamma", True),
        ("fp32_residual_connection", True),
        ("apply_residual_connection_post_layernorm", True),
        ("pipeline_model_parallel_size", 2),
        ("tensor_model_parallel_size", 2),
    ],
)
def test_a_config_that_changes_all_blocks_leaves_none(name: str, value: Any) -> None:
    model = our_model("llama")
    setattr(model.config, name, value)
    assert cover(model).off == f"config {name}={value!r}"


def test_layers_without_rotation_keep_their_fused_mlps() -> None:
    model = our_model("llama")
    model.config.no_rope_freq = [0, 1]
    assert said(model) == [f"attention {BOTH} config no_rope_freq=[0, 1]"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 96}, "a weight of (192, 96) is not covered"),
        ({"params_dtype": torch.float32, "bf16": False}, "not all contiguous bfloat16"),
    ],
)
def test_sizes_and_types_that_no_kernel_has_leave_nothing(
    values: dict[str, Any], reason: str
) -> None:
    off = cover(stock_model(**{"bias_activation_fusion": False, **values})).off
    assert off is not None and reason in off


class OwnLayer(torch.nn.Linear):
    """Somebody's own module."""


class Gemma(torch.nn.Module):
    """A norm by a well-known name that multiplies by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(4)), 1e-6


def _foreign_norm(layer: Any) -> None:
    layer.pre_mlp_layernorm = type("RMSNorm", (Gemma,), {})().bfloat16()


def _odd_place(layer: Any) -> None:
    weight = layer.mlp.linear_fc1.weight
    flat = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
    layer.mlp.linear_fc1.weight = torch.nn.Parameter(flat[1:].view(weight.shape))


def _subclass(module: Any) -> None:
    """Its forward may do anything, such as add what LoRA has learned."""
    kind = type(module)
    module.__class__ = type(f"Own{kind.__name__}", (kind,), {})


def _hook(module: Any) -> None:
    module.register_forward_hook(lambda *_: None)


A, M = "attention of layer 2: ", "the MLP of layer 2: "
CHANGES: list[tuple[Callable[[Any], Any], list[str]]] = [
    (_foreign_norm, [M + "norm RMSNorm is not covered"]),
    (_odd_place, [M + "a parameter does not begin at a multiple of 16 bytes"]),
    (
        lambda layer: setattr(layer, "cross_attention", torch.nn.Linear(1, 1).bfloat16()),
        [A + "it has cross attention", M + "it has cross attention"],
    ),
    (
        lambda layer: setattr(layer, "mlp_bda", lambda *_: None),
        [M + "its output is not added to the residual stream as it is"],
    ),
    (
        lambda layer: setattr(layer, "self_attn_bda", lambda *_: None),
        [A + "its output is not added to the residual stream as it is"],
    ),
    (
        lambda layer: setattr(layer, "mlp", OwnLayer(1, 1).bfloat16()),
        [M + "OwnLayer is not covered"],
    ),
    (_subclass, [A + "OwnDecoderLayer is not covered", M + "OwnDecoderLayer is not covered"]),
    (
        lambda layer: _subclass(layer.self_attention),
        [A + "OwnPagedSelfAttention is not covered"],
    ),
    (
        lambda layer: _subclass(layer.mlp.linear_fc2),
        [M + "linear layer OwnRowParallelLinear is not covered"],
    ),
    (
        lambda layer: _subclass(layer.self_attention.linear_qkv),
        [A + "linear layer OwnColumnParallelLinear is not covered"],
    ),
    (lambda layer: _hook(layer.mlp.linear_fc1), [M + "a module has forward hooks"]),
    (lambda layer: _hook(layer.input_layernorm), [A + "a module has forward hooks"]),
    (_hook, [A + "it has forward hooks", M + "it has forward hooks"]),
    (
        lambda layer: setattr(layer.self_attention, "q_layernorm", None),
        [A + "norms of the heads are not RMSNorm"],
    ),
    (
        lambda layer: setattr(layer.self_attention.q_layernorm, "eps", 1.0),
        [A + "norms of queries and keys differ in epsilon"],
    ),
    (
        lambda layer: setattr(layer.self_attention, "num_attention_heads_per_partition", 34),
        [A + "17 query heads share a KV head, more than 16"],
    ),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[str(said) for _, said in CHANGES])
def test_a_block_that_was_changed_is_not_and_the_others_are(
    change: Callable[[Any], Any], expected: list[str]
) -> None:
    model = our_model("qwen3")
    change(model.decoder.layers[1])
    assert said(model) == expected
    assert cover(model).off is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda model: _subclass(model.embedding),
            ["the embedding: OwnLanguageModelEmbedding is not covered"],
        ),
        (
            lambda model: setattr(model.embedding, "tokentype_embeddings", torch.nn.Identity()),
            ["the embedding: it has token type embeddings"],
        ),
        (
            lambda model: _subclass(model.output_layer),
            ["the head: OwnColumnParallelLinear is not covered"],
        ),
        (
            lambda model: setattr(model.output_layer, "bias", torch.nn.Parameter(torch.zeros(1))),
            ["the head: its output layer has a bias"],
        ),
        (
            lambda model: setattr(model.decoder, "final_layernorm", torch.nn.Identity()),
            ["the head: norm Identity is not covered"],
        ),
        (lambda model: _hook(model.output_layer), ["the head: a module has forward hooks"]),
    ],
)
def test_what_is_around_the_layers_falls_back_alone(
    change: Callable[[Any], Any], expected: list[str]
) -> None:
    model = our_model("llama")
    change(model)
    assert said(model) == expected


@pytest.mark.parametrize(
    ("change", "off"),
    [
        (lambda model: _subclass(model.decoder), "OwnTransformerBlock is not covered"),
        (lambda model: _hook(model.decoder), "the model has forward hooks"),
        (_hook, "the model has forward hooks"),
    ],
)
def test_a_decoder_that_may_do_anything_leaves_nothing(
    change: Callable[[Any], Any], off: str
) -> None:
    model = our_model("llama")
    change(model)
    assert cover(model).off == off
    with pytest.raises(ValueError, match=off):
        FusedDecoder(model)


def test_a_layer_of_experts_keeps_its_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron's own."""
    spec = get_gpt_layer_local_spec(num_experts=2, normalization="RMSNorm")
    config = TransformerConfig(
        **SWIGLU, num_layers=2, hidden_size=128, num_attention_heads=4, num_moe_experts=2,
        use_cpu_initialization=True, params_dtype=torch.bfloat16, bf16=True,
    )  # fmt: skip
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=96,
        max_sequence_length=64,
        parallel_output=False,
        position_embedding_type="rope",
    )
    model = adapt_model(model.bfloat16())
    monkeypatch.setattr(trial, "MOE", False)
    covered = cover(model)
    assert covered.fused(ATTENTION) == (1, 2) and covered.fused(MLP) == ()
    assert [str(fallback) for fallback in covered.fallbacks] == [f"the MLP {BOTH} {trial.REASON}"]
    monkeypatch.setattr(trial, "MOE", True)
    assert cover(model).fused(MLP) == (1, 2)
    first, second = (layer.mlp for layer in model.decoder.layers)
    first.router.expert_bias = torch.zeros(2).bfloat16()
    second.__class__ = type("Other", (type(second),), {})
    assert [str(fallback) for fallback in cover(model).fallbacks] == [
        "the MLP of layer 1: its expert bias is torch.bfloat16",
        "the MLP of layer 2: Other is not covered",
    ]


def test_dense_layers_between_experts_keep_their_fused_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOE", False)
    values = {"num_layers": 3, "num_moe_experts": 4, "moe_ffn_hidden_size": 64}
    config = replace(our_model("llama").model_config, **values, moe_layer_freq=(1, 0, 1))
    model = build_model(config, device="cpu", dtype=torch.bfloat16, initialize=False)
    covered = cover(model)
    assert covered.fused(ATTENTION) == (1, 2, 3) and covered.fused(MLP) == (2,)
    assert [str(fallback) for fallback in covered.fallbacks] == [
        f"the MLP of layers 1, 3: {trial.REASON}"
    ]


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


# --- what is said of it ------------------------------------------------------------------------


def test_a_reason_is_said_once_with_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(
        replace(our_model("llama").model_config, num_layers=9),
        device="cpu", dtype=torch.bfloat16, initialize=False,
    )  # fmt: skip
    for layer in (2, 6, 7, 8):
        _subclass(model.decoder.layers[layer].mlp)
    _subclass(model.decoder.layers[0].self_attention)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cover(model).log()
    assert caplog.messages == [
        "decode steps run megatron's modules in place of fused kernels for attention of layer 1: "
        "OwnPagedSelfAttention is not covered",
        "decode steps run megatron's modules in place of fused kernels for the MLP of layers 3, "
        "7-9: OwnMLP is not covered",
    ]
    assert cover(model).to_dict() == {
        "embedding": True,
        "attention": [2, 3, 4, 5, 6, 7, 8, 9],
        "mlp": [1, 2, 4, 5, 6],
        "head": True,
        "fallbacks": [
            {
                "kind": "attention",
                "layers": [1],
                "rows": [],
                "reason": "OwnPagedSelfAttention is not covered",
            },
            {"kind": "mlp", "layers": [3, 7, 8, 9], "rows": [], "reason": "OwnMLP is not covered"},
        ],
    }


def test_a_report_says_what_ran_in_modules() -> None:
    model = our_model("llama")
    assert lines(None, cover(model).to_dict()) == []
    _subclass(model.decoder.layers[1].mlp)
    assert lines(None, cover(model).to_dict()) == [
        "decoded with megatron's modules: the MLP of layer 2: OwnMLP is not covered"
    ]
    assert lines("because", cover(model).to_dict()) == [
        "decoded with the model's own forward: because"
    ]


def test_reasons_that_differ_are_all_said_when_nothing_is_fused() -> None:
    model = our_model("llama")
    for layer in model.decoder.layers:
        _subclass(layer.self_attention), _subclass(layer.mlp)
    assert cover(model).off == (
        "attention of layers 1-2: OwnPagedSelfAttention is not covered; "
        "the MLP of layers 1-2: OwnMLP is not covered"
    )


def test_numbers_in_a_row_are_written_as_ranges() -> None:
    assert ranges([7, 3, 9, 8]) == "3, 7-9"
    assert ranges([1, 2]) == "1-2" and ranges([]) == ""


class Steps(Batch):
    """A context whose blocks have so many tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size_tokens = block_size
        self.block_table = torch.zeros(1, 4, dtype=torch.int64)
        self.kv_cache = torch.zeros(0, dtype=torch.bfloat16)


def test_rows_that_have_no_tile_config_are_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape that nobody measured has estimates up to 32 rows, and above where a GPU has wgmma."""
    emulator.install(monkeypatch)
    served = GPTNetwork(our_model("llama"))
    with caplog.at_level(logging.INFO, logger="megatron_async"):
        for _ in range(2):
            served.prepare([1, 8, 32, 40, 64, 128, 129], Steps(16))
    qkv = "no tile config for qkv (256 x 128)"
    assert sorted(served.decode_coverage().fallbacks)[0].rows == (48, 64)
    (attention,) = [m for m in caplog.messages if "attention of" in m]
    assert attention.endswith(f"for attention of layers 1-2 at 48, 64 rows: {qkv}")
    assert len([m for m in caplog.messages if "for the MLP of layers 1-2 at 48, 64 rows" in m]) == 1
    (many,) = [m for m in caplog.messages if f"more than {FEW_ROWS} rows" in m]
    assert "own forward" in many
    assert served.fused_decode_off is None, "up to 32 rows are fused"
    assert served.decode_coverage([32], Steps(16)).fallbacks == ()
    off = served.decode_coverage([64], Steps(16)).off
    assert off is not None and qkv in off
    assert served.decode_coverage([65, 128], Steps(16)).off == f"more than {FEW_ROWS} rows"
    served.prepare([4], Steps(16))
    assert served.decode_coverage().fallbacks, "what another engine decodes is not forgotten"


def test_rows_of_a_gpu_with_wgmma_are_fused_up_to_128(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)
    served = GPTNetwork(our_model("llama"))
    with caplog.at_level(logging.INFO, logger="megatron_async"):
        served.prepare([1, 65, 128, 129], Steps(16))
    assert not served.decode_coverage().fallbacks
    assert not served.decode_coverage([65, 128], Steps(16)).fallbacks
    (many,) = [m for m in caplog.messages if f"more than {MAX_ROWS} rows" in m]
    assert "own forward" in many and MAX_ROWS == 128
    assert served.decode_coverage([129, 256], Steps(16)).off == f"more than {MAX_ROWS} rows"


@pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
def test_a_cache_that_attention_does_not_read_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.install(monkeypatch)
    config = replace(tiny(MODELS["qwen3"]), hidden_size=128, head_dim=32, ffn_hidden_size=256)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rig = Rig(config, torch.bfloat16, "cpu", 3, block_size_tokens=8)
            with rig.engine:
                served = rig.engine.model.network
                assert served.fused_decode_off is None, "the MLPs are fused"
                covered = served.decode_coverage()
                assert covered.fused(ATTENTION) == () and covered.fused(MLP) == (1, 2)
    (record,) = [r for r in caplog.records if "in place of fused kernels" in r.getMessage()]
    assert "attention of layers 1-2: block size 8 is not a multiple of 16" in record.getMessage()


@pytest.mark.parametrize("unwanted", ["batch_invariant", "fused_decode"])
def test_what_was_not_asked_for_is_off_without_a_warning(
    unwanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = {unwanted: unwanted == "batch_invariant"}
    served = GPTNetwork(our_model("llama"), **values)
    assert served.fused_decode_off == f"{unwanted}={values[unwanted]}"
    assert served.decode_coverage().fused(MLP) == () and not caplog.messages
