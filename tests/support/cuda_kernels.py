"""Where tests of the CUDA C++ kernels run: on a GPU, or in an emulator that is stricter about order
than a GPU is (``emulated_intrinsics.cpp``), with fewer and smaller cases."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron_async.kernels import compile as cuda
from tests.support import emulator

LIMIT = 1e-2

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and cuda.unavailable(0) is not None,
        reason="the CUDA kernels need compute capability 9.0 and cuda.bindings",
    ),
]
emulated = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")


def on_both(*names: str, gpu: Iterable[tuple], small: Iterable[tuple]) -> pytest.MarkDecorator:  # type: ignore[type-arg]
    """Parametrise ``device`` and ``names`` with cases for a GPU and for the emulator."""
    cases = [pytest.param("cuda", *case, marks=on_gpu) for case in gpu]
    cases += [pytest.param("cpu", *case, marks=emulated) for case in small]
    return pytest.mark.parametrize(("device", *names), cases, indirect=["device"])


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels of a test run."""
    if request.param == "cpu":
        emulator.install(monkeypatch)
    return torch.device(request.param)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference by norm."""
    return float((got.double() - wanted).norm() / wanted.norm())
