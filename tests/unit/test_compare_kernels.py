"""The comparison of kernel sources, with times made up in place of a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_async.kernels import compile as cuda

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("compare_kernels")


class Rig:
    """Steps of the sources in ``times`` take what it says, a tenth more in the first round."""

    def __init__(self, times: dict[Path, list[float]], error: float) -> None:
        self.times, self.error = times, error
        self.compiled: list[Path] = []

    def compile(self, tilings: dict[str, Any]) -> None:
        self.compiled.append(cuda.SOURCES)

    def capture(self, tilings: dict[str, Any]) -> Any:
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
    rig.capture = lambda tilings: 1 / 0  # type: ignore[method-assign, assignment, return-value]
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
    (tmp_path / "gemm" / "linear.cu").touch()
    times = {tmp_path: [2.0] * 3, cuda.SOURCES: [1.0] * 3}
    monkeypatch.setattr(script, "Rig", lambda *_, **__: Rig(times, error))
    monkeypatch.setattr(
        "sys.argv", ["compare_kernels", str(tmp_path), "--rows", "1", "--rounds", "2"]
    )
    assert script.main() == status
    assert "llama8b, 1, 384: 2.0 -> 1.0, 0.5000" in capsys.readouterr().out


def test_a_folder_without_sources_is_refused(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_kernels", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "holds no gemm/linear.cu" in capsys.readouterr().err
