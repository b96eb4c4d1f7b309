"""Decode steps of 65 to 128 rows in fused kernels, and which blocks have none: through the emulated
kernels and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm
from megatron_async.kernels.gemm.tile_config import MAX_ROWS, TileConfig, padded
from megatron_async.kernels.ranks import peer_sum
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.fused import where
from megatron_async.models.fused.blocks import rank_sums
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import ATTENTION, MLP
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.quantized.linear import keep, quantizable, quantize_in_place
from tests.support import decode_rig, emulator
from tests.support.cuda_kernels import device, on_both, relative_error
from tests.support.decode_rig import DecodeRig, bfloat16_model, small, state_of
from tests.unit.models.test_forward_accuracy import TOLERANCE
from tests.unit.models.test_fused_blocks import Ranks, one_at_a_time, rank_of, subclass

pytestmark = pytest.mark.sweep

__all__ = ["device"]

pytest.importorskip("triton", reason="between fused blocks and modules is a kernel of Triton's")

LIMIT = TOLERANCE[torch.bfloat16]


def _many(row_tiles: int, split_k: int, stages: int, multicast: int, **flags: bool) -> TileConfig:
    config = TileConfig(row_tiles, 1, 1, split_k, stages, stream_x=True, tma=True, **flags)
    return config._replace(multicast=multicast)


CONFIGS = {
    "qkv": _many(1, 1, 3, 2),
    "projection": _many(2, 3, 2, 1),
    "fc1": _many(2, 1, 2, 4),
    "fc2": _many(1, 2, 2, 2, workspace=True),
    "head": _many(1, 1, 3, 2, persistent=True),
}
"""In place of those that are chosen, which share nothing where weights are so small."""


@pytest.fixture(autouse=True)
def _emulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that runs the kernels, and has wgmma."""
    if torch.cuda.is_available():
        if not cuda.has_wgmma(0):
            pytest.skip("more rows than 64 need Hopper's TMA")
        return
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)
    monkeypatch.setattr(decode_rig, "TOKENS", 2)


def config_of(name: str, **values: Any) -> ModelConfig:
    """The smallest whose GEMMs have three stages."""
    heads = {"num_attention_heads": 3, "num_kv_heads": 1, "head_dim": 64}
    return replace(small(name), **{"hidden_size": 192, **heads, **values})


@on_both(
    *("name", "rows", "given"),
    gpu=[
        (name, rows, given)
        for name in ("qwen3", "llama")
        for rows in (65, 100, 128)
        for given in (False, True)
    ],
    small=[("qwen3", 65, False), ("llama", 100, True), ("llama", 128, False), ("qwen3", 128, True)],
)
def test_steps_of_many_rows_have_no_fallback(
    device: torch.device, name: str, rows: int, given: bool
) -> None:
    """With tile configs that are chosen, and with ``given`` ones that share x or K."""
    config = config_of(name, num_layers=1)
    model = bfloat16_model(config, device)
    fused = FusedDecoder(model, tilings=CONFIGS if given else None)
    rig = DecodeRig(config, device, rows)
    context = rig.context()
    assert not fused.covered([rows], context).fallbacks
    for each, gemm in fused.gemms.items():
        tiling = gemm.tiling(padded(rows))
        assert tiling is not None and tiling.kernel == "skinny_gemm_many"
        assert tiling.can_serve(gemm.case(padded(rows))) and (tiling == CONFIGS[each]) == given
    sources = [source for source, _ in fused.kernels_of([rows], context)]
    assert "skinny_gemm_many" in sources
    assert not {"skinny_gemm_mma", "skinny_gemm_wgmma"} & set(sources)
    assert fused.takes(torch.empty(rows, config.vocab_size).bfloat16(), _begun(rig, context))
    assert rig.error(rig.decode(fused.forward, context), state_of(model)) < LIMIT


def _begun(rig: DecodeRig, context: Any) -> Any:
    """With a decode step's metadata."""
    slots = torch.arange(rig.rows, device=rig.device)
    zeros = torch.zeros_like(slots)
    context.begin_decode(slots, zeros, context.block_table[slots, zeros] * 16, zeros + 1)
    return context


