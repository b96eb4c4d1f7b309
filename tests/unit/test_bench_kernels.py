"""What scripts/bench_kernels.py times beside each other computes the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import rope_append
from tests.support.cuda_kernels import LIMIT, device, on_both, relative_error

__all__ = ["device"]


@on_both("rows", gpu=[(40,)], small=[(34,)])
def test_one_kernel_and_three_attend_alike(
    device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"
    spec = importlib.util.spec_from_file_location("bench_kernels", path)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    for name, value in {"CALLS": 2, "STEP_CAPACITY": 128, "STEP_HEADS": 4}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "STEP_KV_HEADS", 2)
    monkeypatch.setattr(bench, "STEP_HEAD_DIM", 32)
    if device.type == "cpu":
        monkeypatch.setattr(cuda, "unavailable", lambda index: None)
        monkeypatch.setattr(rope_append, "rope_append", rope_append.rope_append_reference)
    lengths = [(37 * row) % 101 for row in range(rows)]
    calls, byte_count = bench.step_calls(lengths, device)
    assert byte_count == sum(lengths) * 2 * 2 * 32 * 2
    first, other = (calls["three"](number).double() for number in (0, 1))
    assert relative_error(calls["one"](0), first) < LIMIT
    assert relative_error(calls["one"](1), other) < LIMIT
    assert relative_error(other, first) > 0.1, "each layer has keys and values of its own"
    assert {len(drawn) for drawn in bench.lengths_of(rows).values()} == {rows}
