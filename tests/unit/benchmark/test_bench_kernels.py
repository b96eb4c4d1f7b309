"""scripts/bench_kernels.py: what it times computes the same, and it compares sources in turns."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import rope_append
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    GemmProblem,
    TileConfig,
)
from tests.support.cuda_kernels import LIMIT, device, on_both, relative_error

__all__ = ["device"]

SINKS = torch.tensor([-2.0, 0.0, 3.0, 5.0]).bfloat16()
"""Of each query head."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    return importlib.import_module("bench_kernels")


@on_both(
    *("rows", "window", "kept", "limits"),
    gpu=[
        *((40, window, kept, {}) for window in (1, 3) for kept in (None, E4M3)),
        *((40, window, None, {"window": 17, "sinks": SINKS}) for window in (1, 3)),
    ],
    small=[
        (34, 1, None, {}), (8, 3, None, {}), (8, 1, E4M3, {}),
        (8, 1, None, {"window": 17, "sinks": SINKS}),
    ],
)  # fmt: skip
def test_one_kernel_and_three_attend_alike(
    device: torch.device,
    rows: int,
    window: int,
    kept: torch.dtype | None,
    limits: dict[str, Any],
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "MOST_COPIES", 2)
    monkeypatch.setattr(script, "CAPACITY", 128)
    if device.type == "cpu":
        monkeypatch.setattr(cuda, "unavailable", lambda index: None)
        monkeypatch.setattr(rope_append, "rope_append", rope_append.rope_append_reference)
    lengths = [(37 * row) % 101 for row in range(rows)]
    if "sinks" in limits:
        limits = {**limits, "sinks": limits["sinks"].to(device)}
    calls, byte_count = script.attention_calls(lengths, (4, 2, 32), device, window, kept, limits)
    read = sum(min(length, limits.get("window", 101)) for length in lengths)
    assert byte_count == read * 2 * 2 * 32 * (2 if kept is None else 1)
    first, other = (calls["three"](number).double() for number in (0, 1))
    assert relative_error(calls["one"](0), first) < LIMIT
    assert relative_error(calls["one"](1), other) < LIMIT
    assert relative_error(other, first) > 0.1, "each layer has keys and values of its own"
    attended = [calls["attention"](number).double() for number in (0, 1)]
    assert attended[0].shape == first.shape
    assert relative_error(attended[0], attended[1]) > 0.1
    assert {len(drawn) for drawn in script.lengths_of(rows).values()} == {rows}


@on_both(
    *("epilogue", "columns"),
    gpu=[(STORE, 0), (ADD, 256), (SILU_GATE, 128)],
    small=[(ADD, 256), (SILU_GATE, 128)],
)
def test_timed_gemms_compute_what_they_should(
    device: torch.device,
    epilogue: int,
    columns: int,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "MOST_COPIES", 2)
    norm = NO_NORM if epilogue == ADD else RMS_NORM
    problem = GemmProblem(8, 128, 256, norm, epilogue, columns)
    call = script.SkinnyCall(problem, TileConfig(1, 2, 1, 2, 2), device)
    assert call.error() < LIMIT
    scales = 128 * 256 // columns * 4 if columns else 0
    assert call.byte_count == 128 * 256 * (1 if columns else 2) + scales
    first, other = (call(number).double().clone() for number in (0, 1))
    assert relative_error(other, first) > 0.1, "each call has a weight of its own"


@on_both("epilogue", gpu=[(STORE,), (ADD,), (SILU_GATE,)], small=[(SILU_GATE,)])
def test_timed_gemms_over_e4m3_compute_what_they_should(
    device: torch.device, epilogue: int, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MOST_COPIES", 2)
    formats = script.formats(256, 32, RMS_NORM, True)
    assert formats.keys() - script.formats(256, 32, RMS_NORM, False) == {"e4m3 by row and token"}
    assert formats.keys() - script.formats(256, 8, RMS_NORM, True) == {"e4m3 by row and token"}
    norm, *format_ = formats["e4m3 by row and token"]
    problem = GemmProblem(32, 128, 256, norm, epilogue, *format_)
    assert problem.e4m3_inputs
    call = script.SkinnyCall(problem, TileConfig(4, 1, 1, 2, 2, stream_x=True, tma=True), device)
    assert call.error() < LIMIT


class Rig:
    """Steps of the sources in ``times`` take what it says, a tenth more in the first round."""

    def __init__(self, times: dict[Path, list[float]], error: float) -> None:
        self.times, self.error = times, error
        self.compiled: list[Path] = []

    def compile(self, configs: dict[str, Any]) -> None:
        self.compiled.append(cuda.SOURCES)

    def capture(self, configs: dict[str, Any]) -> Any:
        first = len(self.compiled) == 1
        return SimpleNamespace(sources=cuda.SOURCES, error=0.0 if first else self.error)

    def mean_us(self, step: Any) -> float:
        return self.times[step.sources].pop(0)


def test_steps_take_turns_and_the_first_round_does_not_count(
    script: ModuleType, tmp_path: Path
) -> None:
    own = cuda.SOURCES
    rig = Rig({tmp_path: [999.0, 110.0, 120.0, 100.0], own: [1.0, 90.0, 80.0, 100.0]}, 1e-3)
    medians, error = script.compare(rig, [tmp_path, own], 3, "")
    assert (medians, error) == ([110.0, 90.0], 1e-3)
    assert rig.compiled == [tmp_path, own] and own == cuda.SOURCES
    assert rig.times == {tmp_path: [], own: []}


def test_sources_are_back_when_a_kernel_does_not_compile(
    script: ModuleType, tmp_path: Path
) -> None:
    own, rig = cuda.SOURCES, Rig({}, 0.0)
    rig.capture = lambda configs: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        script.capture(rig, tmp_path)
    assert own == cuda.SOURCES


@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (0.5, 1), (float("nan"), 1)])
def test_other_logits_are_a_failure(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: float,
    status: int,
) -> None:
    (tmp_path / "gemm").mkdir()
    (tmp_path / "gemm" / "skinny_gemm_mma.cu").touch()
    times = {tmp_path: [2.0] * 3, cuda.SOURCES: [1.0] * 3}
    monkeypatch.setattr(script, "Rig", lambda *_, **__: Rig(times, error))
    monkeypatch.setattr(
        "sys.argv", ["bench_kernels", "--compare", str(tmp_path), "--rows", "1", "--rounds", "2"]
    )
    assert script.main() == status
    assert "llama8b, 1, 384: 2.0 -> 1.0, 0.5000" in capsys.readouterr().out


def test_a_folder_without_sources_is_refused(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_kernels", "--compare", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "holds no gemm/skinny_gemm_mma.cu" in capsys.readouterr().err
