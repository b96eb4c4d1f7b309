"""Attention of long prefill chunks by cuDNN, whose kernels are of FlashAttention 3's class.

cuDNN's attention in PyTorch is dense and has a plan for each shape, which takes some 10 ms to make
and is kept by the thread that made it. (With cumulative lengths PyTorch makes a plan for each call,
and its causal mask begins at the top left.) So a chunk attends in parts of few shapes that need no
other mask, and lengths are multiples of :data:`GRID` tokens. With the grid's last point at or
before the chunk's first position, these are

- a *square* from there on: causal, the chunk's tokens to themselves and to what is in front of them
  behind that point. Behind the chunk's end keys are zeros, which no token sees; rows in front and
  behind are those of other tokens, whose results are dropped;
- *pieces* of the keys before that point, which all tokens see, in rows and columns of few sizes.

Parts are merged by their log-sum-exp (FlashAttention-2's splits; Dao, 2023). Keys and values are
gathered from the blocks into contiguous ones first.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.attention.e4m3_cache import read
from megatron_async.step.packet import PlacedChunk

logger = logging.getLogger(__name__)

GRID = 512
"""Sizes of parts are multiples of this many tokens."""
SQUARE_BITS, ROW_BITS, KEY_BITS = 4, 1, 3
"""Sizes of squares, of rows and of keys of pieces have this many significant bits in units of the
grid: up to 131,072 tokens 48 squares, and pieces of 9 x 28 sizes."""
MOST_AT_ONCE = 16
"""Squares of one size, a power of two."""
LEAST_CAPABILITY = (9, 0)
MOST_HEAD_DIM = 128
DTYPES = (torch.bfloat16, torch.float16)
TILE = 32
"""Tokens of a program of the kernels around the library's."""

_refused: set[tuple[Any, ...]] = set()
"""Heads that cuDNN has refused."""


def library_attends(
    query: Tensor,
    kv_heads: int,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    latent: int | None = None,
    sinks: Tensor | None = None,
) -> bool:
    """Whether cuDNN attends for long chunks with ``query`` [T, Hq, D]: which ones are long says
    ``paged_prefill.LEAST_LIBRARY_TOKENS``."""
    if not query.is_cuda or query.dtype not in DTYPES:
        return False
    if window is not None or soft_cap is not None or latent is not None:
        return False
    head_dim = query.shape[2]
    return (
        head_dim % 8 == 0
        and head_dim <= MOST_HEAD_DIM
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(query.device) >= LEAST_CAPABILITY
        and _kind(query, kv_heads) not in _refused
    )


def whole_mixed_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    chunks: Sequence[PlacedChunk],
    scale: float,
    out: Tensor | None,
    *,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """``paged_prefill.paged_mixed_attention`` of ``chunks`` that the host knows.

    Nothing waits for the device. Returns ``out``; where that is None, so that ``chunks`` must have
    all tokens, a tensor ``[T, Hq, D]``. Returns None where cuDNN refuses such heads, which is
    logged and remembered, and where there is no memory for what is gathered; ``out`` may have been
    written then. On a CPU PyTorch's operations take
    the library's place.
    """
    query = query.contiguous()
    try:
        for run in runs_of(chunks):
            attended = _attend_run(query, key_cache, value_cache, block_table, run, scale, sinks)
            if out is None:
                if len(attended) == len(query):
                    return attended
                out = torch.empty_like(query)
            out[run[0].first : run[0].first + len(attended)] = attended
    except torch.OutOfMemoryError as error:
        logger.warning("a prefill attends in Triton's kernels, which need no room: %s", error)
        return None
    except RuntimeError as error:
        if not query.is_cuda:
            raise
        _refused.add(_kind(query, key_cache.shape[2]))
        logger.warning("prefill attends in Triton's kernels, since cuDNN refuses: %s", error)
        return None
    return out


def _kind(query: Tensor, kv_heads: int) -> tuple[Any, ...]:
    return (query.device, query.dtype, *query.shape[1:], kv_heads)


def runs_of(chunks: Sequence[PlacedChunk]) -> list[list[PlacedChunk]]:
    """``chunks`` in runs that attend together: 2, 4, ... neighbours that begin at position 0 and
    are whole squares of one size, and others alone."""
    alike: list[list[PlacedChunk]] = []
    for chunk in chunks:
        follows = chunk._replace(first=chunk.first - chunk.length)
        is_whole = chunk.start == 0 and size_of_square(chunk.length) == chunk.length
        if is_whole and alike and alike[-1][-1][1:] == follows[1:]:
            alike[-1].append(chunk)
        else:
            alike.append([chunk])
    runs = []
    for each in alike:
        while each:
            count = 1 << min(len(each), MOST_AT_ONCE).bit_length() - 1
            runs.append(each[:count])
            each = each[count:]
    return runs


