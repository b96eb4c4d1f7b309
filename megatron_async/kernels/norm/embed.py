"""Token and position embeddings, with what the first norm needs of them: how ``embed.cu`` is
called."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.compile import Bf16, Fp32, Int64, kernel
from megatron_async.kernels.gemm.tile_config import LAYER_NORM


class EmbedArguments(NamedTuple):
    """Parameters of ``embed.cu``, in order."""

    token_ids: Int64
    position_ids: Int64
    table: Bf16
    positions: Bf16 | None
    hidden: Bf16
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32


def embed_macros(hidden: int, per_tile: int, norm: int, *, positions: bool) -> dict[str, int]:
    """What ``embed.cu`` is compiled with; for the arguments see :class:`Embed`."""
    return {
        "H": hidden, "PER_TILE": per_tile, "POSITIONS": int(positions),
        "STATS": LAYER_NORM if norm == LAYER_NORM else 1,
    }  # fmt: skip


class Embed:
    """Token and position embeddings into the residual stream, with its partial statistics.

    Args:
        per_tile: elements of a partial statistic.
        norm: ``RMS_NORM`` or ``LAYER_NORM``, that reads them.
        positions: whether there are learned position embeddings.
    """

    def __init__(
        self, hidden: int, per_tile: int, norm: int, *, positions: bool, device: torch.device
    ) -> None:
        macros = embed_macros(hidden, per_tile, norm, positions=positions)
        self._kernel = kernel("embed", macros, device)

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
        arguments = EmbedArguments(
            token_ids, position_ids, table, positions, hidden, next_weight, out, statistics
        )
        self._kernel.launch((token_ids.shape[0], 1, 1), arguments)


class EmbedShareArguments(NamedTuple):
    """Parameters of ``embed_share.cu``, in order."""

    token_ids: Int64
    position_ids: Int64
    table: Bf16
    positions: Bf16 | None
    hidden: Bf16
    partial: Bf16
    first_id: int
    id_count: int


class EmbedShare:
    """Token embeddings of a rank's share of the vocabulary, which the ranks still have to add up.

    Args:
        positions: whether there are learned position embeddings.
    """

    def __init__(self, hidden: int, *, positions: bool, device: torch.device) -> None:
        macros = {"H": hidden, "POSITIONS": int(positions)}
        self._kernel = kernel("embed_share", macros, device)

    def __call__(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        table: Tensor,
        positions: Tensor | None,
        hidden: Tensor,
        partial: Tensor,
        first_id: int,
    ) -> None:
        """``partial [R, H] = table[token_ids - first_id]``, zeros for ids that others have, and
        ``hidden [R, H] = positions[position_ids]``, zeros without positions.

        Args:
            table: bfloat16 ``[C, H]``, the rows of the ids from ``first_id`` on.
        """
        arguments = EmbedShareArguments(
            token_ids, position_ids, table, positions, hidden, partial, first_id, len(table)
        )
        self._kernel.launch((token_ids.shape[0], 1, 1), arguments)
