"""Launches of the Triton kernels that have tiles, over tensors without contents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels.mamba.layer import (
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)
from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings
from megatron_async.kernels.moe.shape import Live, MoeShape, MoeWeights, ScaleColumns
from tests.support.compiled_kernels import empty


def experts(
    hidden: int,
    inner: int,
    rows: int,
    dtype: torch.dtype,
    *,
    count: int = 8,
    shared: int = 2,
    device: str = "meta",
    scale_columns: ScaleColumns | None = None,
    packed: bool = False,
    **others: Any,
) -> Any:
    """A layer's kernels, and the call that launches them, without the router's if it is told so.
    With ``packed`` its experts are MXFP4, of which none are shared."""
    from megatron_async.kernels.moe.decode import MoeDecode

    settings = RouterSettings(num_experts=count, top_k=2)
    shape = MoeShape(
        hidden, inner, settings, ExpertActivation(), 0 if packed else shared,
        scale_columns=scale_columns, is_packed=packed,
    )  # fmt: skip
    kernels = MoeDecode(shape, torch.device(device), dtype, one_kernel=False, **others)

    def of(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return empty(*size, dtype=dtype, device=device)

    weights = MoeWeights(
        (of(hidden), None), of(count, hidden), of(count, 2 * inner, hidden),
        of(count, hidden, inner), shared_w1=of(2 * shared * inner, hidden),
        shared_w2=of(hidden, shared * inner),
    )  # fmt: skip
    for name, columns in () if scale_columns is None else scale_columns._asdict().items():
        *rows_of, length = getattr(weights, name).shape
        numbers = of(*rows_of, length, dtype=torch.float8_e4m3fn)
        scale = of(*rows_of, length // columns, dtype=torch.float32)
        weights = weights._replace(**{name: numbers, f"{name}_scale": scale})
    for name in ("w1", "w2") if packed else ():
        *rows_of, length = getattr(weights, name).shape
        numbers, scale = (of(*rows_of, length // size, dtype=torch.uint8) for size in (2, 32))
        weights = weights._replace(**{name: numbers, f"{name}_scale": scale})
    if packed:
        weights = weights._replace(shared_w1=None, shared_w2=None)
    x, wide = of(rows, hidden), torch.float32
    statistics = of(rows, hidden // kernels.statistic_rows(rows), 2, dtype=wide)

    def launch(*, routes: bool = True) -> None:
        if routes:
            live = Live(of(rows, dtype=torch.int64), 1)
            kernels.route(weights, x, of(rows, 4, 2, dtype=wide), 1e-5, live)
        kernels.up(weights, rows)
        kernels.down(weights, of(rows, hidden), x, statistics, (of(hidden), of(rows, hidden)))

    return kernels, launch


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    latent: int | None = None,
    prefill: bool = False,
    invariant: bool = False,
    device: str = "meta",
    block_size: int = 16,
    tokens: int = 8,
) -> None:
    """Decode rows, or the tokens of chunks."""
    from megatron_async.kernels.attention.invariant.invariant_triton import (
        invariant_chunks,
        invariant_rows,
    )
    from megatron_async.kernels.attention.paged_decode_triton import paged_decode_attention_triton
    from megatron_async.kernels.attention.paged_prefill_triton import paged_mixed_attention_triton

    query = empty(tokens, heads, head_dim, dtype=dtype, device=device)
    keys = empty(9, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    values = keys if latent else torch.empty_like(keys)
    table = empty(tokens, 64, device=device)
    if not prefill:
        lengths = empty(tokens, device=device)
        if invariant:
            invariant_rows(query, keys, values, table, lengths, 0.1, empty(tokens, device=device))
            return
        paged_decode_attention_triton(query, keys, values, table, lengths, 0.1, latent=latent)
        return
    chunks = empty(4, 4, dtype=torch.int32, device=device)
    out = empty(tokens, heads, latent or head_dim, dtype=dtype, device=device)
    if invariant:
        invariant_chunks(query, keys, values, table, chunks, 0.1, out)
        return
    paged_mixed_attention_triton(query, keys, values, table, chunks, 0.1, out, latent=latent)


def product(rows: int, depth: int, columns: int, dtype: torch.dtype, device: str = "meta") -> None:
    """A batch-invariant one."""
    from megatron_async.kernels.gemm.invariant.products_triton import matmul_by_row

    weight = empty(columns, depth, dtype=dtype, device=device)
    matmul_by_row(empty(rows, depth, dtype=dtype, device=device), weight.t())


def scan(sizes: MambaSizes, dtype: torch.dtype, device: str = "meta") -> None:
    """Prefill chunks of a Mamba-2 layer."""
    from megatron_async.kernels.mamba.scan_triton import scan_chunks_triton

    scan_chunks_triton(*_layer(sizes, dtype, device))


def mix(sizes: MambaSizes, dtype: torch.dtype, *, chunks: bool, device: str = "meta") -> None:
    """Windows of a Mamba-2 layer, or prefill chunks with the bits of these."""
    from megatron_async.kernels.mamba.mix_triton import MixWorkspace, mix_rows_triton

    workspace = MixWorkspace(32, 2, sizes, torch.device(device))
    most = 0 if chunks else 3
    arguments = _layer(sizes, dtype, device)
    mix_rows_triton(*arguments, most=most, workspace=workspace, chunks=chunks)


def _layer(
    sizes: MambaSizes, dtype: torch.dtype, device: str
) -> tuple[Tensor, MambaParameters, LayerStates, StateRows, Tensor]:
    def of(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return empty(*size, dtype=dtype, device=device)

    wide = torch.float32
    parameters = MambaParameters(
        sizes, of(sizes.conv_channels, sizes.conv_width), of(sizes.conv_channels),
        of(sizes.heads), of(sizes.heads, dtype=wide), of(sizes.heads, dtype=wide), None,
    )  # fmt: skip
    states = LayerStates(
        of(5, sizes.ring(), sizes.input_width),
        of(5, sizes.heads, sizes.head_dim, sizes.state_size, dtype=wide),
    )
    rows = StateRows(*(of(2, dtype=torch.int64) for _ in range(6)))
    return of(32, sizes.projection), parameters, states, rows, of(32, sizes.inner)
