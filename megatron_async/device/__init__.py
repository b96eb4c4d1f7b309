"""Where steps run: a CUDA GPU, or the CPU with a worker thread as its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron_async.config.engine_config import EngineConfig
    from megatron_async.device.protocol import Device

TYPES = ("cpu", "cuda")


def resolve_device(name: str | None) -> torch.device:
    """The torch device that ``name`` means; None takes a GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    from megatron_async.errors import ConfigError

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = parse_device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r} but PyTorch finds no GPU; use cpu")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={name!r} but there are {torch.cuda.device_count()} GPUs; use a lower index"
            )
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")  # there is one, whatever its number


def parse_device(name: object) -> torch.device:
    """The device of a name, which may not be there; raises ConfigError for what is none."""
    import torch

    from megatron_async.errors import ConfigError, shown

    said = f"device={shown(name)} is not known; use cpu, cuda or cuda:N"
    if isinstance(name, bytes):  # torch takes them as text
        raise ConfigError(said)
    try:
        device = torch.device(name)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ConfigError(said) from None
    if device.type not in TYPES:
        raise ConfigError(said)
    return device  # type: ignore[no-any-return]


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
