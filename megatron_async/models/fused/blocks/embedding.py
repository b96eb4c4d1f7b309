"""The embedding: token and position embeddings, and the first statistics, in one kernel. Ranks that
share the vocabulary look up their own part of it, and their sum begins the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import LAYER_NORM, MAX_ROWS, STAGE_K, padded
from megatron_async.kernels.norm.embed import Embed, EmbedShare, embed_macros
from megatron_async.models.fused.blocks.gemms import Work
from megatron_async.models.fused.blocks.mlp_block import MlpBlock
from megatron_async.models.fused.blocks.moe_block import MoeBlock
from megatron_async.models.fused.blocks.rank_sums import RankSums
from megatron_async.models.fused.blocks.residual import LAYER, Norm, Step


class EmbeddingBlock:
    """Token and position embeddings into the residual stream.

    Args:
        model: one that ``coverage.embedding_why_not`` has nothing against.
        like: a block whose statistics at the end of a layer set the size of those here, so that a
            reader of both is compiled once; None takes tiles of :data:`STAGE_K`.
    """

    norm: Norm | None = None

    def __init__(
        self, model: Any, device: torch.device, like: MlpBlock | MoeBlock | None = None
    ) -> None:
        self._embedding = model.embedding
        self._has_positions = model.position_embedding_type == "learned_absolute"
        self._hidden_size: int = model.config.hidden_size
        self._device, self._like = device, like
        self._kernels: dict[tuple[int, int], Embed] = {}

    def why_not(self, rows: int, context: Any) -> str | None:
        """Return None: it runs for all rows."""
        return None

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Begin the residual stream; returns the statistics for the reader."""
        residual = step.residual
        per_tile, kind = self._per_tile(residual.hidden.shape[0]), _kind(reader)
        if (per_tile, kind) not in self._kernels:
            self._kernels[per_tile, kind] = Embed(
                self._hidden_size, per_tile, kind, positions=self._has_positions,
                device=self._device,
            )  # fmt: skip
        statistics = residual.statistics(LAYER, per_tile)
        embedding = self._embedding
        self._kernels[per_tile, kind](
            step.token_ids,
            step.position_ids,
            embedding.word_embeddings.weight,
            embedding.position_embeddings.weight if self._has_positions else None,
            residual.hidden,
            statistics,
            residual.scaled_for(reader),
        )
        return statistics if reader is not None else None

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens."""
        if rows <= MAX_ROWS:
            per_tile, positions = self._per_tile(rows), self._has_positions
            macros = embed_macros(self._hidden_size, per_tile, _kind(reader), positions=positions)
            yield "embed", macros

    def _per_tile(self, rows: int) -> int:
        return (self._like and self._like.statistic_rows(rows)) or STAGE_K


def _kind(reader: Norm | None) -> int:
    return LAYER_NORM if reader is None else reader.kind


class SharedEmbeddingBlock:
    """The embedding of a vocabulary that several ranks share.

    Args:
        model: one that ``coverage.embedding_why_not`` has nothing against.
        sums: over these ranks.
    """

    norm: Norm | None = None

    def __init__(self, model: Any, device: torch.device, sums: RankSums) -> None:
        self._embedding, self._sums = model.embedding, sums
        self._has_positions = model.position_embedding_type == "learned_absolute"
        self._first_id: int = model.embedding.word_embeddings.vocab_start_index
        self._kernel = EmbedShare(
            model.config.hidden_size, positions=self._has_positions, device=device
        )

    def why_not(self, rows: int, context: Any) -> str | None:
        """Return None: it runs for all rows."""
        return None

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Begin the residual stream; returns the statistics for the reader."""
        residual, embedding = step.residual, self._embedding
        partial = self._sums.partial(residual)
        self._kernel(
            step.token_ids,
            step.position_ids,
            embedding.word_embeddings.weight,
            embedding.position_embeddings.weight if self._has_positions else None,
            residual.hidden,
            partial,
            self._first_id,
        )
        return self._sums.add(partial, None, residual, reader, LAYER)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens."""
        return self._sums.work(padded(rows), reader)