def _attend_run(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    run: Sequence[PlacedChunk],
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """What the tokens of a run attend to, ``[T of the run, Hq, D]``."""
    chunk, count = run[0], len(run)
    before = chunk.start // GRID * GRID
    lead = chunk.start - before
    side = size_of_square(lead + chunk.length)
    keys, values = gather_blocks(
        key_cache, value_cache, block_table, [each.slot for each in run], before + side,
        chunk.start + chunk.length, query.dtype,
    )  # fmt: skip
    rows = _rows(query, chunk.first - lead, count * side).unflatten(0, (count, side))
    total, mass = attend_part(
        rows, keys[:, before:], values[:, before:], scale, causal=True,
        wants_mass=before > 0 or sinks is not None,
    )  # fmt: skip
    for key_at in pieces(before, KEY_BITS):
        for row_at in pieces(side, ROW_BITS):
            # Nothing is in front of a run of several.
            part = attend_part(rows[:, row_at], keys[:, key_at], values[:, key_at], scale)
            merge(total[0, row_at], mass[0, :, row_at], part[0][0], part[1][0])
    own = slice(lead, lead + chunk.length)
    attended = total[:, own]
    if sinks is not None:
        # One more part, whose log-sum-exp is the sink and whose output is zero.
        share = torch.sigmoid(mass[:, :, own] - sinks.float()[:, None])
        attended = attended * share.transpose(1, 2)[..., None].to(query.dtype)
    return attended.flatten(0, 1)


def size_of_square(length: int) -> int:
    """The least size that holds ``length`` tokens: :data:`SQUARE_BITS` significant bits in units
    of the grid, so less than an eighth of more than 8 units is padding."""
    units = -(-length // GRID)
    step = 1 << max(0, (units - 1).bit_length() - SQUARE_BITS)
    return -(-units // step) * step * GRID


def pieces(length: int, bits: int) -> list[slice]:
    """``length`` tokens, a multiple of the grid, in pieces of at most ``bits`` significant bits in
    units of it, the largest first."""
    found, at, units = [], 0, length // GRID
    while units:
        low = max(0, units.bit_length() - bits)
        size = units >> low << low
        found.append(slice(at * GRID, (at + size) * GRID))
        at, units = at + size, units - size
    return found


def _rows(query: Tensor, first: int, count: int) -> Tensor:
    """``query[first : first + count]``, with zeros where there are no such tokens."""
    low, high = max(first, 0), min(first + count, query.shape[0])
    if high - low == count:
        return query[low:high]
    rows = query.new_zeros(count, *query.shape[1:])
    rows[low - first : high - first] = query[low:high]
    return rows


def attend_part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    wants_mass: bool = True,
) -> tuple[Tensor, Tensor]:
    """The library's attention of query ``[B, Q, H, D]`` to keys and values ``[B, K, Hkv, D]``,
    each entry of which is contiguous. ``causal``: row r sees the first r + 1 keys.

    Returns the output ``[B, Q, H, D]`` and, if ``wants_mass``, the log-sum-exp, fp32 ``[B, H, Q]``,
    else anything.
    """
    given = [_with_fixed_strides(x).transpose(1, 2) for x in (query, keys, values)]
    if not query.is_cuda:
        return _attend_part_reference(given, scale, causal=causal)
    out, mass = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *given, None, wants_mass, 0.0, causal, False, scale=scale
    )[:2]
    count, rows, heads = query.shape[:3]
    return out.transpose(1, 2), mass.view(count, heads, rows) if wants_mass else out


def _with_fixed_strides(x: Tensor) -> Tensor:
    """``x`` with strides that its shape alone determines, since a plan is one of strides too. Of
    one entry nothing is copied."""
    return x[0][None] if x.shape[0] == 1 else x.contiguous()


def _attend_part_reference(
    given: Sequence[Tensor], scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    query, keys, values = given
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = query.float() @ keys.transpose(2, 3) * scale
    if causal:
        places = [torch.arange(size, device=query.device) for size in scores.shape[2:]]
        scores = scores.masked_fill(places[1] > places[0][:, None], -torch.inf)
    out = (scores.softmax(-1) @ values).to(query.dtype)
    return out.transpose(1, 2), scores.logsumexp(-1)


@triton.jit
def _gather_kernel(
    key_ptr, value_ptr, table_ptr, key_out_ptr, value_out_ptr, end, count,
    key_block, key_token, key_head, value_block, value_token, value_head,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Keys and values of TOKENS positions, of one head."""
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, heads = tl.program_id(1), tl.num_programs(1)
    d = tl.arange(0, D_PAD)
    is_known = place < end
    block = tl.load(table_ptr + place // BLOCK_SIZE, mask=is_known, other=0).to(tl.int64)
    token = place % BLOCK_SIZE
    known = is_known[:, None] & (d < D)[None, :]
    key_at = (block * key_block + token * key_token)[:, None] + head * key_head + d[None, :]
    value_at = (block * value_block + token * value_token)[:, None] + head * value_head + d[None, :]
    key = tl.load(key_ptr + key_at, mask=known, other=0.0)
    value = tl.load(value_ptr + value_at, mask=known, other=0.0)
    mask = (place < count)[:, None] & (d < D)[None, :]
    at = (place.to(tl.int64) * heads + head)[:, None] * D + d[None, :]
    tl.store(key_out_ptr + at, key.to(key_out_ptr.dtype.element_ty), mask=mask)
    tl.store(value_out_ptr + at, value.to(value_out_ptr.dtype.element_ty), mask=mask)


def gather_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    slots: Sequence[int],
    count: int,
    end: int,
    dtype: torch.dtype,
) -> Tensor:
    """Keys and values of positions 0 to ``count`` of each slot, ``[2, B, count, Hkv, D]`` in
    ``dtype``: from ``end`` on zeros."""
    shape = (2, len(slots), count, *key_cache.shape[2:])
    found = torch.empty(shape, dtype=dtype, device=key_cache.device)
    gather = gather_into_triton if key_cache.is_cuda else gather_into_reference
    for n, slot in enumerate(slots):
        gather(key_cache, value_cache, block_table[slot], end, found[:, n])
    return found


def gather_into_triton(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, end: int, into: Tensor
) -> None:
    """Keys and values of a sequence whose first ``end`` positions are in the blocks ``table`` [C],
    to ``into`` [2, count, Hkv, D], behind ``end`` zeros; in one kernel. Heads' elements are
    contiguous, and so are ``into[0]`` and ``into[1]``."""
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    count = into.shape[1]
    _gather_kernel[(triton.cdiv(count, TILE), kv_heads)](
        key_cache, value_cache, table, into[0], into[1], end, count,
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
        BLOCK_SIZE=block_size, D=head_dim, D_PAD=triton.next_power_of_2(head_dim), TOKENS=TILE,
    )  # fmt: skip


def gather_into_reference(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, end: int, into: Tensor
) -> None:
    """:func:`gather_into_triton` with PyTorch."""
    blocks = table[: -(-end // key_cache.shape[1])]
    into[:, end:] = 0
    for part, cache in zip(into, (key_cache, value_cache), strict=True):
        part[:end] = read(cache, blocks, part.dtype).flatten(0, 1)[:end]


@triton.jit
def _merge_kernel(
    total_ptr, mass_ptr, other_ptr, other_mass_ptr, rows, total_row, total_head, mass_head,
    other_row, other_head, other_mass_head,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    is_row = row < rows
    mask = is_row[:, None] & (d < D)[None, :]
    mass_ptr += head.to(tl.int64) * mass_head + row
    mass = tl.load(mass_ptr, mask=is_row, other=0.0)
    other_mass_ptr += head.to(tl.int64) * other_mass_head + row
    other_mass = tl.load(other_mass_ptr, mask=is_row, other=0.0)
    highest = tl.maximum(mass, other_mass)
    weight, other_weight = tl.exp(mass - highest), tl.exp(other_mass - highest)
    both = weight + other_weight
    total_at = row.to(tl.int64)[:, None] * total_row + head * total_head + d[None, :]
    other_at = row.to(tl.int64)[:, None] * other_row + head * other_head + d[None, :]
    total = tl.load(total_ptr + total_at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + other_at, mask=mask, other=0.0).to(tl.float32)
    merged = total * (weight / both)[:, None] + other * (other_weight / both)[:, None]
    tl.store(total_ptr + total_at, merged.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(mass_ptr, highest + tl.log(both), mask=is_row)


def merge(total: Tensor, mass: Tensor, other: Tensor, other_mass: Tensor) -> None:
    """Make ``total`` [Q, H, D] and its log-sum-exp ``mass`` fp32 [H, Q], from attention to some
    keys, those from these and others, of which there are ``other`` and ``other_mass``."""
    if total.is_cuda:
        merge_triton(total, mass, other, other_mass)
    else:
        merge_reference(total, mass, other, other_mass)


def merge_triton(total: Tensor, mass: Tensor, other: Tensor, other_mass: Tensor) -> None:
    """:func:`merge` in one kernel; the last dimensions are contiguous."""
    rows, heads, head_dim = total.shape
    _merge_kernel[(triton.cdiv(rows, TILE), heads)](
        total, mass, other, other_mass, rows, total.stride(0), total.stride(1), mass.stride(0),
        other.stride(0), other.stride(1), other_mass.stride(0),
        D=head_dim, D_PAD=triton.next_power_of_2(head_dim), ROWS=TILE,
    )  # fmt: skip


def merge_reference(total: Tensor, mass: Tensor, other: Tensor, other_mass: Tensor) -> None:
    """:func:`merge` with PyTorch."""
    both = torch.logaddexp(mass, other_mass)
    weights = [torch.exp(each - both).t()[:, :, None] for each in (mass, other_mass)]
    total.copy_(total.float() * weights[0] + other.float() * weights[1])
    mass.copy_(both)
