"""Decode steps of 65 to 128 rows in fused kernels, where a table has tile configs for so many."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels import trial
from megatron_async.kernels.gemm.tile_config import GemmProblem, TileConfig
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks import gemms
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, HEAD, MLP
from megatron_async.models.gpt_network import GPTNetwork
from tests.support import decode_rig, emulator
from tests.support.cuda_kernels import device, emulated, on_both, on_gpu
from tests.support.decode_rig import DecodeRig, bfloat16_model, small, state_of
from tests.unit.models.test_forward_accuracy import MODELS, TOLERANCE, Rig

pytest.importorskip("triton", reason="between fused blocks and modules is a kernel of Triton's")

__all__ = ["device"]

LIMIT = TOLERANCE[torch.bfloat16]


def table_of(config: ModelConfig, *rows: int) -> dict[GemmProblem, TileConfig]:
    """Tile configs for all GEMMs of a model at so many rows."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    layers = TileConfig(2, 2, 1, 2, 3, stream_x=True, tma=True)
    head = TileConfig(2, 2, 1, 1, 3, stream_x=True, persistent=True, tma=True)
    shapes = {
        ((heads + 2 * kv_heads) * dim, hidden): layers, (hidden, heads * dim): layers,
        (2 * ffn, hidden): layers, (ffn, hidden): layers, (hidden, ffn): layers,
        (config.vocab_size, hidden): head,
    }  # fmt: skip
    return {GemmProblem(r, n, k): tile for r in rows for (n, k), tile in shapes.items()}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WIDE_ROWS", True)
    if not torch.cuda.is_available():
        monkeypatch.setattr(where, "device_why_not", lambda model: None)
        monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)


def use(table: dict[GemmProblem, TileConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ``megatron-async tune`` had found it."""
    monkeypatch.setattr(gemms, "load_tuned", lambda gpu: table)


@pytest.mark.sweep
@on_both(
    *("name", "rows"),
    gpu=[("qwen3", 65), ("llama", 96), ("qwen3", 100), ("llama", 128)],
    small=[("qwen3", 66)],
)
def test_a_step_is_that_of_a_float64_forward(
    device: torch.device, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(name)
    if device.type == "cpu":  # it takes its time
        config = replace(config, num_layers=1)
        monkeypatch.setattr(decode_rig, "TOKENS", 2)
    use(table_of(config, 96, 128), monkeypatch)
    model = bfloat16_model(config, device)
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows)
    context = rig.context()
    logits = torch.empty(rows, config.vocab_size, dtype=torch.bfloat16, device=device)
    context.begin_decode(*[torch.zeros(rows, dtype=torch.int64, device=device)] * 4)
    assert fused.takes(logits, context)
    assert fused.covered([rows], context).fallbacks == ()
    assert rig.error(rig.decode(fused.forward, context), state_of(model)) < LIMIT


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("llama", "qwen3")])
def test_an_engine_decodes_a_hundred_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS[name]
    use(table_of(config, 96, 128), monkeypatch)
    steps: list[int] = []
    forward = FusedDecoder.forward

    def counted(self: FusedDecoder, tokens: torch.Tensor, *others: object) -> None:
        steps.append(len(tokens))
        forward(self, tokens, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedDecoder, "forward", counted)
    rig = Rig(config, torch.bfloat16, "cuda", 128)
    with rig.engine:
        for rows in (96, 100, 128):
            assert max(rig.worst_errors(rows)) < LIMIT
    assert {96, 128} <= set(steps), "the graphs of so many rows have the kernels in them"


@emulated
def test_only_where_a_table_has_so_many_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.install(monkeypatch)
    config, cpu = small("qwen3"), torch.device("cpu")
    model = bfloat16_model(config, cpu)
    context = DecodeRig(config, cpu, 2).context()

    def most(table: dict[GemmProblem, TileConfig]) -> int:
        use(table, monkeypatch)
        return FusedDecoder(model).most_rows(context)

    assert most({}) == 64
    assert most(table_of(config, 96)) == 96
    table = table_of(config, 96, 128)
    assert most(table) == 128
    decoder = FusedDecoder(model)
    assert decoder.covered([128, 256], context).fused(ATTENTION) == (1, 2)
    assert decoder.covered([256], context).off == "more than 128 rows"
    with caplog.at_level(logging.INFO, logger="megatron_async"):
        GPTNetwork(model).prepare([1, 128, 256], context)
    assert any("more than 128 rows" in line for line in caplog.messages)
    only = {problem: tile for problem, tile in table.items() if problem.k == config.ffn_hidden_size}
    assert most(only) == 64, "an MLP needs both of its GEMMs"
    without_head = {p: tile for p, tile in table.items() if p.n != config.vocab_size}
    use(without_head, monkeypatch)
    covered = FusedDecoder(model).covered([100], context)
    assert covered.fused(MLP) == (1, 2) and covered.fused(HEAD) == ()
    monkeypatch.setattr(trial, "WIDE_ROWS", False)
    assert most(table) == 64
    assert not FusedDecoder(model).takes(torch.empty(65, config.vocab_size).bfloat16(), context)


@emulated
def test_experts_and_norms_with_means_keep_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    cpu = torch.device("cpu")
    experts = replace(small("qwen3"), num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64)
    use(table_of(experts, 128), monkeypatch)
    monkeypatch.setattr(trial, "MOE", True)
    context = DecodeRig(experts, cpu, 2).context()
    covered = FusedDecoder(bfloat16_model(experts, cpu)).covered([4, 128], context)
    found = {fallback.kind: fallback for fallback in covered.fallbacks}
    assert (found[MLP].rows, found[MLP].reason) == ((128,), "more than 64 rows")
    assert ATTENTION not in found
    centred = small("gpt2")
    use(table_of(centred, 128), monkeypatch)
    context = DecodeRig(centred, cpu, 2).context()
    assert FusedDecoder(bfloat16_model(centred, cpu)).most_rows(context) == 64
