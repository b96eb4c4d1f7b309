"""Tuning at the start: which GEMMs are timed, within how many seconds, and what is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.benchmark.measuring.engines import decode_config
from megatron_async.benchmark.measuring.loads import Load
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.build.runner import open_runner
from megatron_async.build.spec import EngineSpec
from megatron_async.errors import ConfigError
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    NO_NORM,
    RMS_NORM,
    STORE,
    TUNED,
    Entry,
    GemmProblem,
    TileConfig,
    load_tuned,
    parse_entries,
    read_table,
    save_tuned,
    user_file,
)
from megatron_async.models.build import build_model
from megatron_async.models.fused import autotune, where
from megatron_async.models.fused.blocks.gemms import Gemm, SkinnyGemms
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from tests.support import emulator
from tests.support.engines import config_at
from tests.support.hash_model import HashModel
from tests.unit.models.test_forward_accuracy import MODELS, tiny

SMS, CPU = 132, torch.device("cpu")
KNOWN = 6144, 4096
NEW, OTHER = (15360, 5120), (5120, 13824)
Time = Callable[[GemmProblem, TileConfig], float]


class Decoder:
    """GEMMs of a shape that was measured, and of two that were not."""

    reader = RMS_NORM

    def __init__(self) -> None:
        self.skinny = SkinnyGemms(CPU)
        weights = {size: torch.empty(size, device="meta") for size in (KNOWN, NEW, OTHER)}
        self.skinny.declare("qkv", weights[KNOWN], RMS_NORM, STORE)
        self.skinny.declare("fc1", weights[NEW], RMS_NORM, STORE)
        self.skinny.declare("fc2", weights[OTHER], NO_NORM, ADD)
        self.gemms = self.skinny.declared

    def adopt(self, found: Mapping[GemmProblem, TileConfig | None]) -> None:
        self.skinny.adopt(found)

    def defines(self, gemm: Gemm, rows: int, config: TileConfig) -> dict[str, int]:
        return {"N": gemm.n, "ROWS": rows}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still unless a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU of 132 SMs that nothing was tuned for."""
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "cache"))
    emulator.install(monkeypatch, SMS)
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90a")


@pytest.fixture
def timed(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, hopper: None
) -> list[tuple[GemmProblem, TileConfig]]:
    """What was timed; each takes a second, and the estimated one 100 us, others 99 and so on."""
    monkeypatch.setattr(autotune, "random_weights", lambda *_: torch.zeros(0))
    seen: list[tuple[GemmProblem, TileConfig]] = []

    class TimedGemm:
        def __init__(self, problem: GemmProblem, reader: int, memory: torch.Tensor) -> None:
            self.problem, self.count = problem, 0

        def time_us(self, config: TileConfig) -> float:
            seen.append((self.problem, config))
            clock.now += 1.0
            self.count += 1
            return 101.0 - self.count

    monkeypatch.setattr(autotune, "TimedGemm", TimedGemm)
    return seen


def test_only_what_nobody_measured_is_open(hopper: None) -> None:
    decoder = Decoder()
    found = list(autotune.open_problems(decoder.gemms, [3, 4, 40, 1, 200]))
    assert [(each.problem.rows, each.problem.n) for each in found] == [
        (1, NEW[0]), (1, OTHER[0]), (4, NEW[0]), (4, OTHER[0]),
    ]  # fmt: skip
    for each in found:
        used = each.gemm.tiling(each.problem.rows)
        assert used is None or each.configs[0] == used
        assert len(each.configs) == len(set(each.configs)) > 3
        assert all(config.can_serve(each.problem) for config in each.configs)
        assert len({config.tma for config in each.configs}) == 2, "both kernels"
    kept = {found[0].problem: found[0].configs[1]}
    decoder.adopt(kept)
    left = list(autotune.open_problems(decoder.gemms, [1]))
    assert [each.problem.n for each in left] == [OTHER[0]]


