"""Products of few rows in one order of K, by ``skinny_gemm_wgmma.cu``.

It streams a weight once, and has its first tiles come in while the kernel in front still runs. Its
instructions add columns of K up in their order, as those that Triton makes do, and of CTAs that
share K each has a segment of it. So a row has the bits of ``products_triton.py``; whether it
has on a GPU is looked at once there (:func:`find_products`). Only what :func:`load` has loaded is
used: nothing is compiled for a product that is waited for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import KernelTooLargeError
from megatron_async.kernels.gemm.invariant.segments import segment_size
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm, defines
from megatron_async.kernels.gemm.tile_config import (
    FEW_ROWS,
    NO_NORM,
    SILU_GATE,
    STAGE_K,
    STORE,
    GemmProblem,
    TileConfig,
    padded,
)
from megatron_async.kernels.gemm.untuned.ranking import ranked_in_order
from megatron_async.kernels.shared_memory import block_limit

Work = tuple[str, dict[str, int]]
"""A kernel's source, and its macros."""

LEAST_ROWS = 8
"""A kernel for fewer would be the same."""
LEAST_COLUMNS, MOST_COLUMNS = 512, 65536
"""A narrower weight has too few CTAs for a GPU; with a wider one Triton's kernels do as well."""


class Product(NamedTuple):
    """A product with a weight ``[columns, depth]`` in bfloat16.

    Args:
        segments: of K, that are added up one after the other.
        gated: SwiGLU is applied to it: the result has half the columns.
    """

    columns: int
    depth: int
    segments: int
    gated: bool = False


_loaded: dict[tuple[torch.device, Product, int], SkinnyGemm] = {}
"""By GPU, product and padded rows."""
_weights: dict[int, weakref.ref[Tensor]] = {}
"""By address, what the kernel may read before the kernel in front of it has ended."""
_same: set[torch.device] = set()
"""GPUs on which they have the bits of Triton's kernels."""


def padded_rows(rows: int) -> int:
    """The rows that a kernel for ``rows`` rows is compiled for."""
    return max(LEAST_ROWS, padded(rows))


@functools.cache
def tile_config(product: Product, rows: int, sm_count: int, limit: int) -> TileConfig | None:
    """How it is computed for padded ``rows`` on such a GPU: as should be quickest of what gives
    each CTA one segment of K, in order; None if nothing does, as where segments have not all one
    size: the kernel divides K evenly.

    Partial sums go through clusters: a workspace would be shared by all streams.
    """
    columns, depth, segments, gated = product
    is_even = depth % STAGE_K == 0 and (
        segments == 1 or segments * segment_size(depth, segments) == depth
    )
    if not is_even or not LEAST_COLUMNS <= columns <= MOST_COLUMNS:
        return None
    problem = GemmProblem(rows, columns, depth, NO_NORM, SILU_GATE if gated else STORE)
    found = ranked_in_order(problem, segments, sm_count=sm_count, limit=limit)
    return found[0] if found else None


def work_of(
    products: Iterable[Product], rows: Iterable[int], device: torch.device
) -> Iterator[Work]:
    """The kernels that :func:`load` loads."""
    for product, size, config in _configured(products, rows, device):
        macros = defines(
            product.columns, product.depth, size, NO_NORM, _epilogue(product), 0, config,
            cuda.sm_count(device.index or 0), block_limit(device), rounded=product.gated,
        )  # fmt: skip
        yield config.kernel, macros


def load(products: Iterable[Product], rows: Iterable[int], device: torch.device) -> None:
    """Compile and load what computes these products for these numbers of rows, where there is a
    kernel. It waits for compilers."""
    if not _runs(device):
        return
    products, rows = list(products), list(rows)
    cuda.compile_together(
        list(work_of(products, rows, device)), cuda.architecture(device.index or 0)
    )
    for product, size, config in _configured(products, rows, device):
        key = _with_index(device), product, size
        if key in _loaded:
            continue
        try:
            _loaded[key] = SkinnyGemm(
                product.columns, product.depth, size, NO_NORM, _epilogue(product), 0, config,
                device, rounded=product.gated,
            )  # fmt: skip
        except KernelTooLargeError:
            continue


