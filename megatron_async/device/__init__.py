"""Where steps run: a CUDA GPU, or the CPU with a worker thread as its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron_async.config import EngineConfig
    from megatron_async.device.protocol import Device


def open_device(torch_device: torch.device, config: EngineConfig, *, graphs: bool = True) -> Device:
    """The device that runs steps on ``torch_device``.

    Args:
        graphs: on a GPU, capture steps; see ``CudaDevice``.

    Raises:
        ConfigError: the device is of a type that is not supported.
    """
    from megatron_async.errors import ConfigError

    if torch_device.type == "cpu":
        from megatron_async.device.cpu import CpuDevice

        return CpuDevice(jitter_seed=config.testing.jitter_seed, poison=config.debug)
    if torch_device.type == "cuda":
        from megatron_async.device.cuda import CudaDevice

        return CudaDevice(torch_device, graphs=graphs)
    raise ConfigError(f"device={str(torch_device)!r} is not supported; use cpu or cuda")
