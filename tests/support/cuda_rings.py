"""The rings of a GPU where there is none: the host's side is the real one, and what the kernels of
``kernels/rings.py`` do on the device is done by the CPU's stream."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron_async.device import cuda
from megatron_async.device.cpu import POISON, CpuDevice
from megatron_async.device.cuda import CudaPacketRing, CudaResultRing
from megatron_async.device.protocol import Ints

SPINS_BETWEEN_CHECKS = 10
"""A host that spins longer keeps the interpreter's lock from the thread that it waits for."""


class CudaRingsDevice(CpuDevice):
    """A CPU device whose rings are those of a GPU."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream = SimpleNamespace(query=self._query, synchronize=self.synchronize)
        self.results_taken = 0

    def packet_ring(self, entries: int, width: int) -> Any:
        return CudaPackets(self, entries, width)

    def result_ring(self, entries: int, width: int, *, of_steps: bool = True) -> Any:
        return CudaResults(self, entries, width, of_steps=of_steps)

    def _query(self) -> None:
        self.raise_failure()
        time.sleep(1e-5)


class CudaPackets:
    """Not a :class:`CudaPacketRing`, whose kernels a step program would take, but one inside."""

    def __init__(self, device: CudaRingsDevice, entries: int, width: int) -> None:
        self._device = device
        self.host = CudaPacketRing(device, entries, width)  # type: ignore[arg-type]

    def claim(self, number: int) -> Ints:
        self._device.raise_failure()
        return self.host.claim(number)

    def read(self, into: torch.Tensor, width: int) -> None:
        host = self.host
        entry = host.ring[int(host.counter) % host.ring.shape[0]]
        into[:width].copy_(entry[:width])
        if self._device.poison:
            entry.fill_(POISON)
        host.counter += 1

    def restart(self) -> None:
        self.host.restart()


class CudaResults:
    """As :class:`CudaPackets`."""

    def __init__(
        self, device: CudaRingsDevice, entries: int, width: int, *, of_steps: bool = True
    ) -> None:
        self.host = CudaResultRing(device, entries, width, of_steps=of_steps)  # type: ignore[arg-type]

    def publish(self, record: torch.Tensor) -> None:
        host = self.host
        number = int(host.counter)
        host.ring[number % host.ring.shape[0], : record.numel()].copy_(record)
        host.counter += 1
        host.sequence.fill_(number + 1)

    def wait(self, number: int, width: int) -> Ints:
        with patch.object(cuda, "SPINS_BETWEEN_CHECKS", SPINS_BETWEEN_CHECKS):
            return self.host.wait(number, width)

    def skip(self, number: int) -> None:
        self.host.skip(number)

    def put_back(self, number: int) -> None:
        self.host.put_back(number)

    def restart(self) -> None:
        self.host.restart()
