"""Captures and the garbage of earlier engines."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_async.device.cuda import WARM_UP_RUNS, CudaDevice, no_collection


class Garbage:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self, held: Any, ended: list[Any]) -> None:
        self.itself, self.held, self.ended = self, held, ended

    def __del__(self) -> None:
        self.ended.append(self.held)
        self.held = None


@pytest.fixture(autouse=True)
def collects_often() -> Iterator[None]:
    collects, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if collects else gc.disable)()


def litter() -> None:
    """Enough for many collections."""
    kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
    del kept


def test_nothing_is_collected_inside_and_all_of_it_later() -> None:
    ended: list[Any] = []
    with no_collection():
        Garbage(1, ended)
        litter()
        assert not ended and not gc.isenabled()
    litter()
    assert ended == [1]


@pytest.mark.parametrize("collects", (False, True))
def test_the_collector_is_left_as_it_was(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled() == collects
    with pytest.raises(ValueError, match="out of it"), no_collection():
        raise ValueError("out of it")
    assert gc.isenabled() == collects


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_among_the_garbage_do_not_invalidate_a_capture() -> None:
    device = CudaDevice(torch.device("cuda"))
    numbers = torch.zeros(4, device="cuda")
    graphs, ended = [torch.cuda.CUDAGraph()], []  # type: ignore[var-annotated]
    with torch.cuda.graph(graphs[0]):
        numbers.mul_(2)
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1 + WARM_UP_RUNS:  # captured
            Garbage(graphs.pop(), ended)
            litter()
        numbers.add_(1)

    captured = device.capture(work, "S")
    litter()
    assert len(ended) == 1
    captured.replay()
    device.synchronize()
    assert numbers.tolist() == [WARM_UP_RUNS + 1.0] * 4
