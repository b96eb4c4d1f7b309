"""Decode attention in one kernel: how ``attention.cu`` is built and called."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention.decode_arguments import (
    AttentionArguments,
    E4m3AttentionArguments,
    SinkArguments,
)
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.compile import kernel
from megatron_async.kernels.gemm.tile_config import MAX_CLUSTER, padded
from megatron_async.kernels.shared_memory import HOPPER_BYTES, STATIC_BYTES, block_limit

WARPS = 4
LEAST_WARPS = 2
"""Where more do not fit."""
WARPS_OF_FEW = 8
"""Where CTAs come to no more than a quarter of the SMs, and each row has one token."""
MAX_ELEMENTS = 3600
"""Elements of a group's heads: with more, only half as many warps have room for their sums."""
STAGES = 2
"""Tiles of a warp that are on their way; twice as many of e4m3, which take as much memory."""
MIN_SHARED_BYTES = 78 * 1024
"""Two CTAs on an SM, not three."""
CTAS_PER_SM = 2
"""As many fit: more would come in a second wave."""
SPLIT_TOKENS = 8192
"""A row of more tokens a CTA is divided into KV splits; a multiple of 16."""
WIDE_SPLIT_TOKENS = 1024
"""So where the batch has more rows than a warp has lanes: their splits fill the GPU anyhow, and
short ones end together."""
MAX_SPLITS = 32
"""Splits of a row: those of a longer one are longer. Their weights take the place of a head."""
LANES = 32
MOST_ROWS = LANES * LANES
"""Rows of a batch: each lane of a warp handles several when it looks for a split."""
FUSED_WINDOWS = True
"""Whether the kernel takes windows of several tokens a row. If not, as in tests, keys and values of
all tokens are appended first, and each token attends as a row of its own
(``context.attend_packed``)."""
MAX_WINDOW = 16
"""The new tokens of a row are one tile."""
TILE = 16
"""Tokens that a warp takes at once."""
MAX_QUERIES = 32
"""Queries of an item, heads times tokens of a window: a warp's sums of them fit into its ring."""


def unsupported(
    head_dim: int,
    group: int,
    block_size: int,
    rotated: int,
    window: int = 1,
    limit: int = HOPPER_BYTES,
) -> str | None:
    """Why the attention kernel does not take this shape; None if it does.

    ``rotated`` elements of each head are rotated. Each row has ``window`` tokens. CTAs have
    ``limit`` bytes of shared memory.
    """
    if head_dim % 16 or not MAX_SPLITS <= head_dim <= 256:
        return f"head dimension {head_dim} is not a multiple of 16 from {MAX_SPLITS} to 256"
    if group > 16:
        return f"{group} query heads share a KV head, more than 16"
    if block_size % 16:
        return f"block size {block_size} is not a multiple of 16"
    if rotated not in (0, head_dim):
        return f"{rotated} of {head_dim} elements of a head are rotated, not all or none"
    if window > 1 and not FUSED_WINDOWS:
        return "windows of several tokens are turned off"
    if window > MAX_WINDOW:
        return f"a window has {window} tokens, more than {MAX_WINDOW}"
    if window > 1 and not _takes(head_dim, window):
        return f"a window of {window} tokens of heads of {head_dim} elements does not fit"
    needed = _least_bytes(head_dim, group, window)
    if needed > limit:
        return f"{group} heads of {head_dim} take {needed} of {limit} bytes of shared memory"
    return None


