"""Layers with attention sinks decode in fused kernels: alone, and as GPT-OSS has them, with biases,
YaRN, windows in every second layer and clamped experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.models.build import build_model
from megatron_async.models.description.config import RopeScaling
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.fused import coverage, where
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, MLP, DecodeCoverage
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.runner.memory.cache_attention import CacheAttention
from tests.support import reference_experts
from tests.support.cuda_kernels import device, on_both, relative_error
from tests.support.decode_rig import DecodeRig, bfloat16_model, small, state_of
from tests.unit.models.test_forward_accuracy import TOLERANCE, Rig

pytestmark = pytest.mark.sweep

__all__ = ["device"]

pytest.importorskip("triton", reason="between fused blocks and modules is a kernel of Triton's")

LIMIT = TOLERANCE[torch.bfloat16]
SINKS: dict[str, Any] = {
    "attention_sinks": True, "sliding_window": 3, "sliding_layers": (0,),
    "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True,
}  # fmt: skip
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)
EXPERTS: dict[str, Any] = {
    # All are chosen: no rounding chooses others.
    "num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 64,
    "moe_router_bias": True, "activation": "clamped_swiglu", "activation_limit": 0.5,
    "rope_scaling": YARN, "head_dim": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _emulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that runs the kernels."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(where, "device_why_not", lambda model: None)


@pytest.fixture
def attended_apart(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Limits of decode steps whose attention was not the fused kernel's."""
    found: list[dict[str, Any]] = []
    attend = CacheAttention.attend_appended

    def noted(self: CacheAttention, tokens: Any, *values: Any) -> Tensor:
        if tokens.chunks is None:
            found.append(values[4])
        return attend(self, tokens, *values)

    monkeypatch.setattr(CacheAttention, "attend_appended", noted)
    return found


def sinks_of(model: Any) -> list[Tensor]:
    return [layer.self_attention.core_attention.softmax_offset for layer in model.decoder.layers]


@torch.no_grad()
def with_sinks(config: Any, device: torch.device) -> Any:
    """A model whose sinks take about half of each softmax."""
    model = bfloat16_model(config, device)
    for sinks in sinks_of(model):
        sinks.mul_(4).add_(1)
    return model


@on_both("window", gpu=[(1,), (2,), (4,)], small=[(1,), (2,)])
def test_steps_equal_float64(
    device: torch.device, window: int, attended_apart: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small("llama"), **SINKS)
    model = with_sinks(config, device)
    state, fused, rig = state_of(model), FusedDecoder(model), DecodeRig(config, device, rows=2)
    context = rig.context(window=window)
    compiled: list[Any] = []
    monkeypatch.setattr(cuda, "compile_together", lambda work, _: compiled.extend(work))
    fused.compile([2 * window], context)
    macros = [macros for kernel, macros in compiled if kernel == "attention"]
    assert [each["SINKS"] for each in macros] == [1, 1], "both are compiled ahead"
    assert fused.covered([2 * window], context).fallbacks == ()
    logits = rig.decode_windows(fused.forward, context)
    assert rig.error(logits, state) < LIMIT
    for layer in range(2):
        name = f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset"
        off = {**state, name: torch.full_like(state[name], -1e4)}
        assert rig.error(logits, off) > 2 * LIMIT, "each layer's matter"
    assert not attended_apart


@on_both(
    *("window", "kept"),
    gpu=[(window, kept) for window in (1, 2, 4) for kept in (None, E4M3)],
    small=[(1, None), (2, E4M3)],
)
def test_a_model_like_gpt_oss_computes_what_its_modules_do(
    device: torch.device,
    window: int,
    kept: torch.dtype | None,
    attended_apart: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = reference_experts.install(monkeypatch) if device.type == "cpu" else [None]
    config = replace(small("llama"), **SINKS, **EXPERTS)
    model, rig = with_sinks(config, device), DecodeRig(config, device, rows=2)
    network, modules = GPTNetwork(model), GPTNetwork(model, fused_decode=False)
    assert network.fused_decode_off is None and modules.fused_decode_off is not None
    assert network.decode_coverage().fallbacks == ()

    def logits_of(network: Any) -> Tensor:
        def forward(ids: Tensor, positions: Tensor, context: Any, out: Tensor) -> None:
            network.forward_into(out, ids, positions, context)

        context = rig.context(window=window, kept=kept)
        if context.scales is not None:
            context.scales.fill_(2.0**-6)
        return rig.decode_windows(forward, context)

    found = logits_of(network)
    assert not attended_apart and ran
    monkeypatch.setattr(CacheAttention, "heads_of_decode", lambda *values, **given: None)
    wanted = logits_of(modules).double()
    limit = LIMIT if kept is None else 2 * LIMIT
    assert attended_apart and all("sinks" in limits for limits in attended_apart)
    assert relative_error(found, wanted) < limit


@pytest.mark.slow
@on_both("rows", gpu=[(1,), (3,)], small=[(2,)])
def test_an_engine_decodes_them_in_fused_kernels(
    device: torch.device, rows: int, attended_apart: list[Any]
) -> None:
    """On a GPU inside captured graphs; prompts are longer than the window."""
    rig = Rig(
        replace(small("llama"), **SINKS), torch.bfloat16, str(device), rows, num_cuda_graphs=1
    )
    with rig.engine:
        covered = rig.engine.model.network.decode_coverage()
        assert covered.fused(ATTENTION) == (1, 2) and covered.fallbacks == ()
        assert max(rig.worst_errors(rows)) < LIMIT
    assert not attended_apart


def test_nothing_of_gpt_oss_falls_back() -> None:
    """All of its layers are one of two kinds."""
    config = replace(
        SHAPES["gpt-oss-20b"], num_layers=2, sliding_layers=(0,), vocab_size=64, num_moe_experts=4
    )
    model = build_model(config, device="cpu", dtype=torch.bfloat16, initialize=False)
    covered = DecodeCoverage(coverage.blocks(model))
    assert covered.fallbacks == () and covered.fused(ATTENTION) == covered.fused(MLP) == (1, 2)


def test_sinks_of_another_dtype_are_their_modules() -> None:
    model = bfloat16_model(replace(small("llama"), **SINKS), torch.device("cpu"))
    core = model.decoder.layers[1].self_attention.core_attention
    core.softmax_offset = torch.nn.Parameter(core.softmax_offset.float())
    (fallback,) = DecodeCoverage(coverage.blocks(model)).fallbacks
    assert str(fallback) == "attention of layer 2: its sinks are torch.float32"
