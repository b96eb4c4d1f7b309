"""Decode steps of 65 to 128 rows in fused kernels, and which are left to the modules: through the
emulated kernels and on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm
from megatron_async.kernels.gemm.tile_config import MAX_ROWS, TileConfig, padded
from megatron_async.kernels.ranks import peer_sum
from megatron_async.kernels.ranks.peer_rows import RowWords
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.fused import where
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.report import MLP
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.parallel import ModelParallel
from tests.support import decode_rig, emulator
from tests.support.cuda_kernels import device, on_both
from tests.support.decode_rig import DecodeRig, bfloat16_model, small, state_of
from tests.support.e4m3_modules import make_layers_e4m3
from tests.unit.models.test_forward_accuracy import TOLERANCE
from tests.unit.models.test_fused_blocks import (
    Ranks,
    decoded_by_rank,
    one_at_a_time,
    rank_of,
    subclass,
)

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
        assert tiling.can_serve(gemm.case(padded(rows)))
        assert tiling == CONFIGS[each] or not given
    sources = [source for source, _ in fused.kernels_of([rows], context)]
    assert "skinny_gemm_many" in sources
    assert not {"skinny_gemm_mma", "skinny_gemm_wgmma"} & set(sources)
    assert fused.takes(torch.empty(rows, config.vocab_size).bfloat16(), _begun(rig, context))
    assert rig.error(rig.decode(fused.forward, context), state_of(model)) < LIMIT


@on_both(
    *("rows", "window"),
    gpu=[(33, 2), (42, 3), (16, 8)],
    small=[(33, 2), (25, 5)],
)
def test_windows_of_many_tokens_have_no_fallback(
    device: torch.device, rows: int, window: int
) -> None:
    """Tokens of rows that have drafts, some of them behind a row's end."""
    config = config_of("qwen3", num_layers=1)
    model = bfloat16_model(config, device)
    fused = FusedDecoder(model)
    rig = DecodeRig(config, device, rows)
    context = rig.context(window=window)
    assert 64 < rows * window <= fused.most_rows(context) == MAX_ROWS
    assert not fused.covered([rows * window], context).fallbacks
    sources = {source for source, _ in fused.kernels_of([rows * window], context)}
    assert "skinny_gemm_many" in sources
    assert rig.error(rig.decode_windows(fused.forward, context), state_of(model)) < LIMIT


def _begun(rig: DecodeRig, context: Any) -> Any:
    """With a decode step's metadata."""
    slots = torch.arange(rig.rows, device=rig.device)
    zeros = torch.zeros_like(slots)
    context.begin_decode(slots, zeros, context.block_table[slots, zeros] * 16, zeros + 1)
    return context


# --- several ranks -------------------------------------------------------------------------------
def _words(rank: int, memory: tuple[torch.Tensor, ...], capacity: int) -> PeerWords:
    """Words of sums by a kernel and by GEMMs, on each rank in one tensor."""
    half = len(memory[0]) // 2
    of_sums, of_rows = zip(*(each.split(half) for each in memory), strict=True)
    where: Any = {"dtype": torch.int32, "device": memory[0].device}
    launches = [torch.zeros(peer_sum.LAUNCHES, **where) for _ in range(2)]
    rows = RowWords(rank, of_rows, launches[0], capacity)
    return PeerWords(rank, of_sums, launches[1], capacity, None, rows)


class Room:
    """Which of two ranks, each of which has a thread, have a GPU with room for grids at once."""

    def __init__(self, of_ranks: tuple[bool, bool]) -> None:
        self.of_ranks, self.barrier = of_ranks, threading.Barrier(2, timeout=120)
        self.thread, self.said = threading.local(), [True, True]

    def runs_at_once(self, kernel: Any, ctas: int) -> bool:
        return self.of_ranks[self.thread.rank]

    def agree(self, holds: bool) -> bool:
        """A sum over ranks."""
        self.said[self.thread.rank] = holds
        self.barrier.wait()
        found = all(self.said)
        self.barrier.wait()
        return found


