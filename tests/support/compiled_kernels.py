"""Triton kernels compiled for a GPU, which need not be there, and what they take of shared memory.

A launch inside of :func:`compiling_for` compiles its kernel and runs nothing, so tensors may be
``meta`` ones of any size. No kernel may write registers that a product still reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_async.kernels.shared_memory import HOPPER_BYTES
from tests.support.interpreter import HAS_TRITON, INTERPRETED
from tests.support.register_operands import written_too_early

LIMITS = {"H100": HOPPER_BYTES, "A100": 166_912, "L40S": 101_376, "T4": 65_536}
"""Bytes of shared memory that a block may have at most, as these GPUs say."""
HOPPER, AMPERE = 90, 80
LIMIT_OF = {HOPPER: LIMITS["H100"], AMPERE: LIMITS["A100"]}


def _has_assembler() -> bool:
    if not HAS_TRITON or INTERPRETED:
        return False
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return (folder / "ptxas").is_file()


compiles = pytest.mark.skipif(not _has_assembler(), reason="Triton has no assembler here")


class Compiled(NamedTuple):
    """A kernel, the bytes that one of its blocks takes, its code in PTX and in TTIR."""

    name: str
    shared: int
    ptx: str
    ttir: str


class _Driver:
    """Stands for that of a GPU, as far as Triton asks before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by it

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling_for(capability: int | None) -> Iterator[list[Compiled]]:
    """What launches compile, in their order.

    Args:
        capability: of the GPU, times ten; None is the one that is there.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    run, before = JITFunction.run, driver._active

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        early = written_too_early(kernel.asm["ptx"])
        assert not early, (self.__name__, early)
        found.append(
            Compiled(self.__name__, kernel.metadata.shared, kernel.asm["ptx"], kernel.asm["ttir"])
        )
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compiled)
        if capability is not None:
            driver.set_active(_Driver(capability))
        try:
            yield found
        finally:
            driver._active = before


def empty(*shape: int, dtype: torch.dtype = torch.int64, device: str = "meta") -> torch.Tensor:
    """A tensor that no kernel reads."""
    return torch.empty(*shape, dtype=dtype, device=device)