def shared_bytes(macros: Mapping[str, int]) -> int:
    """What a CTA of ``attention.cu`` with these macros takes, as its source says it."""
    dim, warps, window, cluster = (macros[name] for name in ("D", "WARPS", "WINDOW", "CLUSTER"))
    padded_dim = 64 if dim <= 64 else 128 if dim <= 128 else 256
    row = padded_dim * (2 - macros.get("E4M3", 0))
    rings = warps * macros["ST"] * 2 * TILE * row
    queries = window * macros["GROUP"] // macros["SHARES"]
    new_rows = 16 if window > 8 else 8 if window > 4 else 4 if window > 2 else window
    query_rows = (-(-queries // 8) + 1) // 2 * 16
    parts_at = rings + 2 * new_rows * row + query_rows * (2 * padded_dim + 16)
    parts, sums = warps * queries * dim * 4, queries * dim * 8 if cluster > 1 else 0
    room = (96 if macros["LANE_ROWS"] > 1 else 72) * 1024
    if window > 1 and rings + parts + sums > room:
        parts = 0  # in the rings
    before = parts_at + parts + warps * queries * 8 + queries * macros["MAX_SPLITS"] * 4
    sent_at = -(-(before + 16 + (window * 4 if window > 1 else 0)) // 16) * 16
    own_quads = -(-queries * dim // 4 // cluster)
    sent = cluster * own_quads * 16 + cluster * queries * 8
    return max(sent_at + (2 * sent if cluster > 1 else 0) + 16, macros["MIN_SHARED"])


@functools.cache
def _least_bytes(head_dim: int, group: int, window: int) -> int:
    """What the fewest warps take for any number of rows."""
    heads = Heads(head_dim, group, 1, TILE, norm=False, rope=False, window=window)
    return max(
        shared_bytes(heads.macros(LEAST_WARPS, cluster, MAX_SPLITS, lane_rows))
        for cluster, lane_rows in itertools.product((1, MAX_CLUSTER), (1, LANES))
    )


def _takes(head_dim: int, queries: int) -> bool:
    """Whether an item may have ``queries`` queries: heads of each token of a window."""
    return queries <= MAX_QUERIES and head_dim * queries <= MAX_ELEMENTS


def head_shares(head_dim: int, group: int, window: int) -> int:
    """Into how many items the heads of a group are divided, so that a window's queries fit; each
    reads the keys and values."""
    if window == 1:
        return 1
    shares = (n for n in range(1, group + 1) if group % n == 0)
    return next(n for n in shares if _takes(head_dim, group // n * window))


def cluster_size(rows: int, items: int, sm_count: int) -> int:
    """Return how many CTAs share the tokens of a row of ``items`` items: a power of two that fills
    the GPU."""
    wanted = CTAS_PER_SM * sm_count // (rows * items)
    return min(MAX_CLUSTER, 1 << max(0, wanted.bit_length() - 1))


def kv_splits(tokens: int, cluster: int, split_tokens: int) -> int:
    """Return into how many KV splits a row of ``tokens`` tokens is divided."""
    return min(MAX_SPLITS, -(-tokens // (split_tokens * cluster)))


class Heads(NamedTuple):
    """What the attention of a model's layers is like: ``group`` query heads of each KV head, norms
    of heads, rotation; ``window`` tokens of each row, and ``gaps`` where there may be padding in
    front of them too. A query sees the last ``sliding_window`` tokens, its own included, and its
    scores are capped at ``soft_cap``; 0 is without. With ``sinks`` each query head has one more
    score, of a token without a value. Layers of one model may differ in these. With ``e4m3`` the
    cache is of that (``e4m3_cache.py``)."""

    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    norm: bool
    rope: bool
    window: int = 1
    gaps: bool = False
    sliding_window: int = 0
    soft_cap: float = 0.0
    e4m3: bool = False
    sinks: bool = False

    def limited(self, limits: Mapping[str, Any]) -> Heads:
        """The heads with a layer's ``window``, ``soft_cap`` and ``sinks``
        (``models/layers/attention.py``)."""
        return self._replace(
            sliding_window=limits.get("window", 0), soft_cap=float(limits.get("soft_cap", 0.0)),
            sinks="sinks" in limits,
        )  # fmt: skip

    def read_tokens(self, capacity: int) -> int:
        """Most tokens that the tiles have which a row of up to ``capacity`` tokens reads."""
        if not self.sliding_window:
            return capacity
        return min(capacity, self.sliding_window + 2 * TILE)

    @property
    def shares(self) -> int:
        """Items of a KV head, see :func:`head_shares`."""
        return head_shares(self.head_dim, self.group, self.window)

    def _fits(self, warps: int, limit: int) -> bool:
        """Whether the rings and sums of ``warps`` warps fit, in a row of one token."""
        padded_dim = 64 if self.head_dim <= 64 else 128 if self.head_dim <= 128 else 256
        ring, sums = STAGES * 2 * TILE * padded_dim * 2, self.group * self.head_dim * 4
        return warps * (ring + sums) + 16 * self.group * self.head_dim + 8192 <= limit

    def macros(self, warps: int, cluster: int, max_splits: int, lane_rows: int) -> dict[str, int]:
        """Macros of ``attention.cu`` that say what it takes of shared memory at least."""
        return {
            "D": self.head_dim, "GROUP": self.group, "SHARES": self.shares, "WINDOW": self.window,
            "WARPS": warps, "ST": STAGES * (1 + self.e4m3), "CLUSTER": cluster,
            "MAX_SPLITS": max_splits, "LANE_ROWS": lane_rows, "MIN_SHARED": 0,
            **({"E4M3": 1} if self.e4m3 else {}),
            **({"SINKS": 1} if self.sinks else {}),
        }  # fmt: skip

    def defines(
        self, rows: int, capacity: int, sm_count: int, *, cluster: int | None = None,
        split_tokens: int | None = None, limit: int = HOPPER_BYTES,
    ) -> dict[str, int]:  # fmt: skip
        """Macros of ``attention.cu`` for padded ``rows`` of up to ``capacity`` tokens, on a GPU
        whose CTAs have ``limit`` bytes of shared memory."""
        cluster = cluster or cluster_size(rows, self.kv_heads * self.shares, sm_count)
        if split_tokens is None:
            split_tokens = SPLIT_TOKENS if rows <= LANES else WIDE_SPLIT_TOKENS
        lane_rows = 1 << (-(-rows // LANES) - 1).bit_length()
        max_splits = MAX_SPLITS
        if rows > LANES:  # their partial sums take memory for each row
            needed = kv_splits(self.read_tokens(capacity), cluster, split_tokens)
            max_splits = 1 << (needed - 1).bit_length()
        queries = self.group // self.shares * self.window
        warps = WARPS if self.head_dim * queries <= MAX_ELEMENTS else WARPS // 2
        ctas = rows * self.kv_heads * self.shares * cluster
        if self.window == 1 and 4 * ctas <= sm_count and self._fits(WARPS_OF_FEW, limit):
            warps = WARPS_OF_FEW
        found = self.macros(warps, cluster, max_splits, lane_rows)
        while shared_bytes(found) > limit and warps > LEAST_WARPS:
            warps = max(LEAST_WARPS, warps // 2)
            found = self.macros(warps, cluster, max_splits, lane_rows)
        return {
            **found,
            "KV_HEADS": self.kv_heads, "BLOCK": self.block_size, "NORM": int(self.norm),
            "ROPE": int(self.rope), "GAPS": int(self.gaps), "SPLIT_TOKENS": split_tokens,
            "MIN_SHARED": min(MIN_SHARED_BYTES, limit - STATIC_BYTES),
            # A row that is never longer than its window takes the kernel without one.
            "SLIDING_WINDOW": self.sliding_window if self.sliding_window < capacity else 0,
            "SOFT_CAP": int.from_bytes(struct.pack("<f", self.soft_cap), "little"),
        }  # fmt: skip


def heads_of(
    packed: Tensor,
    kv_cache: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    window: int = 1,
    *,
    gaps: bool = False,
    limits: Mapping[str, Any] | None = None,
) -> Heads | None:
    """What the kernel takes a decode step's packed projection as; None if it does not take it.

    Args:
        packed: ``[R * window, kv_heads * (group + 2) * head_dim]``.
        kv_cache: ``[layers, 2, blocks, block_size, kv_heads, head_dim]``, bfloat16 or e4m3.
        cos_sin: fp32 ``[positions, 2, pairs]``.
        window, gaps: tokens of each row, see :class:`Heads`.
        limits: ``window``, ``soft_cap`` and ``sinks`` of a layer that has them.
    """
    limits = limits or {}
    tokens, width = packed.shape
    block_size, kv_heads, head_dim = kv_cache.shape[3:]
    tensors = (packed, q_weight, k_weight, limits.get("sinks"))
    if any(x is not None and x.dtype != torch.bfloat16 for x in tensors):
        return None
    if kv_cache.dtype not in (torch.bfloat16, E4M3):
        return None
    if tokens % window or tokens // window > MOST_ROWS:
        return None
    group = width // (kv_heads * head_dim) - 2
    rotated = 0 if cos_sin is None else 2 * cos_sin.shape[2]
    if (
        cuda.unavailable(packed.device.index or 0) is not None
        or unsupported(head_dim, group, block_size, rotated, window, block_limit(packed.device))
        is not None
    ):
        return None
    return Heads(
        head_dim, group, kv_heads, block_size, q_weight is not None, cos_sin is not None, window,
        gaps and window > 1, e4m3=kv_cache.dtype == E4M3,
    ).limited(limits)  # fmt: skip


class DecodeAttention:
    """Decode attention of one model's layers, see ``attention.cu``.

    Args:
        rows, capacity: of a batch, and tokens of a row, at most.
        cluster: CTAs that share the tokens of a row, or of a KV split of it; None fills the GPU.
        split_tokens: a row of more tokens for each of its CTAs is divided into KV splits.
        share_with: another one on the same stream, whose ``workspace`` is used if it is large
            enough.
    """

    def __init__(
        self,
        heads: Heads,
        rows: int,
        capacity: int,
        device: torch.device,
        *,
        cluster: int | None = None,
        split_tokens: int | None = None,
        share_with: DecodeAttention | None = None,
    ) -> None:
        sm_count = cuda.sm_count(device.index or 0)
        macros = heads.defines(
            rows, capacity, sm_count,
            cluster=cluster, split_tokens=split_tokens, limit=block_limit(device),
        )  # fmt: skip
        self._cluster = macros["CLUSTER"]
        self._kernel = kernel("attention", macros, device)
        read = heads.read_tokens(capacity)
        splits = kv_splits(read, self._cluster, macros["SPLIT_TOKENS"])
        resident = max(1, CTAS_PER_SM * sm_count // self._cluster)
        self._window, self._has_sinks = heads.window, heads.sinks
        items = rows * heads.kv_heads * heads.shares
        self._clusters = min(resident, items * splits)
        queries = rows * heads.kv_heads * heads.group * heads.window
        parts = queries * macros["MAX_SPLITS"] if splits > 1 else 0
        sizes = (parts * heads.head_dim, parts * 2, items + 1)
        self.workspace: tuple[Tensor, Tensor, Tensor]
        """What the KV splits of each row and head leave for the last of them: sums, statistics, and
        how many are done (none between launches); behind these how many splits are taken."""
        if share_with is not None and all(
            tensor.numel() >= size for tensor, size in zip(share_with.workspace, sizes, strict=True)
        ):
            self.workspace = share_with.workspace
        else:
            self.workspace = (
                torch.empty(sizes[0], device=device),
                torch.empty(sizes[1], device=device),
                torch.zeros(sizes[2], dtype=torch.int32, device=device),
            )

    def __call__(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        slots: Tensor,
        position_ids: Tensor,
        slot_mapping: Tensor,
        out: Tensor,
        *,
        scale: float,
        cos_sin: Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
        scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Append the tokens' keys and values and attend: all bfloat16, contiguous.

        With windows T is R * window: those of a row come one after the other, of consecutive
        positions. The last ones may be padding, whose cache slot is in the null block and whose
        position is any that the block table and ``cos_sin`` have; so may be whole rows. With gaps
        the first ones may be padding too, and padding has the null slot, the largest.

        Args:
            qkv: ``[T, kv_heads * (group + 2) * head_dim]`` in megatron's order.
            keys, values: ``[blocks, block_size, kv_heads, head_dim]`` of one layer, or e4m3.
            block_table: int64 ``[slots, columns]``.
            slots, position_ids, slot_mapping: int64 ``[T]``.
            out: ``[T, kv_heads * group * head_dim]``; of padding anything finite.
            cos_sin: fp32 ``[positions, 2, head_dim / 2]``.
            scales: of keys and values in e4m3, contiguous fp32 ``[2, kv_heads]``.
            sinks: ``[kv_heads * group]``, where the heads have them.
        """
        plain = AttentionArguments(
            qkv, keys, values, block_table, block_table.stride(0), slots, position_ids,
            slot_mapping, cos_sin, q_weight, k_weight, float(eps),
            float(scale * 1.4426950408889634), out, qkv.shape[0] // self._window, *self.workspace,
        )  # fmt: skip
        arguments = plain if scales is None else E4m3AttentionArguments(*plain, scales)
        if (sinks is not None) != self._has_sinks:
            raise TypeError("the heads have sinks, or have none: what is given says otherwise")
        records = (arguments,) if sinks is None else (arguments, SinkArguments(sinks))
        self._kernel.launch((self._cluster * self._clusters, 1, 1), *records)


class DecodeAttentions:
    """:class:`DecodeAttention` for batches of all sizes on one stream; they share their
    workspace."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[Heads, int, int], DecodeAttention] = {}

    def get(self, heads: Heads, rows: int, capacity: int) -> DecodeAttention:
        """The one for ``rows`` of up to ``capacity`` tokens, made at its first use: the largest
        first saves memory."""
        key = heads, padded(rows), capacity
        if key not in self._made:
            first = next(iter(self._made.values()), None)
            self._made[key] = DecodeAttention(*key, self._device, share_with=first)
        return self._made[key]
