"""A scope in which GEMMs on CUDA give each row bits of its own.

Libraries choose kernels, tiles and splits by the number of rows, so a token computed in a prefill
chunk and again in a decode step differs in its last bits (He et al., "Defeating Nondeterminism in
LLM Inference", 2025). Inside :func:`batch_invariant_mode` every GEMM with a 2D matrix goes to one
kernel with one order of summation instead, and what would depend on the batch raises.

Elementwise functions, embeddings, ``rms_norm`` and ``layer_norm`` are left alone: PyTorch's CUDA
kernels give each row to one block, laid out by the row's own size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_async.errors import ConfigError


@contextmanager
def batch_invariant_mode() -> Iterator[None]:
    """Route GEMMs on CUDA to ``matmul_by_row`` in this thread until the scope ends.

    What a graph captures inside the scope stays so. On the CPU nothing changes: GEMMs there
    give a row the same bits in any number of rows that is a multiple of 8.

    Raises:
        ConfigError: (inside the scope) an operation on CUDA mixes rows, or has no kernel here.
    """
    before = is_on()
    _scope.on = True
    try:
        with _BatchInvariantMode():
            yield
    finally:
        _scope.on = before


_scope = threading.local()


def is_on() -> bool:
    """Whether this thread is inside of :func:`batch_invariant_mode`."""
    return getattr(_scope, "on", False)


def _by_row(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    from megatron_async.kernels.gemm.invariant.products_triton import DTYPES, matmul_by_row

    if b.dim() != 2 or a.dim() < 1:
        raise ConfigError(
            f"a product of shapes {tuple(a.shape)} and {tuple(b.shape)} depends on the batch: in "
            "batch-invariant mode the second factor must be a 2D matrix"
        )
    if a.dtype not in DTYPES:
        raise ConfigError(
            f"batch-invariant mode has no product of {a.dtype}: use bfloat16, float16 or float32"
        )
    return matmul_by_row(a, b, bias)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _by_row(input, weight.t(), bias)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    return _by_row(input, other)


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    return _by_row(input, mat2)


def _rmatmul(self: Tensor, other: Tensor) -> Tensor:
    return _by_row(other, self)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if beta == 1 and alpha == 1 and input.dim() == 1:
        return _by_row(mat1, mat2, input)
    product = _by_row(mat1, mat2)
    return product * alpha + input * beta


def _grouped_mm(
    input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Rows ``[T, K]`` sorted by group, times ``[G, K, N]``; ``offs`` int32 ``[G]`` are the ends of
    the groups."""
    from megatron_async.kernels.gemm.invariant.groups_triton import matmul_by_group
    from megatron_async.kernels.gemm.invariant.products_triton import DTYPES

    if input.dim() != 2 or mat2.dim() != 3 or offs is None or (bias, out_dtype) != (None, None):
        raise ConfigError(
            "batch-invariant mode has grouped_mm for rows in groups alone, without bias and "
            "out_dtype"
        )
    if input.dtype not in DTYPES:
        raise ConfigError(f"batch-invariant mode has no grouped_mm of {input.dtype}")
    return matmul_by_group(input, mat2, offs)


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor | None:
    """SwiGLU of ``x [..., K]`` times ``weight [2 F, K]`` in one kernel: ``[..., F]``, with the bits
    of a product inside of :func:`batch_invariant_mode` and ``norm/swiglu.py`` behind it. None where
    no kernel takes these; tensors are on CUDA."""
    from megatron_async.kernels.gemm.invariant.gated_triton import gated_by_row, takes_gated

    matrix = weight.t()
    return gated_by_row(x, matrix) if takes_gated(x, matrix) else None


def linear_in_segments(x: Tensor, weight: Tensor) -> Tensor | None:
    """The sums of each segment of K of ``x [..., K]`` times ``weight [N, K]``, fp32 ``[segments,
    ..., N]``: added up one after the other and rounded they are the product inside of
    :func:`batch_invariant_mode`. None where it has one segment, or one program for all; tensors are
    on CUDA."""
    from megatron_async.kernels.gemm.invariant.products_triton import DTYPES, segments_by_row

    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return None
    return segments_by_row(x, weight.t())


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Find the tiles that products on a GPU may have; elsewhere and for other dtypes do nothing.
    This compiles kernels, and waits for the device."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        from megatron_async.kernels.gemm.invariant.products_triton import find_tiles

        find_tiles(torch.device(device.type, device.index or 0), dtype)


_ROUTES: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    getattr(torch, "_grouped_mm", None): _grouped_mm,  # what F.grouped_mm calls
}

_MIXES_ROWS: frozenset[Any] = frozenset(
    {
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        Tensor.addbmm,
        Tensor.addbmm_,
        Tensor.addmm_,
        Tensor.addmv,
        Tensor.addmv_,
        Tensor.baddbmm,
        Tensor.baddbmm_,
        Tensor.bmm,
        Tensor.dot,
        Tensor.inner,
        Tensor.mv,
        torch.addbmm,
        torch.addmv,
        torch.baddbmm,
        torch.bmm,
        torch.chain_matmul,
        torch.dot,
        torch.einsum,
        torch.inner,
        torch.linalg.matmul,
        torch.linalg.multi_dot,
        torch.linalg.vecdot,
        torch.mv,
        torch.tensordot,
    }
)


class _BatchInvariantMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        route = _ROUTES.get(func)
        if route is None and func not in _MIXES_ROWS:
            return func(*args, **kwargs)
        if not _on_cuda(args) and not _on_cuda(kwargs.values()):
            return func(*args, **kwargs)
        if route is None:
            raise ConfigError(
                f"{getattr(func, '__name__', func)} may depend on the batch: batch-invariant mode "
                "has only products with a 2D matrix (linear, matmul, mm, addmm)"
            )
        if "out" in kwargs:
            raise ConfigError("batch-invariant mode has no out= for products: leave it out")
        return route(*args, **kwargs)


def _on_cuda(values: Any) -> bool:
    return any(
        value.is_cuda if isinstance(value, Tensor) else _on_cuda(value)
        for value in values
        if isinstance(value, Tensor | list | tuple)
    )
