"""How ``attention.cu`` and ``embed.cu`` are cut up and called."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import kernel
from megatron_async.kernels.gemm.tilings import LAYER_NORM, MULTIPROCESSORS, padded

WARPS = 4
MOST_ELEMENTS = 3600
"""Of a group's heads: with more, the sums of so many warps do not fit, and half as many do it."""
STAGES = 2
LEAST_BYTES = 78 * 1024
"""Two blocks beside each other on a multiprocessor, not three."""
MAX_SPLITS = 8
"""The most blocks of a cluster that every GPU of this capability runs."""
PIECE_TOKENS = 8192
"""A row of more tokens a block is cut into pieces; a multiple of 16."""
WIDE_PIECE_TOKENS = 1024
"""So where the batch has more rows than a warp has lanes: their pieces fill the GPU anyhow, and
short ones end together."""
MOST_PIECES = 32
"""Of a row: of a longer one the pieces are longer. Their weights take the place of a head."""
LANES = 32
MOST_ROWS = LANES * LANES
"""Of a batch: each lane of a warp looks after some when it searches for a piece."""
BLOCKS_PER_MULTIPROCESSOR = 2
"""As many fit beside each other: more would come in a second wave."""


def unsupported(head_dim: int, group: int, block_size: int, rotated: int) -> str | None:
    """Why the attention kernel does not take this shape; None if it does.

    ``rotated`` elements of each head are rotated.
    """
    if head_dim % 16 or not MOST_PIECES <= head_dim <= 256:
        return f"head dimension {head_dim} is not a multiple of 16 from {MOST_PIECES} to 256"
    if group > 16:
        return f"{group} query heads share a KV head, more than 16"
    if block_size % 16:
        return f"block size {block_size} is not a multiple of 16"
    if rotated not in (0, head_dim):
        return f"{rotated} of {head_dim} elements of a head are rotated, not all or none"
    return None


