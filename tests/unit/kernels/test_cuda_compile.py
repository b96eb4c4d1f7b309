"""Compiled CUDA kernels are kept on disk."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.kernels import compile as cuda

GEMM = "skinny_gemm_mma"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The options of every compilation, with a compiler that writes its options down."""
    calls: list[list[str]] = []

    def compile_(text: str, source: str, options: list[str]) -> bytes:
        assert "griddepcontrol.wait" in text and f"{source}(" in text
        calls.append(options)
        return repr(options).encode()

    version = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    monkeypatch.setattr(cuda, "_nvrtc", lambda: version)
    monkeypatch.setattr(cuda, "_compile", compile_)
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "kept"))
    cuda._warn_of_no_cache.cache_clear()
    return calls


def test_the_same_kernel_is_compiled_once(compiled: list[list[str]]) -> None:
    work = [(GEMM, {"N": 16}), (GEMM, {"N": 32}), ("embed", {"N": 16})]
    cuda.compile_together(work, "sm_90")
    assert len(compiled) == 3
    code = cuda.machine_code(GEMM, {"N": 32}, "sm_90")
    assert len(compiled) == 3 and b"-DN=32" in code and b"sm_90" in code
    cuda.machine_code(GEMM, {"N": 32}, "sm_100")
    assert len(compiled) == 4
    assert len(list(cuda.cache_directory().iterdir())) == 4


@pytest.mark.parametrize("file", ["gemm/skinny_gemm_mma.cu", "include/skinny_gemm.cuh"])
def test_a_changed_source_is_compiled_again(
    file: str, compiled: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.machine_code(GEMM, {"K": 64}, "sm_90")
    shutil.copytree(cuda.SOURCES, tmp_path / "kernels")
    monkeypatch.setattr(cuda, "SOURCES", tmp_path / "kernels")
    cuda.machine_code(GEMM, {"K": 64}, "sm_90")
    assert len(compiled) == 1
    with (cuda.SOURCES / file).open("a") as source:
        source.write("// changed")
    cuda.machine_code(GEMM, {"K": 64}, "sm_90")
    assert len(compiled) == 2


def test_a_place_that_cannot_be_written_to_is_warned_of_once_and_nothing_compiled_twice(
    compiled: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "file" / "kept"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert b"-DH=64" in cuda.machine_code("embed", {"H": 64}, "sm_90")
    assert len(compiled) == 1
    (record,) = caplog.records
    assert "MEGATRON_ASYNC_CACHE" in record.getMessage()