def test_the_fastest_is_taken_and_kept(timed: list[tuple[GemmProblem, TileConfig]]) -> None:
    decoder = Decoder()
    todo = list(autotune.open_problems(decoder.gemms, [1]))
    autotune.tune_and_keep(decoder, [1], 1000.0, CPU, None)
    assert timed == [(each.problem, config) for each in todo for config in each.configs]
    found = load_tuned("emulated")
    assert found == {each.problem: each.configs[-1] for each in todo}
    assert decoder.gemms["fc1"].tiling(1) == todo[0].configs[-1]
    entries, _ = parse_entries(read_table(user_file())["emulated"])
    assert {entry.source for entry in entries.values()} == {TUNED}
    timed.clear()
    autotune.tune_and_keep(Decoder(), [1], 1000.0, CPU, None)
    assert timed == [], "a later start finds it"


def test_seconds_are_kept_and_the_next_start_goes_on(
    timed: list[tuple[GemmProblem, TileConfig]], clock: SimpleNamespace
) -> None:
    first, *others = autotune.open_problems(Decoder().gemms, [1, 8])
    seconds = len(first.configs) + 2.5  # the second one would not end in time
    tuned = autotune.tune(Decoder(), [1, 8], seconds, CPU)
    assert clock.now <= seconds
    assert (list(tuned.found), tuned.left) == ([first.problem], len(others))
    autotune.tune_and_keep(Decoder(), [1, 8], seconds, CPU, None)
    timed.clear()
    autotune.tune_and_keep(Decoder(), [1, 8], seconds, CPU, None)
    assert {problem for problem, _ in timed} == {others[0].problem}