@on_both("rows", "window", gpu=[(40, 3), (33, 2), (64, 2)], small=[(33, 3)])
def test_windows_of_many_tokens(device: torch.device, rows: int, window: int) -> None:
    config = config_of("qwen3", num_layers=1)
    model = bfloat16_model(config, device)
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows)
    context = rig.context(window=window)
    assert not fused.covered([rows * window], context).fallbacks
    logits = rig.decode_windows(fused.forward, context)
    assert rig.error(logits, state_of(model)) < LIMIT


@on_both("rows", gpu=[(65,), (128,)], small=[(70,)])
def test_blocks_of_many_rows_stand_beside_modules(device: torch.device, rows: int) -> None:
    config = config_of("qwen3")
    model = bfloat16_model(config, device)
    state = state_of(model)
    subclass(model.decoder.layers[0].mlp)
    subclass(model.decoder.layers[1].self_attention)
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows)
    covered = fused.covered([rows], rig.context())
    assert covered.fused(ATTENTION) == (1,) and covered.fused(MLP) == (2,)
    assert rig.error(rig.decode(fused.forward), state) < LIMIT


# --- blocks that have no kernel for so many rows -------------------------------------------------
def _said(fused: FusedDecoder, rows: int, config: ModelConfig) -> list[str]:
    context = DecodeRig(config, torch.device("cpu"), 1).context()
    return [str(each) for each in fused.covered([rows], context).fallbacks]


def test_layer_norm_has_no_kernel_of_more_than_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    config = config_of("gpt2")
    fused = FusedDecoder(bfloat16_model(config, torch.device("cpu")))
    assert _said(fused, 32, config) == []
    for rows in (65, 128):
        assert _said(fused, rows, config) == [
            "attention of layers 1-2: no tile config for qkv (320 x 192)",
            "the MLP of layers 1-2: no tile config for fc1 (256 x 192)",
            "the head: no tile config for head (131 x 192)",
        ]
        rig = DecodeRig(config, torch.device("cpu"), rows)
        logits = torch.empty(rows, config.vocab_size).bfloat16()
        assert not fused.takes(logits, _begun(rig, rig.context()))