def splits_of(rows: int, kv_heads: int) -> int:
    """Blocks that share the tokens of a row: a power of two that fills the GPU."""
    wanted = BLOCKS_PER_MULTIPROCESSOR * MULTIPROCESSORS // (rows * kv_heads)
    return min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def pieces_of(tokens: int, splits: int, piece_tokens: int) -> int:
    """Into how many pieces a row of so many tokens is cut."""
    return min(MOST_PIECES, -(-tokens // (piece_tokens * splits)))


class Heads(NamedTuple):
    """What the attention of a model's layers is like: ``group`` query heads of each KV head, norms
    of heads, rotation."""

    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    norm: bool
    rope: bool

    def defines(
        self, rows: int, capacity: int, *, splits: int | None = None,
        piece_tokens: int | None = None,
    ) -> dict[str, int]:  # fmt: skip
        """Macros of ``attention.cu`` for padded ``rows`` of up to ``capacity`` tokens."""
        splits = splits or splits_of(rows, self.kv_heads)
        if piece_tokens is None:
            piece_tokens = PIECE_TOKENS if rows <= LANES else WIDE_PIECE_TOKENS
        lane_rows = 1 << (-(-rows // LANES) - 1).bit_length()
        most_pieces = MOST_PIECES
        if rows > LANES:  # what they leave between them takes memory for each row
            needed = pieces_of(capacity, splits, piece_tokens)
            most_pieces = 1 << (needed - 1).bit_length()
        warps = WARPS if self.head_dim * self.group <= MOST_ELEMENTS else WARPS // 2
        return {
            "D": self.head_dim, "GROUP": self.group, "KV_HEADS": self.kv_heads,
            "BLOCK": self.block_size, "NORM": int(self.norm), "ROPE": int(self.rope),
            "SPLITS": splits, "WARPS": warps, "ST": STAGES, "LEAST": LEAST_BYTES,
            "PIECE": piece_tokens, "MOST_PIECES": most_pieces, "LANE_ROWS": lane_rows,
        }  # fmt: skip


def heads_of(
    packed: Tensor,
    kv_cache: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> Heads | None:
    """What the kernel takes a decode step's packed projection as; None if it does not take it.

    Args:
        packed: ``[R, kv_heads * (group + 2) * head_dim]``.
        kv_cache: ``[layers, 2, blocks, block_size, kv_heads, head_dim]``.
        cos_sin: fp32 ``[positions, 2, pairs]``.
    """
    rows, width = packed.shape
    block_size, kv_heads, head_dim = kv_cache.shape[3:]
    tensors = (packed, kv_cache, q_weight, k_weight)
    if any(x is not None and x.dtype != torch.bfloat16 for x in tensors) or rows > MOST_ROWS:
        return None
    group = width // (kv_heads * head_dim) - 2
    rotated = 0 if cos_sin is None else 2 * cos_sin.shape[2]
    if (
        cuda.unavailable(packed.device.index or 0) is not None
        or unsupported(head_dim, group, block_size, rotated) is not None
    ):
        return None
    return Heads(head_dim, group, kv_heads, block_size, q_weight is not None, cos_sin is not None)


class DecodeAttention:
    """Decode attention of one model's layers, see ``attention.cu``.

    Args:
        rows, capacity: of a batch, and tokens of a row, at most.
        splits: blocks that share the tokens of a row, or of a piece of it; None fills the GPU.
        piece_tokens: a row of more tokens for each of its blocks is cut into pieces.
        beside: another one on the same stream, whose ``scratch`` is shared if it is large enough.
    """

    def __init__(
        self,
        heads: Heads,
        rows: int,
        capacity: int,
        device: torch.device,
        *,
        splits: int | None = None,
        piece_tokens: int | None = None,
        beside: DecodeAttention | None = None,
    ) -> None:
        defines = heads.defines(rows, capacity, splits=splits, piece_tokens=piece_tokens)
        self._splits = defines["SPLITS"]
        self._kernel = kernel("attention", defines, device)
        pieces = pieces_of(capacity, self._splits, defines["PIECE"])
        at_once = max(1, BLOCKS_PER_MULTIPROCESSOR * MULTIPROCESSORS // self._splits)
        self._clusters = min(at_once, rows * heads.kv_heads * pieces)
        parts = rows * heads.kv_heads * heads.group * defines["MOST_PIECES"] if pieces > 1 else 0
        sizes = (parts * heads.head_dim, parts * 2, rows * heads.kv_heads + 1)
        self.scratch: tuple[Tensor, Tensor, Tensor]
        """What the pieces of each row and head leave for the last of them: sums, statistics, and
        how many are done (none between launches); behind these how many pieces are taken."""
        if beside is not None and all(
            tensor.numel() >= size for tensor, size in zip(beside.scratch, sizes, strict=True)
        ):
            self.scratch = beside.scratch
        else:
            self.scratch = (
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
    ) -> None:
        """Append the tokens' keys and values and attend: all bfloat16, contiguous.

        Args:
            qkv: ``[R, kv_heads * (group + 2) * head_dim]`` in megatron's order.
            keys, values: ``[blocks, block_size, kv_heads, head_dim]`` of one layer.
            block_table: int64 ``[slots, columns]``.
            slots, position_ids, slot_mapping: int64 ``[R]``.
            out: ``[R, kv_heads * group * head_dim]``.
            cos_sin: fp32 ``[positions, 2, head_dim / 2]``.
        """
        self._kernel.launch(
            (self._splits * self._clusters, 1, 1), qkv, keys, values, block_table,
            block_table.stride(0), slots, position_ids, slot_mapping, cos_sin, q_weight, k_weight,
            float(eps), float(scale * 1.4426950408889634), out, qkv.shape[0], *self.scratch,
        )  # fmt: skip


class DecodeAttentions:
    """:class:`DecodeAttention` for batches of all sizes on one stream; they share their scratch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[Heads, int, int], DecodeAttention] = {}

    def get(self, heads: Heads, rows: int, capacity: int) -> DecodeAttention:
        """The one for ``rows`` of up to ``capacity`` tokens, made at its first use: the largest
        first saves memory."""
        key = heads, padded(rows), capacity
        if key not in self._made:
            first = next(iter(self._made.values()), None)
            self._made[key] = DecodeAttention(*key, self._device, beside=first)
        return self._made[key]


class Embed:
    """Token and position embeddings into the residual stream, with its partial statistics."""

    def __init__(
        self, hidden: int, per_tile: int, norm: int, *, positions: bool, device: torch.device
    ) -> None:
        self._kernel = kernel(
            "embed",
            {
                "H": hidden, "PER_TILE": per_tile, "POSITIONS": int(positions),
                "STATS": LAYER_NORM if norm == LAYER_NORM else 1,
            },
            device,
        )  # fmt: skip

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        table: Tensor,
        positions: Tensor | None,
        hidden: Tensor,
        statistics: Tensor,
        scaled: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """``hidden [R, H] = table[token_ids] + positions[position_ids]``.

        With RMSNorm ``scaled`` is its weight and where ``hidden`` times that goes.
        """
        next_weight, out = scaled or (None, None)
        self._kernel.launch(
            (token_ids.shape[0], 1, 1), token_ids, position_ids, table, positions, hidden,
            next_weight, out, statistics,
        )  # fmt: skip
