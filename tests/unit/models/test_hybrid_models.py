"""Hybrid models of Mamba-2, attention, MLPs and experts: whole engines at every depth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.checkpoint.native import save_native
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.kernels import trial
from megatron_async.kernels.mamba.layer import LayerStates, StateRows
from megatron_async.kernels.mamba.reference import gated_norm, mix_rows
from megatron_async.models.adapt import adapt_model
from megatron_async.models.build import build_random_model, transformer_config
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.features import features
from megatron_async.models.fused import coverage, where
from megatron_async.models.fused.report import DecodeCoverage
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.mamba.mixer import MambaMixer
from megatron_async.models.mamba.sequence import CHUNK, mix_sequences
from megatron_async.models.served import ServedModel
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, config_at, tokens_with_pauses

pytestmark = pytest.mark.sweep

CONFIG = ModelConfig(
    num_layers=6,
    hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=96,
    max_sequence_length=256,
    hybrid_override_pattern="ME-*M-",
    mamba_state_dim=8,
    mamba_head_dim=16,
    mamba_num_groups=2,
    num_moe_experts=4,
    moe_ffn_hidden_size=32,
    activation="squared_relu",
)
ALL_MAMBA = {"num_layers": 2, "hybrid_override_pattern": "MM", "position_embedding": "none"}


def changed(**values: Any) -> ModelConfig:
    return dataclasses.replace(CONFIG, **values)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """A random model that says something."""
    model = build_random_model(config, device=torch.device("cpu"), dtype=dtype, seed=3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.mul_(8)
        elif name.endswith("dt_bias"):
            parameter.add_(2)
    return model


def engine_of(model: Any, depth: int, **values: Any) -> DynamicInferenceEngine:
    config = config_at(depth, block_size_tokens=4, prefill_chunk_tokens=16, debug=True, **values)
    wrapper = GPTNetwork(model)
    return DynamicInferenceEngine(ServedModel(network=wrapper), config)


PROMPTS = [[(7 * n + 3 * i) % 96 for i in range(5 + 9 * (n % 4))] for n in range(5)]
PARAMS = [
    SamplingParams(
        temperature=n % 2 * 0.8,
        seed=n,
        num_tokens_to_generate=12 + n,
        termination_id=79,
        allowed_token_ids=(5, 6) if n == 3 else None,  # look-up finds some of them
    )
    for n in range(5)
]


def tokens_of(requests: list[DynamicInferenceRequest]) -> list[list[int]]:
    return [request.generated_tokens for request in requests]


# --- engines -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(CONFIG)


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    """Each request by itself, serially; those without temperature as whole sequences say."""
    with engine_of(model, 0, max_requests=1, block_count=40) as engine:
        found = tokens_of(engine.generate(PROMPTS, PARAMS))
    for prompt, params, tokens in zip(PROMPTS, PARAMS, found, strict=True):
        if params.temperature:
            continue
        ids = torch.tensor([prompt + tokens])
        logits = model(ids, torch.arange(ids.shape[1])[None], None, runtime_gather_output=True)
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert len({token for tokens in found for token in tokens}) > 20
    return found


@pytest.mark.parametrize(("depth", "drafts"), [*((depth, 0) for depth in DEPTHS), (0, 3), (2, 3)])
def test_tokens_do_not_depend_on_depth_neighbours_or_drafts(
    depth: int, drafts: int, model: Any, alone: list[list[int]]
) -> None:
    """Nor on a prefix that is known: every prompt comes twice."""
    with engine_of(
        model, depth, max_requests=4, block_count=90, num_speculative_tokens=drafts,
        speculative_method="ngram" if drafts else "mtp",
    ) as engine:  # fmt: skip
        for _ in range(2):
            assert tokens_of(engine.generate(PROMPTS, PARAMS)) == alone
        counters = engine.counters
    assert counters.tokens_cached > 0 and counters.state_snapshots_taken > 0
    assert (0 < counters.tokens_accepted < counters.tokens_drafted) == (drafts > 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_evicted_and_paused_requests_go_on_with_the_same_tokens(
    depth: int, model: Any, alone: list[list[int]]
) -> None:
    with engine_of(model, depth, max_requests=4, block_count=14) as engine:
        assert tokens_with_pauses(engine, PROMPTS, PARAMS) == alone
        assert engine.counters.evictions > 0 and engine.counters.pauses > 0


def test_model_without_attention_has_blocks_that_hold_nothing() -> None:
    model = model_of(changed(**ALL_MAMBA, num_moe_experts=None))
    with engine_of(model, 1, max_requests=2, buffer_size_gb=0.001) as engine:
        assert engine.cache.kv.numel() == 0
        found = tokens_of(engine.generate(PROMPTS[:3], PARAMS[:3]))
    with engine_of(model, 0, max_requests=1, block_count=30) as engine:
        assert tokens_of(engine.generate(PROMPTS[:3], PARAMS[:3])) == found


# --- the mixer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (1, CHUNK, 2 * CHUNK + 5))
def test_whole_sequences_are_the_recurrence_with_gradients(tokens: int) -> None:
    torch.manual_seed(0)
    config = transformer_config(CONFIG, torch.float32, "cpu")
    mixer, sizes = MambaMixer(config, CONFIG), CONFIG.mamba
    hidden = torch.randn(tokens, 2, CONFIG.hidden_size)
    projected, _ = mixer.in_proj(hidden)
    found = mix_sequences(projected, mixer.parameters_between)
    for batch in range(2):
        states = LayerStates(
            torch.zeros(2, sizes.ring(), sizes.input_width),
            torch.zeros(2, sizes.heads, sizes.head_dim, sizes.state_size),
        )
        rows = StateRows(*torch.tensor([[0, 0, tokens, 0, 0, tokens]]).T)
        expected = torch.zeros(tokens, sizes.inner)
        with torch.no_grad():
            mix_rows(
                projected[:, batch], mixer.parameters_between, states, rows, expected, most=tokens
            )
        torch.testing.assert_close(found[:, batch], expected, atol=1e-5, rtol=1e-4)
    mixer(hidden)[0].square().mean().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if tokens > 1:  # else there is nothing that decays
            assert parameter.grad.any(), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_whole_sequences_are_those_of_mamba_ssm() -> None:
    conv = pytest.importorskip("causal_conv1d", reason="causal_conv1d is not installed")
    ssd = pytest.importorskip(
        "mamba_ssm.ops.triton.ssd_combined", reason="mamba_ssm is not installed"
    )
    sizes = CONFIG.mamba
    mixer = MambaMixer(transformer_config(CONFIG, torch.float32, "cuda"), CONFIG).cuda()
    parameters = mixer.parameters_between
    projected = torch.randn(2 * CHUNK + 5, 2, sizes.projection, device="cuda")
    z, taken, dt = projected.transpose(0, 1).split(
        [sizes.inner, sizes.conv_channels, sizes.heads], dim=-1
    )
    shared = sizes.groups * sizes.state_size
    x, b, c = (
        conv.causal_conv1d_fn(
            taken.transpose(1, 2), mixer.conv1d.weight[:, 0], mixer.conv1d.bias, activation="silu"
        )
        .transpose(1, 2)
        .split([sizes.inner, shared, shared], dim=-1)
    )
    y = ssd.mamba_chunk_scan_combined(
        x.unflatten(-1, (sizes.heads, -1)), dt, -mixer.A_log.exp(),
        b.unflatten(-1, (sizes.groups, -1)), c.unflatten(-1, (sizes.groups, -1)), CHUNK,
        D=mixer.D, dt_bias=mixer.dt_bias, dt_softplus=True,
    )  # fmt: skip
    expected = gated_norm(y.flatten(2), z, parameters.norm).transpose(0, 1)
    found = mix_sequences(projected, parameters)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_what_decays_are_made_of_stays_in_fp32(tmp_path: Path) -> None:
    model = build_random_model(CONFIG, device=torch.device("cpu"), dtype=torch.bfloat16)
    kept = {n: p.dtype for n, p in model.named_parameters() if p.dtype != torch.bfloat16}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "D", "dt_bias"}
    save_native(tmp_path, model, CONFIG, dtype=torch.float32)
    again = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.config == CONFIG
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


# --- what is said of them ----------------------------------------------------------------------


def test_attention_and_mlps_are_fused_and_mixers_say_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    monkeypatch.setattr(trial, "MAMBA", False)
    config = changed(
        hidden_size=128, head_dim=32, ffn_hidden_size=256, num_layers=5, activation="swiglu",
        hybrid_override_pattern="M-*M-", num_moe_experts=None,
    )  # fmt: skip
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    covered = DecodeCoverage(coverage.blocks(model))
    assert covered.off is None
    assert covered.fused("attention") == (3,) and covered.fused("mlp") == (2, 5)
    (fallback,) = covered.fallbacks
    assert str(fallback).startswith("the Mamba-2 mixer of layers 1, 4: ")
    assert covered.to_dict()["mamba"] == []
    scaled = dataclasses.replace(config, residual_multiplier=0.5)
    model = build_random_model(scaled, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert "not added to the residual stream" in (DecodeCoverage(coverage.blocks(model)).off or "")


def test_features_name_the_layers() -> None:
    found = features(CONFIG)
    assert found[0] == "layers of one part: 2 of Mamba-2, 1 of attention, 2 of an MLP, 1 of experts"
    assert found[1] == "Mamba-2 of 8 heads of 16 in 2 groups, states of 8"
    assert "no positions" in features(changed(position_embedding="none"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hybrid_override_pattern": "MM"},
            r"'MM' must have one of M\*-E for each of num_layers=6",
        ),
        ({"hybrid_override_pattern": "MMMMMX"}, "'MMMMMX' must have one of"),
        ({"num_moe_experts": None}, "with 'E' needs num_moe_experts"),
        ({"moe_layer_freq": (1,) * 6}, "moe_layer_freq and hybrid_override_pattern exclude"),
        ({"norm_placement": "both"}, "norm_placement='both' is not supported with a hybrid"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported with a hybrid"),
        ({"mamba_head_dim": 48}, "mamba_head_dim=48 must divide twice the hidden_size=64"),
        ({"mamba_num_heads": 5}, "mamba_num_groups=2 must divide the 5 heads"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        changed(**changes)


def test_tensor_parallel_hybrids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="hybrid_override_pattern is not divided"):
        transformer_config(CONFIG, torch.float32, "cpu")


def test_models_of_another_class_are_refused_with_a_way_out() -> None:
    given = type("MambaModel", (torch.nn.Module,), {})()
    with pytest.raises(ConfigError, match=r"is a MambaModel.* load the directory with load_pretr"):
        adapt_model(given)