def test_what_fails_is_not_taken(
    timed: list[tuple[GemmProblem, TileConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_us(self: Any, config: TileConfig) -> float:
        if config != first.configs[2]:
            raise ArithmeticError("relative error 1") if config.tma else RuntimeError("no launch")
        return 1.0

    first, _ = autotune.open_problems(Decoder().gemms, [1])
    monkeypatch.setattr(autotune.TimedGemm, "time_us", time_us)
    tuned = autotune.tune(Decoder(), [1], 1000.0, CPU)
    assert (tuned.found, tuned.left) == ({first.problem: first.configs[2]}, 1)


def test_a_config_that_does_not_compile_ends_no_start(
    timed: list[tuple[GemmProblem, TileConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_together(work: Any, architecture: str) -> None:
        compiled.append(architecture)
        raise ConfigError("skinny_gemm_mma.cu does not compile")

    def time_us(self: Any, config: TileConfig) -> float:
        if config == first.configs[0]:
            raise ConfigError("skinny_gemm_mma.cu does not compile")
        return float(first.configs.index(config))

    compiled: list[str] = []
    first = next(autotune.open_problems(Decoder().gemms, [1]))
    monkeypatch.setattr(cuda, "compile_together", compile_together)
    monkeypatch.setattr(autotune.TimedGemm, "time_us", time_us)
    monkeypatch.setattr(autotune, "open_problems", lambda *_: iter([first]))
    tuned = autotune.tune(Decoder(), [1], 1000.0, CPU)
    assert compiled and tuned == ({first.problem: first.configs[1]}, 0)


def test_memory_of_a_tuning_is_given_back(
    timed: list[tuple[GemmProblem, TileConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def random_weights(*_: Any) -> torch.Tensor:
        memory = torch.zeros(1)
        held.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(autotune, "random_weights", random_weights)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(held[0]() is not None))
    autotune.tune(Decoder(), [1], 1000.0, CPU)
    assert alive == [False]


def test_without_memory_or_a_file_engines_start_all_the_same(
    timed: list[tuple[GemmProblem, TileConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "file"))
    decoder = Decoder()
    before = decoder.gemms["fc1"].tiling(1)
    autotune.tune_and_keep(decoder, [1], 1000.0, CPU, None)
    assert decoder.gemms["fc1"].tiling(1) != before
    assert "tuned at each start" in caplog.text

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(autotune, "random_weights", full)
    assert autotune.tune(Decoder(), [1], 1000.0, CPU).found == {}
    assert "too little free memory" in caplog.text


def test_ranks_take_what_the_first_one_measured(
    timed: list[tuple[GemmProblem, TileConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    message: list[torch.Tensor] = []

    def ranks(number: int) -> Any:
        def sum_(mine: torch.Tensor) -> torch.Tensor:
            message.append(mine)
            return sum(message[1:], message[0])

        layout = SimpleNamespace(stage_ranks=2)
        return SimpleNamespace(layout=layout, tensor_rank=number, expert_rank=0, sum_experts_=sum_)

    leader, follower = Decoder(), Decoder()
    own = Entry(GemmProblem(64, *NEW), TileConfig(4, 1, 1, 2, 4, stream_x=True, tma=True), TUNED)
    follower.adopt({own.problem: own.config})
    rows = [1, 64]
    autotune.tune_and_keep(leader, rows, len(timed) + 4.0, CPU, ranks(0))
    count = len(timed)
    autotune.tune_and_keep(follower, rows, 1000.0, CPU, ranks(1))
    assert len(timed) == count, "one rank measures"
    for name in leader.gemms:
        for size in rows:
            config = leader.gemms[name].tiling(size)
            assert follower.gemms[name].tiling(size) == config
    assert leader.gemms["fc1"].tiling(64) != own.config


def test_tuned_problems_are_open_on_another_gpu(
    timed: list[tuple[GemmProblem, TileConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tuned("emulated", [Entry(GemmProblem(1, *NEW), TileConfig(1, 2, 4, 1, 4), TUNED)])
    assert len(list(autotune.open_problems(Decoder().gemms, [1]))) == 1
    monkeypatch.setattr(cuda, "device_name", lambda index: "another")
    assert len(list(autotune.open_problems(Decoder().gemms, [1]))) == 2


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_networks_tune_before_they_compile(
    hopper: None, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    done: list[Any] = []
    config = replace(tiny(MODELS["llama"]), hidden_size=128, head_dim=32, ffn_hidden_size=256)
    model = build_model(config, device="cpu", dtype=torch.bfloat16, initialize=False)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    monkeypatch.setattr(autotune, "tune_and_keep", lambda *given: done.append(given))
    monkeypatch.setattr(cuda, "compile_together", lambda *_: done.append("compile"))
    context = SimpleNamespace(
        gemm_autotune_seconds=seconds, block_size_tokens=16, batch_invariant=False,
        block_table=torch.zeros(1, 4, dtype=torch.int64),
        kv_cache=torch.zeros(0, dtype=torch.bfloat16), num_speculative_tokens=0, scales=None,
    )  # fmt: skip
    network = GPTNetwork(model)
    network.prepare([1, 4], context)
    assert done[-1] == "compile" and len(done) == (2 if seconds else 1)
    if seconds:
        decoder, rows, given, device, ranks = done[0]
        assert isinstance(decoder, FusedDecoder) and (rows, given) == ([1, 4], seconds)
        assert device == CPU and ranks is None


def test_the_batch_of_an_engine_has_the_seconds() -> None:
    seen: list[float] = []
    config = config_at(0, max_requests=1, block_count=8, gemm_autotune_seconds=2.5)
    model = ServedModel(network=HashModel())
    open_runner(
        EngineSpec.of(model, config, "cpu"),
        model,
        CPU,
        make=lambda _, batch, *__, **___: seen.append(batch.gemm_autotune_seconds),  # type: ignore[func-returns-value]
    )
    assert seen == [2.5]


def test_engines_of_bench_have_the_seconds() -> None:
    model = BenchmarkModel(
        "hash", tiny(MODELS["llama"]), SimpleNamespace(kv_cache_spec=SimpleNamespace(kept=None)),  # type: ignore[arg-type]
        CPU, torch.float32, 0.0, gemm_autotune_seconds=2.5,
    )  # fmt: skip
    assert decode_config(model, 1, 0, Load()).gemm_autotune_seconds == 2.5
