"""What the rings of a CPU and of a GPU promise, and that each promise is tested.

The host's side of a GPU's rings runs here without one: see ``tests/support/cuda_rings.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_async.device.cpu import CpuDevice, CpuPacketRing, CpuResultRing
from megatron_async.device.cuda import CudaPacketRing, CudaResultRing
from megatron_async.errors import IntegrityError
from tests.support.cuda_rings import CudaRingsDevice

ENTRIES, WIDTH = 3, 4
Check = Callable[["Pair"], None]


class Pair:
    """A packet ring and a result ring of a device, and what the device does with them."""

    def __init__(self, kind: type[CpuDevice]) -> None:
        self.device = kind()
        self.packets: Any = self.device.packet_ring(ENTRIES, WIDTH)
        self.results: Any = self.device.result_ring(ENTRIES, WIDTH)

    def send(self, number: int) -> None:
        """Host: a packet full of ``number``."""
        self.packets.claim(number)[:] = number

    def step(self, number: int) -> list[int]:
        """Device: take a packet and publish a result for it, 10 x ``number``; the packet."""
        into = torch.zeros(WIDTH, dtype=torch.int32)
        self.packets.read(into, WIDTH)
        self.results.publish(torch.full((WIDTH,), 10 * number, dtype=torch.int32))
        return into.tolist()

    def take(self, number: int) -> list[int]:
        """Host: the result."""
        taken: list[int] = self.results.wait(number, WIDTH).tolist()
        return taken


@pytest.fixture(params=(CpuDevice, CudaRingsDevice))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    rings = Pair(request.param)
    yield rings
    rings.device.close()


# --- promises ---------------------------------------------------------------------------------


def packets_and_results_arrive_in_order_while_the_rings_wrap(pair: Pair) -> None:
    for number in range(4 * ENTRIES):
        pair.send(number)
        assert pair.step(number) == [number] * WIDTH
        assert pair.take(number) == [10 * number] * WIDTH


def all_entries_can_be_in_flight(pair: Pair) -> None:
    for first in range(0, 2 * ENTRIES, ENTRIES):
        numbers = range(first, first + ENTRIES)
        for number in numbers:
            pair.send(number)
        assert [pair.step(n) for n in numbers] == [[n] * WIDTH for n in numbers]
        assert [pair.take(n) for n in numbers] == [[10 * n] * WIDTH for n in numbers]


def a_packet_that_is_not_consumed_is_not_overwritten(pair: Pair) -> None:
    for number in range(ENTRIES):
        pair.send(number)
    with pytest.raises(IntegrityError, match=f"packet {ENTRIES} would overwrite"):
        pair.packets.claim(ENTRIES)
    pair.step(0)
    pair.take(0)
    pair.send(ENTRIES)
    with pytest.raises(IntegrityError, match=f"packet {ENTRIES + 1} would overwrite"):
        pair.packets.claim(ENTRIES + 1)
    assert [pair.step(n) for n in range(1, ENTRIES + 1)] == [
        [n] * WIDTH for n in range(1, ENTRIES + 1)
    ]


def packets_are_claimed_once_and_in_order(pair: Pair) -> None:
    with pytest.raises(IntegrityError, match="packet 1 claimed, 0 is next"):
        pair.packets.claim(1)
    pair.send(0)
    with pytest.raises(IntegrityError, match="packet 0 claimed, 1 is next"):
        pair.packets.claim(0)


def results_are_taken_once_and_in_order(pair: Pair) -> None:
    for number in range(2):
        pair.send(number)
        pair.step(number)
    with pytest.raises(IntegrityError, match="result 1 taken, 0 is next"):
        pair.take(1)
    assert pair.take(0) == [0] * WIDTH
    with pytest.raises(IntegrityError, match="result 0 taken, 1 is next"):
        pair.take(0)


def the_host_waits_for_a_result(pair: Pair) -> None:
    """It is published only after the host has looked and not found it."""
    pair.send(0)
    looks = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            pair.step(0)

    raise_failure = pair.device.raise_failure
    with patch.object(pair.device, "raise_failure", lambda: (look(), raise_failure())):
        pair.device.__dict__["stream"] = SimpleNamespace(query=pair.device.raise_failure)
        pair.device.wake()
        pair.device.wake()
        assert pair.take(0) == [0] * WIDTH
    assert len(looks) == 2


def a_result_that_was_put_back_is_there_again(pair: Pair) -> None:
    for number in range(2):
        pair.send(number)
        pair.step(number)
    assert pair.take(0) == [0] * WIDTH
    pair.results.put_back(0)
    pair.results.put_back(0)
    assert pair.take(0) == [0] * WIDTH
    assert pair.take(1) == [10] * WIDTH


def what_was_not_taken_is_not_put_back(pair: Pair) -> None:
    for number in range(2):
        pair.send(number)
        pair.step(number)
    assert pair.take(0) == [0] * WIDTH
    pair.results.put_back(1)
    assert pair.take(1) == [10] * WIDTH


def a_result_that_was_put_back_frees_no_more_than_one_packet(pair: Pair) -> None:
    for number in range(ENTRIES):
        pair.send(number)
    pair.step(0)
    pair.take(0)
    pair.results.put_back(0)
    with pytest.raises(IntegrityError, match="would overwrite"):
        for number in (ENTRIES, ENTRIES + 1):  # a CPU knows that the first of them is free
            pair.send(number)


def a_result_is_not_overwritten_unseen(pair: Pair) -> None:
    """On a GPU the device overwrites it, and the host finds out."""

    def publish_and_take() -> None:
        for number in range(ENTRIES + 1):
            pair.results.publish(torch.full((WIDTH,), number, dtype=torch.int32))
        pair.take(0)

    with pytest.raises(IntegrityError, match=r"would overwrite|was overwritten"):
        publish_and_take()


PROMISES: tuple[Check, ...] = (
    packets_and_results_arrive_in_order_while_the_rings_wrap,
    all_entries_can_be_in_flight,
    a_packet_that_is_not_consumed_is_not_overwritten,
    packets_are_claimed_once_and_in_order,
    results_are_taken_once_and_in_order,
    the_host_waits_for_a_result,
    a_result_that_was_put_back_is_there_again,
    what_was_not_taken_is_not_put_back,
    a_result_that_was_put_back_frees_no_more_than_one_packet,
    a_result_is_not_overwritten_unseen,
)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_rings_keep(promise: Check, pair: Pair) -> None:
    promise(pair)


def test_width_of_a_result_is_what_the_host_asks_for(pair: Pair) -> None:
    pair.send(0)
    pair.step(0)
    assert pair.results.wait(0, 2).tolist() == [0, 0]


def test_warm_up_of_a_capture_leaves_a_gpus_rings_where_they_were() -> None:
    pair = Pair(CudaRingsDevice)
    for number in (7, 8):  # of a graph that is captured: nothing was claimed
        pair.step(number)
    for ring in (pair.packets.host, pair.results.host):
        ring.rewind()
    packets_and_results_arrive_in_order_while_the_rings_wrap(pair)
    pair.device.close()


# --- each promise is tested -------------------------------------------------------------------


def _cpu_claim(order: bool, overwrite: bool) -> Any:
    def claim(self: Any, number: int) -> Any:
        if order and number != self._claimed:
            raise IntegrityError(f"packet {number} claimed, {self._claimed} is next")
        if overwrite and number - self._consumed >= len(self._views):
            raise IntegrityError(f"packet {number} would overwrite one not consumed yet")
        self._claimed += 1
        return self._views[number % len(self._views)]

    return claim


def _cuda_claim(order: bool, slack: int) -> Any:
    def claim(self: Any, number: int) -> Any:
        if order and number != self._done:
            raise IntegrityError(f"packet {number} claimed, {self._done} is next")
        if number - self._device.results_taken >= len(self._views) + slack:
            raise IntegrityError(f"packet {number} would overwrite one not consumed yet")
        self._done += 1
        return self._views[number % len(self._views)]

    return claim


def _cpu_wait_in_any_order(self: Any, number: int, width: int) -> Any:
    self._taken = number
    return CPU_WAIT(self, number, width)


def _cuda_wait_in_any_order(self: Any, number: int, width: int) -> Any:
    self._done = number
    return CUDA_WAIT(self, number, width)


def _cpu_wait_for_nothing(self: Any, number: int, width: int) -> Any:
    published, self._published = self._published, max(self._published, number + 1)
    try:
        return CPU_WAIT(self, number, width)
    finally:
        self._published = max(published, self._published - 1)


def _cuda_wait_for_nothing(self: Any, number: int, width: int) -> Any:
    self._seen = np.array([max(int(self._seen[0]), number + 1)], np.int32)
    return CUDA_WAIT(self, number, width)


def _cuda_wait_without_the_overwrite_check(self: Any, number: int, width: int) -> Any:
    seen, self._seen = self._seen, np.array([number + 1], np.int32)
    try:
        return CUDA_WAIT(self, number, width)
    finally:
        self._seen = seen


def _cuda_wait_that_does_not_say_what_was_taken(self: Any, number: int, width: int) -> Any:
    values = CUDA_WAIT(self, number, width)
    self._device.results_taken = 0
    return values


def _cpu_publish_unchecked(self: Any, record: torch.Tensor) -> None:
    self._taken, taken = self._published, self._taken
    CPU_PUBLISH(self, record)
    self._taken = taken


def _cpu_put_back_always(self: Any, number: int) -> None:
    self._taken = number - 1


def _cuda_put_back_always(self: Any, number: int) -> None:
    self._done = self._device.results_taken = number - 1


def _cuda_put_back_that_forgets_what_was_taken(self: Any, number: int) -> None:
    if self._done == number + 1:
        self._done = number
        self._device.results_taken += 1


CPU_WAIT, CUDA_WAIT = CpuResultRing.wait, CudaResultRing.wait
CPU_PUBLISH = CpuResultRing.publish

BROKEN: dict[str, tuple[type[CpuDevice], type[Any], str, Any]] = {
    "cpu: packets claimed in any order": (
        CpuDevice, CpuPacketRing, "claim", _cpu_claim(False, True)),
    "cpu: packets overwritten": (CpuDevice, CpuPacketRing, "claim", _cpu_claim(True, False)),
    "cpu: results overwritten": (CpuDevice, CpuResultRing, "publish", _cpu_publish_unchecked),
    "cpu: results in any order": (CpuDevice, CpuResultRing, "wait", _cpu_wait_in_any_order),
    "cpu: host does not wait": (CpuDevice, CpuResultRing, "wait", _cpu_wait_for_nothing),
    "cpu: nothing is put back": (CpuDevice, CpuResultRing, "put_back", lambda self, number: None),
    "cpu: put back untaken": (CpuDevice, CpuResultRing, "put_back", _cpu_put_back_always),
    "gpu: packets claimed in any order": (
        CudaRingsDevice, CudaPacketRing, "claim", _cuda_claim(False, 0)),
    "gpu: packets overwritten": (
        CudaRingsDevice, CudaPacketRing, "claim", _cuda_claim(True, 1 << 30)),
    "gpu: a packet overwritten": (CudaRingsDevice, CudaPacketRing, "claim", _cuda_claim(True, 1)),
    "gpu: an entry never used": (CudaRingsDevice, CudaPacketRing, "claim", _cuda_claim(True, -1)),
    "gpu: results overwritten": (
        CudaRingsDevice, CudaResultRing, "wait", _cuda_wait_without_the_overwrite_check),
    "gpu: results in any order": (
        CudaRingsDevice, CudaResultRing, "wait", _cuda_wait_in_any_order),
    "gpu: host does not wait": (CudaRingsDevice, CudaResultRing, "wait", _cuda_wait_for_nothing),
    "gpu: packets are never known to be consumed": (
        CudaRingsDevice, CudaResultRing, "wait", _cuda_wait_that_does_not_say_what_was_taken),
    "gpu: nothing is put back": (
        CudaRingsDevice, CudaResultRing, "put_back", lambda self, number: None),
    "gpu: put back untaken": (CudaRingsDevice, CudaResultRing, "put_back", _cuda_put_back_always),
    "gpu: put back and known to be consumed": (
        CudaRingsDevice, CudaResultRing, "put_back", _cuda_put_back_that_forgets_what_was_taken),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ring_is_caught(name: str) -> None:
    kind, ring, method, broken = BROKEN[name]
    caught = []
    with patch.object(ring, method, broken):
        for promise in PROMISES:
            pair = Pair(kind)
            try:
                promise(pair)
            except (AssertionError, IntegrityError, pytest.fail.Exception):
                caught.append(promise.__name__)
            finally:
                pair.device.close()
    assert caught
