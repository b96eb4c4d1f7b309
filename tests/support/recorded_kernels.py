"""Kernels that write down how they are launched and do nothing, with tensors by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.gemm import skinny_gemm


class Launch(NamedTuple):
    """One launch: the kernel's source and macros, and what it was given."""

    source: str
    defines: dict[str, int]
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Map(NamedTuple):
    """A TMA descriptor."""

    tensor: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Recorder:
    """Launches in order. Tensors without a name are buffers, counted as they turn up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, boxes: bool) -> None:
        self.launches: list[Launch] = []
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # no address is given out twice
        monkeypatch.setattr(skinny_gemm, "kernel", self._kernel)
        monkeypatch.setattr(decode_attention, "kernel", self._kernel)
        monkeypatch.setattr(cuda, "tensor_map", self._map)
        monkeypatch.setattr(cuda, "has_wgmma", lambda index: boxes)
        monkeypatch.setattr(cuda, "device_name", lambda index: "none")

    def know(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give tensors their names."""
        for name, tensor in tensors.items():
            self._names[tensor.data_ptr()] = name
            self._kept.append(tensor)

    def name(self, argument: Any) -> Any:
        """The argument, a tensor by its name and its shape."""
        if not isinstance(argument, torch.Tensor):
            return argument
        self._kept.append(argument)
        if argument.numel() == 0:
            return "empty", tuple(argument.shape)
        buffers = sum(name.startswith("buffer") for name in self._names.values())
        name = self._names.setdefault(argument.data_ptr(), f"buffer {buffers}")
        return name, tuple(argument.shape)

    def _kernel(
        self, source: str, defines: Mapping[str, int], device: torch.device
    ) -> _RecordedKernel:
        return _RecordedKernel(self, source, dict(defines))

    def _map(
        self,
        tensor: torch.Tensor,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
    ) -> Map:
        return Map(self.name(tensor)[0], tuple(sizes), tuple(strides), tuple(box))


class _RecordedKernel:
    shared_bytes, threads = 60_000, 256

    def __init__(self, recorder: Recorder, source: str, defines: dict[str, int]) -> None:
        self._recorder, self._source, self._defines = recorder, source, defines

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        named = tuple(self._recorder.name(argument) for argument in arguments)
        self._recorder.launches.append(Launch(self._source, self._defines, grid, named))