@on_both(
    *("name", "rows", "room"),
    gpu=[
        ("qwen3", 65, (True, True)),
        ("llama", 128, (True, True)),
        ("llama", 100, (True, True)),
        ("llama", 128, (True, False)),
    ],
    small=[
        ("qwen3", 65, (True, True)),
        ("llama", 128, (True, True)),
        ("qwen3", 65, (True, False)),
        ("llama", 40, (False, True)),
    ],
)
def test_gemms_of_two_ranks_sum_where_they_end(
    device: torch.device,
    name: str,
    rows: int,
    room: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the embedding a kernel does, and behind all where one rank's GPU has no room for all
    CTAs of a GEMM at once. Else all that is launched was compiled ahead."""
    config = config_of(
        name, num_layers=1, num_attention_heads=6, num_kv_heads=2, ffn_hidden_size=512,
        vocab_size=128,
    )  # fmt: skip
    model = bfloat16_model(config, device)
    state, ranks = state_of(model), Ranks()
    if device.type == "cpu":
        one_at_a_time(monkeypatch)
        monkeypatch.setattr(peer_sum, "CTAS", 1)
    monkeypatch.setattr(PeerSum, "__call__", ranks.at_once(PeerSum.__call__))
    monkeypatch.setattr(SkinnyGemm, "__call__", ranks.summed_at_once(SkinnyGemm.__call__))
    rooms, summed = Room(room), all(room)
    for kind in (cuda.Kernel, emulator.EmulatedKernel):
        monkeypatch.setattr(kind, "runs_at_once", lambda *given: rooms.runs_at_once(*given))
    capacity = 128 * config.hidden_size
    memory = tuple(
        torch.zeros(2 * 2 * 2 * capacity, dtype=torch.int64, device=device) for _ in range(2)
    )
    whole, streams = DecodeRig(config, device, rows), ([], [])

    def run(rank: int) -> torch.Tensor:
        rooms.thread.rank = rank
        share, half = rank_of(model, config, rank)
        fused = FusedDecoder(
            share, all_reduce=lambda _: None, words=_words(rank, memory, capacity),
            agree=rooms.agree,
        )  # fmt: skip
        rig = DecodeRig(half, device, rows)
        rig.tokens, rig.grids_may_wait = whole.tokens, True
        assert fused.most_rows(rig.context()) == MAX_ROWS
        assert not fused.covered([rows], rig.context()).fallbacks
        sums = [
            source
            for source, macros in fused.kernels_of([rows], rig.context())
            if macros.get("SUMS")
        ]
        assert sums == ["skinny_gemm_many"] * 2

        return decoded_by_rank(fused, rig, streams[rank])

    with ThreadPoolExecutor(2) as pool:
        logits = torch.cat(list(pool.map(run, range(2))), dim=2)
    first, second = (torch.stack(stream) for stream in streams)
    assert first.equal(second), "all ranks have the same residual stream"
    assert whole.error(logits, state) < LIMIT
    in_layers = 2 * decode_rig.TOKENS
    assert ranks.sums == decode_rig.TOKENS + (0 if summed else in_layers)
    assert ranks.summed == (2 * in_layers if summed else 0)


# --- steps that are left to the modules ----------------------------------------------------------
CPU = torch.device("cpu")


def _is_left(fused: FusedDecoder, rows: int, config: ModelConfig, most: int = 64) -> bool:
    """Steps of so many rows are the modules', which is said: nothing is launched, or compiled."""
    rig = DecodeRig(config, CPU, rows)
    context = rig.context()
    logits = torch.empty(rows, config.vocab_size).bfloat16()
    assert fused.most_rows(context) == most
    sources = {source for source, _ in fused.kernels_of([rows], context)}
    return (
        fused.covered([rows], context).off == f"more than {most} rows"
        and fused.covered([8, rows], context) == fused.covered([8], context)
        and "skinny_gemm_many" not in sources
        and not fused.takes(logits, _begun(rig, context))
    )


def _reasons(fused: FusedDecoder, config: ModelConfig) -> set[str]:
    """Why not all blocks have kernels of 128 rows."""
    context = DecodeRig(config, CPU, 1).context()
    return {str(why) for place in fused._places if (why := place.why_not(MAX_ROWS, context))}


def _is_fused(fused: FusedDecoder, rows: int, config: ModelConfig) -> bool:
    rig = DecodeRig(config, CPU, rows)
    context = rig.context()
    logits = torch.empty(rows, config.vocab_size).bfloat16()
    return (
        fused.takes(logits, _begun(rig, context)) and not fused.covered([rows], context).fallbacks
    )


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: True)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [65, 128])
def test_layer_norm_has_no_kernel_of_more_than_64_rows(rows: int) -> None:
    config = config_of("gpt2")
    fused = FusedDecoder(bfloat16_model(config, CPU))
    assert _is_fused(fused, 32, config)
    qkv, fc1, head = (
        f"no tile config for {n} x 192)" for n in ("qkv (320", "fc1 (256", "head (131")
    )
    assert _is_left(fused, rows, config) and _reasons(fused, config) == {qkv, fc1, head}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: subclass(model.decoder.layers[1].mlp), "OwnMLP is not covered"),
        (
            lambda model: subclass(model.decoder.layers[0].self_attention),
            "OwnPagedSelfAttention is not covered",
        ),
        (lambda model: subclass(model.output_layer), "OwnColumnParallelLinear is not covered"),
        (
            lambda model: make_layers_e4m3(model, {"fc1": 0, "fc2": 0}),
            "no tile config for fc1 (512 x 192)",
        ),
        (lambda model: make_layers_e4m3(model, {"qkv": 0}), "no tile config for qkv (320 x 192)"),
    ],
)
def test_a_block_of_modules_leaves_all_more_than_64_rows_to_theirs(
    change: Callable[[Any], Any], reason: str
) -> None:
    config = config_of("llama")
    model = bfloat16_model(config, CPU)
    assert _is_fused(FusedDecoder(model), 128, config)
    change(model)
    fused = FusedDecoder(model)
    assert fused.covered([32], DecodeRig(config, CPU).context()).off is None
    assert _reasons(fused, config) == {reason}
    assert _is_left(fused, 65, config) and _is_left(fused, 128, config)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shared", [None, 128])
