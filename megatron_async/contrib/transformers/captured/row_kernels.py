"""Products and attention of one token, for captured steps that are compiled.

A decode step of one row is bound by the latency of its many small kernels. Here a layer has one
kernel for each product, and one for its attention and what that writes to the cache; the compiler
fuses what is between them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

try:  # comes with PyTorch's builds for NVIDIA GPUs
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - the torch code runs
    HAS_TRITON = False
else:
    HAS_TRITON = True


def runs_on(device: torch.device) -> bool:
    """Whether a device has the kernels; a CPU has the torch code."""
    return device.type == "cpu" or (device.type == "cuda" and HAS_TRITON)


PARTS = 8
"""The most parts of a sum: the compiler adds up as many in the kernel that reads them."""
WANTED_BLOCKS = 264
"""Two for each multiprocessor of the largest GPUs."""


def parts_of(inner: int, outer: int) -> int:
    """Into how many parts the sums over ``inner`` are cut, for a matrix ``(inner, outer)``."""
    blocks, parts = -(-outer // COLUMNS), 1
    while parts < PARTS and blocks * parts * 2 <= WANTED_BLOCKS and inner % (parts * 2 * 32) == 0:
        parts *= 2
    return parts


COLUMNS = 16
"""Columns of a block of :func:`times_columns`: 32 bytes of a row, what a GPU reads at once."""


@torch.library.custom_op("megatron_async::times_rows", mutates_args=())
def times_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``weight @ x + bias``: ``(inner,)`` and ``(outer, inner)``, to ``(outer,)``, rounded once."""
    if HAS_TRITON and x.is_cuda:
        return launch_rows(x, weight, bias)
    out = weight.float() @ x.float()
    return (out if bias is None else out + bias).to(x.dtype)


@times_rows.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(weight.shape[0])


