"""Whether the elements of a tensor are finite: a Triton kernel that reads them once."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.compile_ahead import compile_and_load, variant_of

BLOCK, WARPS = 8192, 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BELOW = {torch.bfloat16: math.ldexp(511, 119), torch.float16: 65520.0, torch.float32: math.inf}
"""By dtype: the lowest fp32 magnitude that rounds to infinity."""

_compiling: set[Future[Any]] = set()
"""What other threads compile for launches to come."""


@triton.jit(do_not_specialize=["mark_ptr"])
def _mark_not_finite_kernel(x_ptr, mark_ptr, count, below, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    is_finite = tl.abs(x) < below  # false of NaN
    if tl.min(is_finite.to(tl.int32), 0) == 0:
        tl.store(mark_ptr, 1)


def takes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`mark_not_finite` does."""
    return tensor.dtype in DTYPES and dtype in DTYPES and (
        tensor.is_contiguous() or tensor.transpose(0, -1).is_contiguous()
    )  # fmt: skip


def mark_not_finite(tensor: Tensor, dtype: torch.dtype, mark: Tensor) -> None:
    """Set ``mark``, int32 of one element, to 1 if an element of ``tensor`` is not finite, or would
    not be in ``dtype``. It does not wait for the device."""
    if _compiling:
        wait(tuple(_compiling))
    args, options = _launch_of(tensor, dtype, mark)
    _mark_not_finite_kernel[(triton.cdiv(tensor.numel(), BLOCK),)](*args, **options)


def _launch_of(
    tensor: Tensor, dtype: torch.dtype, mark: Tensor
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Arguments and options of a launch."""
    return (tensor, mark, tensor.numel(), BELOW[dtype]), {"BLOCK": BLOCK, "num_warps": WARPS}


def compile_ahead(
    tensors: Iterable[tuple[Tensor, torch.dtype]],
    begin: Callable[[Callable[[], None]], Future[Any]],
) -> None:
    """Have another thread compile the kernels that :func:`mark_not_finite` needs, which waits for
    them. What does not compile there is an error of its launch.

    Args:
        tensors: each with the dtype that it is to be served in; their elements are not read.
        begin: begins to run what it is given in another thread.
    """
    variants = {
        (variant_of(tensor), variant_of(tensor.numel())): (tensor, dtype)
        for tensor, dtype in tensors
        if takes(tensor, dtype) and tensor.numel()
    }

    def compile_all() -> None:
        for tensor, dtype in variants.values():
            mark = torch.empty(1, dtype=torch.int32, device=tensor.device)
            launch = _launch_of(tensor, dtype, mark)
            compile_and_load(_mark_not_finite_kernel, tensor.device, *launch)

    if variants:
        begun = begin(compile_all)
        _compiling.add(begun)
        begun.add_done_callback(_compiling.discard)