def test_experts_leave_more_than_64_rows_to_modules(shared: int | None) -> None:
    config = config_of(
        "llama", num_layers=3, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64,
        moe_layer_freq=(1, 0, 1), moe_shared_expert_intermediate_size=shared,
    )  # fmt: skip
    fused = FusedDecoder(bfloat16_model(config, CPU))
    covered = fused.covered([32], DecodeRig(config, CPU).context())
    assert not covered.fallbacks and covered.fused(MLP) == (1, 2, 3)
    reason = "more than 64 rows of experts"
    assert _reasons(fused, config) == {reason}
    assert _is_left(fused, 65, config) and _is_left(fused, 128, config)


@pytest.mark.usefixtures("on_cpu")
def test_ranks_leave_more_than_64_rows_to_modules() -> None:
    whole = config_of(
        "qwen3", num_attention_heads=6, num_kv_heads=2, ffn_hidden_size=512, vocab_size=128
    )
    share, half = rank_of(bfloat16_model(whole, CPU), whole, 0)
    memory = tuple(torch.zeros(2 * 2 * 128 * 192, dtype=torch.int64) for _ in range(2))
    launches = torch.zeros(peer_sum.LAUNCHES, dtype=torch.int32)
    words = PeerWords(0, memory, launches, 128 * 192)
    reason = "of more than 64 rows modules add up over ranks, if no GEMM does"
    for given in (None, words, _words(0, memory, 128 * 192)):  # the last one's grids may not wait
        fused = FusedDecoder(share, all_reduce=lambda tensor: None, words=given)
        covered = fused.covered([32], DecodeRig(half, CPU).context())
        assert not covered.fallbacks
        assert _reasons(fused, half) == {reason}
        assert _is_left(fused, 65, half) and _is_left(fused, 128, half)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("other", [True, False])
