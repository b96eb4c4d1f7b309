"""Records the steps of an engine, on all ranks of its model."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.device.kernel_profiler import KernelProfiler
from megatron_async.engine.lifecycle.host_timeline import HostTimeline
from megatron_async.perfetto.events import Recording

if TYPE_CHECKING:
    from megatron_async.ranks.timelines import RankTimeline


class StepRecorder:
    """Records from now on, on GPUs also ``kernels``. ``engine`` stands between two steps."""

    def __init__(self, engine: Any, *, kernels: bool = False) -> None:
        self._engine = engine
        self._ranks = Ranks(engine)
        self._profiler = KernelProfiler() if kernels else None
        self.host = HostTimeline(engine)
        engine.device.start_timeline()
        self._ranks.start(kernels=kernels)

    def take(self, title: str, start_ns: int) -> Recording:
        """Wait for the device and end; the engine is suspended. What began before ``start_ns`` is
        not shown."""
        device = self._engine.device.take_timeline()
        self.host.detach()
        kernels = [] if self._profiler is None else self._profiler.take()
        collectives, ranks = self._ranks.take()
        name = device_name(self._engine)
        return Recording(title, name, start_ns, self.host, device, kernels, ranks, collectives)


class Ranks:
    """The timelines of an engine's ranks other than 0, and the collectives of this one; nothing
    where there are none."""

    def __init__(self, engine: Any) -> None:
        self._group = engine.model.group
        self._runner = engine.runner

    def start(self, *, kernels: bool = False) -> None:
        """Record from now on."""
        if self._group is None:
            return
        from megatron_async.ranks.timelines import Collectives, start_timelines

        start_timelines(self._group, self._runner.engine, kernels=kernels)
        self._collectives = Collectives()

    def take(self) -> tuple[list[Any], list[RankTimeline]]:
        """The collectives of rank 0 and the timelines of the others; nothing is in flight."""
        if self._group is None:
            return [], []
        from megatron_async.ranks.timelines import take_timelines

        return self._collectives.take(), take_timelines(self._group, self._runner.engine)


def device_name(engine: Any) -> str:
    """What the steps run on, for people."""
    device = engine.device.torch_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a thread of the CPU ({platform.machine()})"