def keep_weight(weight: Tensor) -> None:
    """Have products with this parameter use the kernels. They read a weight before the kernel in
    front of them has ended, so no kernel in a stream of steps may write it."""
    _weights[weight.data_ptr()] = weakref.ref(weight)


def _is_kept(weight: Tensor) -> bool:
    """Whether it is a parameter of :func:`keep_weight`, and not what lies where one was."""
    found = _weights.get(weight.data_ptr())
    kept = None if found is None else found()
    return kept is not None and kept.data_ptr() == weight.data_ptr()


def _configured(
    products: Iterable[Product], rows: Iterable[int], device: torch.device
) -> Iterator[tuple[Product, int, TileConfig]]:
    if not _runs(device):
        return
    sizes = sorted({padded_rows(count) for count in rows if 0 < count <= FEW_ROWS})
    for product in dict.fromkeys(products):
        for size in sizes:
            config = tile_config(
                product, size, cuda.sm_count(device.index or 0), block_limit(device)
            )
            if config is not None:
                yield product, size, config


def _runs(device: torch.device) -> bool:
    index = device.index or 0
    return device.type == "cuda" and cuda.unavailable(index) is None and cuda.has_wgmma(index)


def _epilogue(product: Product) -> int:
    return SILU_GATE if product.gated else STORE


def _with_index(device: torch.device) -> torch.device:
    return torch.device(device.type, device.index or 0)


def multiply(
    x: Tensor, weight: Tensor, segments: int, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor | None:
    """``x weight^T + bias`` for contiguous x ``[rows, K]`` and a parameter ``[columns, K]`` of
    :func:`keep_weight`, in this many segments of K; with ``gated`` its SwiGLU.

    Returns:
        bfloat16 ``[rows, columns]``, of SwiGLU half the columns; None where no kernel was loaded
        for such a product.
    """
    gemm = _kernel_for(x, weight, segments, gated=gated)
    return None if gemm is None else _run(gemm, x, weight, bias, gated=gated)


def takes(x: Tensor, weight: Tensor, segments: int) -> bool:
    """Whether :func:`multiply` computes it."""
    return _kernel_for(x, weight, segments, gated=False) is not None


def _run(
    gemm: SkinnyGemm, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool
) -> Tensor:
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(x.shape[0], columns)
    gemm(x, weight, out, bias=bias)
    return out


def _kernel_for(x: Tensor, weight: Tensor, segments: int, *, gated: bool) -> SkinnyGemm | None:
    rows, device = x.shape[0], _with_index(x.device)
    if device not in _same or not 0 < rows <= FEW_ROWS:
        return None
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return None
    if not weight.is_contiguous() or (x.data_ptr() | weight.data_ptr()) % 16:
        return None
    columns, depth = weight.shape
    product = Product(columns, depth, segments, gated)
    found = _loaded.get((device, product, padded_rows(rows)))
    return found if found is not None and _is_kept(weight) else None


ROWS = (8, 16, 32, 48, 64)
"""Numbers of rows, of which each has instructions of its own."""
EXAMINED = (
    Product(4096, 8192, 4),
    Product(4096, 1024, 1),
    Product(28672, 1024, 1, gated=True),
)
"""What is looked at: CTAs with a tile for each warp and with several, alone and in clusters."""


def find_products(
    device: torch.device,
    values: Callable[..., Tensor],
    expected: Callable[[Tensor, Tensor, Product], Tensor],
) -> str | None:
    """Look once whether products have the bits of ``expected`` on a GPU: they are used if all of
    :data:`EXAMINED` have.

    Args:
        values: random numbers in bfloat16, of a shape.
        expected: of x, a weight and what is asked of them.

    Returns:
        What has other bits, or does not run; None if all is well, or there are no such products.
    """
    device = _with_index(device)
    if device in _same or not _runs(device):
        return None
    try:
        load(EXAMINED, ROWS, device)
        for (at, product, rows), gemm in list(_loaded.items()):
            if at != device or product not in EXAMINED:
                continue
            x, weight = values(rows, product.depth), values(product.columns, product.depth)
            if not torch.equal(
                _run(gemm, x, weight, gated=product.gated), expected(x, weight, product)
            ):
                return f"{product} of {rows} rows has other bits"
    except RuntimeError as error:
        return f"products by CUDA do not run: {error}"
    _same.add(device)
    return None