def test_a_network_asks_the_ranks_that_share_its_layers(other: bool) -> None:
    """What holds on one holds if it does on the other one too."""
    whole = config_of(
        "qwen3", num_attention_heads=6, num_kv_heads=2, ffn_hidden_size=512, vocab_size=128
    )
    share, _ = rank_of(bfloat16_model(whole, CPU), whole, 0)
    network: Any = GPTNetwork(share)

    class Two(ModelParallel):
        def __init__(self) -> None:
            self.layout = SimpleNamespace(tensor=2)
            self.tensor_words, self._device = None, CPU

        def max_(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp_(min=int(not other))

    network.parallel = Two()
    sums = network._fused_decoder()._sums
    for holds in (True, False):
        gemm = type("Gemm", (), {"runs_at_once": holds})()
        assert sums.run_at_once(gemm) is (holds and other)


@pytest.mark.usefixtures("on_cpu")
def test_another_engine_of_a_network_may_not_have_grids_that_wait() -> None:
    """What the one before had does not say what its steps have."""
    whole = config_of(
        "qwen3", num_attention_heads=6, num_kv_heads=2, ffn_hidden_size=512, vocab_size=128
    )
    share, half = rank_of(bfloat16_model(whole, CPU), whole, 0)
    memory = tuple(torch.zeros(2 * 2 * 2 * 128 * 192, dtype=torch.int64) for _ in range(2))
    words = _words(0, memory, 128 * 192)
    fused = FusedDecoder(share, all_reduce=lambda tensor: None, words=words)
    rig = DecodeRig(half, CPU, 100)
    logits = torch.empty(100, half.vocab_size).bfloat16()
    for waits in (True, False, True):
        rig.grids_may_wait = waits
        context = _begun(rig, rig.context())
        assert fused.takes(logits, context) is waits
        assert fused.most_rows(context) == (MAX_ROWS if waits else 64)


@pytest.mark.usefixtures("on_cpu")
def test_without_wgmma_or_room_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama")
    model = bfloat16_model(config, CPU)
    fused = FusedDecoder(model)
    assert _is_fused(fused, MAX_ROWS, config)
    assert _is_left(fused, MAX_ROWS + 1, config, most=MAX_ROWS)
    little = [replace(gemm, limit=40_000) for gemm in fused.gemms.values()]
    assert all(gemm.tiling(MAX_ROWS) is None for gemm in little)
    monkeypatch.setattr(cuda, "has_wgmma", lambda index: False)
    fused = FusedDecoder(model)
    assert _is_left(fused, 65, config)
    assert "no tile config for qkv (320 x 192)" in _reasons(fused, config)


@on_both("rows", gpu=[(65,), (128,)], small=[(70,)])
def test_a_network_goes_between_its_own_forward_and_fused_steps(
    device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more than 64 rows of a model with a block of modules are its own forward's; all have
    the same logits."""
    config = config_of("llama", num_layers=1)
    model = bfloat16_model(config, device)
    state, taken = state_of(model), []
    forward = FusedDecoder.forward

    def noted(fused: FusedDecoder, *given: Any) -> None:
        taken.append(len(given[0]))
        forward(fused, *given)

    monkeypatch.setattr(FusedDecoder, "forward", noted)
    rig = DecodeRig(config, device, rows)
    for change, count in ((lambda _: None, decode_rig.TOKENS), (subclass, 0)):
        change(model.output_layer)
        into = GPTNetwork(model).forward_into
        logits = rig.decode(lambda i, p, c, out, into=into: into(out, i, p, c))
        assert rig.error(logits, state) < LIMIT
        assert taken == [rows] * count
        taken.clear()