@on_both("rows", gpu=[(65,), (128,)], small=[(66,)])
def test_e4m3_weights_leave_more_than_64_rows_to_their_module(
    device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("llama")
    model = build_model(
        config, device=device, dtype=torch.bfloat16, initialize=False, may_be_quantized=True
    ).eval()
    for layer in quantizable(model).values():
        keep(layer, None)
    model.load_state_dict(bfloat16_model(config, device).state_dict(), strict=False)
    for layer in model.decoder.layers:
        quantize_in_place(layer.mlp.linear_fc1, 1), quantize_in_place(layer.mlp.linear_fc2, 1)
    fused, rig = FusedDecoder(model), DecodeRig(config, device, rows)
    assert fused.covered([64], rig.context()).fused(MLP) == (1, 2)
    covered = fused.covered([rows], rig.context())
    assert [str(each) for each in covered.fallbacks] == [
        "the MLP of layers 1-2: no tile config for fc1 (512 x 192)"
    ]
    assert covered.fused(ATTENTION) == (1, 2)
    monkeypatch.setattr(decode_rig, "TOKENS", 1)
    plain = GPTNetwork(model, fused_decode=False)
    wanted = rig.decode(lambda *args: args[3].copy_(plain.forward(*args[:3])))
    assert relative_error(rig.decode(fused.forward), wanted.double()) < LIMIT


@pytest.mark.parametrize("shared", [0, 128])
def test_experts_leave_more_than_64_rows_to_their_module(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and dense layers between them stay fused."""
    emulator.install(monkeypatch)
    config = config_of(
        "llama", num_layers=3, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64,
        moe_layer_freq=(1, 0, 1), moe_shared_expert_intermediate_size=shared or None,
    )  # fmt: skip
    fused = FusedDecoder(bfloat16_model(config, torch.device("cpu")))
    assert _said(fused, 32, config) == []
    rig = DecodeRig(config, torch.device("cpu"), 1)
    for rows in (65, 128):
        covered = fused.covered([rows], rig.context())
        assert [str(each) for each in covered.fallbacks] == [
            "the MLP of layers 1, 3: more than 64 rows of experts"
        ]
        assert covered.fused(ATTENTION) == (1, 2, 3) and covered.fused(MLP) == (2,)
        sources = {source for source, _ in fused.kernels_of([rows], rig.context())}
        assert sources == {"embed", "attention", "skinny_gemm_many"}


def test_without_wgmma_or_room_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    config = config_of("llama")
    model = bfloat16_model(config, torch.device("cpu"))
    assert _said(FusedDecoder(model), MAX_ROWS, config) == []
    (many,) = {each[-13:] for each in _said(FusedDecoder(model), MAX_ROWS + 1, config)}
    assert many == "than 128 rows"
    fused = FusedDecoder(model)
    small_limit = {name: replace(gemm, limit=40_000) for name, gemm in fused.gemms.items()}
    assert all(gemm.tiling(MAX_ROWS) is None for gemm in small_limit.values())
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: False)
    said = _said(FusedDecoder(model), MAX_ROWS, config)
    assert len(said) == 3 and all("no tile config for" in each for each in said)


# --- several ranks -------------------------------------------------------------------------------
@on_both(
    *("rows", "way"),
    gpu=[(rows, way) for rows in (65, 128) for way in ("all-reduce", "kernel")],
    small=[(70, "all-reduce"), (66, "kernel")],
)
def test_two_ranks_sum_many_rows_behind_the_gemm(
    device: torch.device, rows: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GEMM of so many rows sends its sums, or adds up others'."""
    monkeypatch.setattr(rank_sums, "LEAST_SENT_ROWS", 1)
    monkeypatch.setattr(rank_sums, "MOST_SUMMED_ROWS", 32)
    config = config_of(
        "qwen3", num_layers=1, num_attention_heads=6, num_kv_heads=2, ffn_hidden_size=512,
        vocab_size=128,
    )  # fmt: skip
    model = bfloat16_model(config, device)
    state, ranks = state_of(model), Ranks()
    if device.type == "cpu":
        one_at_a_time(monkeypatch)
        monkeypatch.setattr(peer_sum, "CTAS", 1)
    tokens = decode_rig.TOKENS
    capacity, words = MAX_ROWS * config.hidden_size, [None, None]
    if way == "kernel":
        monkeypatch.setattr(PeerSum, "__call__", ranks.at_once(PeerSum.__call__))
        monkeypatch.setattr(SkinnyGemm, "__call__", ranks.summed_at_once(SkinnyGemm.__call__))
        memory = tuple(
            torch.zeros(2 * 2 * capacity, dtype=torch.int64, device=device) for _ in words
        )
        words = [
            PeerWords(
                rank, memory, torch.zeros(peer_sum.LAUNCHES, dtype=torch.int32, device=device),
                capacity, two_steps_from=None,
            )
            for rank in range(2)
        ]  # fmt: skip
    whole = DecodeRig(config, device, rows)

    def run(rank: int) -> Tensor:
        share, half = rank_of(model, config, rank)
        fused = FusedDecoder(share, all_reduce=ranks.all_reduce(rank), words=words[rank])
        rig = DecodeRig(half, device, rows)
        rig.tokens, rig.grids_may_wait = whole.tokens, True
        assert not fused.covered([rows], rig.context()).fallbacks
        if device.type == "cpu":
            return rig.decode(fused.forward)
        with torch.cuda.stream(torch.cuda.Stream()):
            logits = rig.decode(fused.forward)
            torch.cuda.current_stream().synchronize()
            return logits

    with ThreadPoolExecutor(2) as pool:
        logits = torch.cat(list(pool.map(run, range(2))), dim=2)
    assert whole.error(logits, state) < LIMIT
    assert (ranks.sums, ranks.sent, ranks.summed) == (3 * tokens, 0, 0)