@torch.library.custom_op("megatron_async::times_columns", mutates_args=())
def times_columns(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight + bias``: ``(inner,)`` and ``(inner, outer)``, to ``(outer,)``, rounded once."""
    if HAS_TRITON and x.is_cuda:
        return launch_columns(x, weight, bias, 1)[0]
    return (x.float() @ weight.float() + bias).to(x.dtype)


@times_columns.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(weight.shape[1])


@torch.library.custom_op("megatron_async::parts_of_columns", mutates_args=())
def parts_of_columns(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """``x @ weight``: ``(inner,)`` and ``(inner, outer)``, to parts of the sums, fp32
    ``(parts, outer)``."""
    if HAS_TRITON and x.is_cuda:
        return launch_columns(x, weight, None, parts)
    cut = weight.float().reshape(parts, -1, weight.shape[1])
    return (x.float().reshape(parts, 1, -1) @ cut)[:, 0]


@parts_of_columns.register_fake
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty((parts, weight.shape[1]), dtype=torch.float32)


@torch.library.custom_op("megatron_async::attend_one", mutates_args=("keys", "values"))
def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor,
    position: Tensor,
    scale: float,
) -> Tensor:
    """Attention of the token at ``position``, whose key and value are written there first.

    Args:
        query: ``(batch, heads, 1, dim)``. ``key``, ``value``: ``(batch, kv_heads, 1, dim)``.
        keys, values: caches, contiguous ``(batch, kv_heads, length, dim)``.
        allowed: bool ``(batch, 1, 1, length)``; ``position`` is allowed. Nothing behind it is.
        position: int64 ``(1,)``.

    Returns:
        ``(batch, 1, heads, dim)``, contiguous.
    """
    if HAS_TRITON and query.is_cuda:
        return launch_attention(query, key, value, keys, values, allowed, position, scale)
    keys.index_copy_(2, position, key)
    values.index_copy_(2, position, value)
    group = query.shape[1] // keys.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = (query.float() @ k.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return (weights @ v).to(query.dtype).transpose(1, 2).contiguous()


@attend_one.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    batch, heads, _one, dim = query.shape
    return query.new_empty((batch, 1, heads, dim))


if HAS_TRITON:

    @triton.jit
    def _rows_kernel(
        x_ptr, weight_ptr, bias_ptr, out_ptr, outer, row_stride, HAS_BIAS: tl.constexpr,
        INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        in_rows = (row < outer)[:, None]
        column = tl.arange(0, BLOCK)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        start_of = weight_ptr + row.to(tl.int64)[:, None] * row_stride
        for start in range(0, INNER, BLOCK * UNROLL):
            for part in tl.static_range(UNROLL):
                at = start + part * BLOCK + column
                inside = in_rows & (at < INNER)[None, :]
                # as wide as the weights: a row of its own would go through shared memory
                x = tl.load(x_ptr + row[:, None] * 0 + at[None, :], mask=inside, other=0)
                weight = tl.load(start_of + at[None, :], mask=inside, other=0,
                                 eviction_policy="evict_first")  # fmt: skip
                total += weight.to(tl.float32) * x.to(tl.float32)
        result = tl.sum(total, 1)
        if HAS_BIAS:
            result += tl.load(bias_ptr + row, mask=row < outer, other=0).to(tl.float32)
        tl.store(out_ptr + row, result.to(out_ptr.dtype.element_ty), mask=row < outer)

    @triton.jit
    def _columns_kernel(
        x_ptr, weight_ptr, bias_ptr, out_ptr, outer, row_stride, HAS_BIAS: tl.constexpr,
        INNER: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = (column < outer)[None, :]
        first = tl.program_id(1) * PART
        row = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK, COLUMNS), tl.float32)
        for start in tl.static_range(0, PART, BLOCK):
            at = start + row
            x = tl.load(x_ptr + first + at, mask=at < PART, other=0)
            inside = (at < PART)[:, None] & in_columns
            where = (first + at)[:, None] * row_stride + column[None, :]
            weight = tl.load(weight_ptr + where, mask=inside, other=0,
                             eviction_policy="evict_first")  # fmt: skip
            total += weight.to(tl.float32) * x.to(tl.float32)[:, None]
        out = out_ptr + tl.program_id(1) * outer + column
        result = tl.sum(total, 0)
        if HAS_BIAS:
            result += tl.load(bias_ptr + column, mask=column < outer, other=0).to(tl.float32)
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=column < outer)

    @triton.jit
    def _attention_kernel(
        query_ptr, key_ptr, value_ptr, keys_ptr, values_ptr, allowed_ptr, position_ptr, out_ptr,
        query_batch, query_head, key_batch, key_head, value_batch, value_head,
        length, heads, scale,
        GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        batch = tl.program_id(0) // heads
        head = tl.program_id(0) % heads
        kv_head = head // GROUP
        position = tl.load(position_ptr)
        lane = tl.arange(0, WIDTH)
        in_dim = lane < DIM
        q = tl.load(
            query_ptr + batch * query_batch + head * query_head + lane, mask=in_dim, other=0
        )
        new_k = tl.load(
            key_ptr + batch * key_batch + kv_head * key_head + lane, mask=in_dim, other=0
        )
        new_v = tl.load(
            value_ptr + batch * value_batch + kv_head * value_head + lane, mask=in_dim, other=0
        )
        cache = (batch * (heads // GROUP) + kv_head).to(tl.int64) * length * DIM
        if head % GROUP == 0:
            tl.store(keys_ptr + cache + position * DIM + lane, new_k, mask=in_dim)
            tl.store(values_ptr + cache + position * DIM + lane, new_v, mask=in_dim)
        q = q.to(tl.float32) * scale
        # the new token's own score first: the cache's entry may not be there yet
        most = tl.sum(q * new_k.to(tl.float32), 0)
        total = most * 0 + 1.0
        acc = new_v.to(tl.float32)
        for start in range(0, position, BLOCK):
            token = start + tl.arange(0, BLOCK)
            before = token < position
            inside = before[:, None] & in_dim[None, :]
            at = cache + token[:, None] * DIM + lane[None, :]
            k = tl.load(keys_ptr + at, mask=inside, other=0)
            v = tl.load(values_ptr + at, mask=inside, other=0)
            ok = tl.load(allowed_ptr + batch * length + token, mask=before, other=0) != 0
            scores = tl.sum(k.to(tl.float32) * q[None, :], 1)
            scores = tl.where(ok, scores, -float("inf"))
            higher = tl.maximum(most, tl.max(scores, 0))
            weights = tl.exp(scores - higher)
            old = tl.exp(most - higher)
            acc = acc * old + tl.sum(weights[:, None] * v.to(tl.float32), 0)
            total = total * old + tl.sum(weights, 0)
            most = higher
        out = out_ptr + tl.program_id(0) * DIM + lane
        tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=in_dim)

    def launch_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """:func:`times_rows` by the kernel: a warp for each row."""
        x, (outer, inner) = x.contiguous(), weight.shape
        out = torch.empty(outer, dtype=x.dtype, device=x.device)
        block = 256 if x.element_size() == 2 else 128
        steps = triton.cdiv(inner, block)
        unroll = next(n for n in (8, 6, 5, 4, 3, 2, 1) if steps % n == 0)
        _rows_kernel[(triton.cdiv(outer, 4),)](
            x, weight, bias, out, outer, weight.stride(0), HAS_BIAS=bias is not None, INNER=inner,
            ROWS=4, BLOCK=block, UNROLL=unroll, num_warps=4,
        )  # fmt: skip
        return out

    def launch_columns(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        """:func:`times_columns` (with a bias) or :func:`parts_of_columns` by the kernel."""
        x, (inner, outer) = x.contiguous(), weight.shape
        dtype = torch.float32 if bias is None else x.dtype
        out = torch.empty((parts, outer), dtype=dtype, device=x.device)
        part = inner // parts
        _columns_kernel[(triton.cdiv(outer, COLUMNS), parts)](
            x, weight, bias, out, outer, weight.stride(0), HAS_BIAS=bias is not None, INNER=inner,
            PART=part, COLUMNS=COLUMNS, BLOCK=min(256, triton.next_power_of_2(part)), num_warps=4,
        )  # fmt: skip
        return out

    def launch_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor,
        position: Tensor,
        scale: float,
    ) -> Tensor:
        """:func:`attend_one` by the kernel: a block of threads for each head."""
        batch, heads, _, dim = query.shape
        length = keys.shape[2]
        out = torch.empty((batch, 1, heads, dim), dtype=query.dtype, device=query.device)
        _attention_kernel[(batch * heads,)](
            query, key, value, keys, values, allowed, position, out,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            value.stride(0), value.stride(1), length, heads, scale,
            GROUP=heads // keys.shape[1], DIM=dim, WIDTH=triton.next_power_of_2(dim),
            BLOCK=64 if dim > 128 else 128, num_warps=8,
        )  # fmt: skip
        return out
