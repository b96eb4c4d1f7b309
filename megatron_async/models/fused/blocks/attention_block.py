"""A layer's attention in three kernels.

QKV projection (norm inside) -> attention (norms of heads, rotation, append inside) -> output
projection (adds to the residual stream)

Windows of drafts are rows of several tokens. The GEMMs see all tokens as rows. The attention reads
a row's keys and values once for its window; shapes that it does not take, and steps whose tokens
come in another way, go to ``context.attend_packed``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.decode_attention import DecodeAttentions, Heads
from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.kernels.gemm.tile_config import STORE, padded
from megatron_async.models.fused.blocks.gemms import SkinnyGemms, Work, missing
from megatron_async.models.fused.blocks.kernel_parameters import norm_kind, norm_of
from megatron_async.models.fused.blocks.linears import ColumnParallel, RowParallel
from megatron_async.models.fused.blocks.rank_sums import RankSums
from megatron_async.models.fused.blocks.residual import HALF, Norm, Step

logger = logging.getLogger(__name__)


@functools.cache
def _log_no_windows(reason: str) -> None:
    logger.info("windows of drafts are appended first and attended token by token: %s", reason)


class AttentionBlock:
    """Input norm, QKV projection, attention, output projection, residual addition of one layer.

    Args:
        layer: one that ``coverage.attention_why_not`` has nothing against.
        rotary: cosines and sines fp32 ``[positions, 2, pairs]``; None for no rotation.
        sums: over the ranks that share the heads; None for one rank.
        where: it leaves statistics.
    """

    def __init__(
        self,
        layer: Any,
        rotary: Tensor | None,
        gemms: SkinnyGemms,
        attentions: DecodeAttentions,
        sums: RankSums | None = None,
        where: int = HALF,
    ) -> None:
        attention = layer.self_attention
        self.norm: Norm = norm_of(layer.input_layernorm)
        self._index: int = attention.layer_index
        self._scale: float = attention.softmax_scale
        self._limits: dict[str, Any] = attention.attend_options
        self._rotary = rotary
        self._head_dim: int = attention.hidden_size_per_attention_head
        self._heads: int = attention.num_attention_heads_per_partition
        self._kv_heads: int = attention.num_query_groups_per_partition
        q_norm, k_norm = attention.q_layernorm, attention.k_layernorm
        self._head_norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)
        if norm_kind(q_norm) is not None:
            self._head_norms = (q_norm.weight, k_norm.weight, q_norm.eps)
        self._kernels, self._attentions = gemms, attentions
        self._qkv = ColumnParallel(
            "qkv", attention.linear_qkv, gemms, self.norm, STORE, layer.layer_number
        )
        self._projection = RowParallel(
            "projection", attention.linear_proj, gemms, where, sums, layer.layer_number
        )
        self._gemms = {"qkv": self._qkv.gemm, "projection": self._projection.gemm}

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows`` in such a context; None if it does."""
        return self._unsupported(context) or self._gemms_why_not(rows, context)

    def _gemms_why_not(self, rows: int, context: Any) -> str | None:
        return self._projection.why_not(rows, context) or missing(self._gemms, rows)

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add the layer's attention to the residual stream.

        Args:
            given: the statistics of the stream.
            reader: the norm that reads the stream next; None for a module.

        Returns:
            The statistics for the reader.
        """
        residual, context = step.residual, step.context
        rows = residual.hidden.shape[0]
        buffer = residual.workspace.buffer
        qkv = buffer("qkv", self._qkv.gemm.n)[:rows]
        attended = buffer("attended", self._heads * self._head_dim)[:rows]
        self._qkv(residual, given, qkv)
        q_weight, k_weight, eps = self._head_norms
        window = context.window
        if window is None or rows % window or self._unsupported(context, window) is not None:
            out = context.attend_packed(
                self._index, qkv, self._scale, self._rotary, q_weight, k_weight, eps,
                **self._limits,
            )  # fmt: skip
            return self._projection(out.flatten(1), residual, reader, context)
        keys, values = context.kv_cache[self._index]
        heads = self._heads_in(context, window, gaps=context.has_gaps)
        self._attentions.get(heads, rows // window, capacity(context))(
            qkv, keys, values, context.block_table, context.token_slots, step.position_ids,
            context.slot_mapping, attended, scale=self._scale, cos_sin=self._rotary,
            q_weight=q_weight, k_weight=k_weight, eps=eps,
            scales=None if context.scales is None else context.scales[self._index],
            sinks=self._limits.get("sinks"),
        )  # fmt: skip
        return self._projection(attended, residual, reader, context)

    def work(
        self, rows: int, context: Any, reader: Norm | None, window: int | None = None
    ) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens. A step of more of them than the GEMMs take has its
        attention in the same kernel (``runner/memory/cache_attention.py``), so that comes by
        itself.

        Args:
            window: tokens of each row when MTP layers draft; None for decode steps.
        """
        if self._unsupported(context) is not None:
            return
        gaps, most = window is not None, padded(rows)
        window = window or tokens_of_row(context)
        reason = self._unsupported(context, window)
        if reason is None:
            heads, gemms = self._heads_in(context, window, gaps=gaps), self._kernels
            macros = heads.defines(
                padded(rows // window), capacity(context), gemms.sm_count, limit=gemms.limit
            )
            yield "attention", macros
        else:
            _log_no_windows(reason)
        if self._gemms_why_not(most, context) is None:
            yield from self._qkv.work(most)
            yield from self._projection.work(most, reader, context)

    def _unsupported(self, context: Any, window: int = 1) -> str | None:
        rotated = 0 if self._rotary is None else 2 * self._rotary.shape[2]
        group = self._heads // self._kv_heads
        return decode_attention.unsupported(
            self._head_dim, group, context.block_size_tokens, rotated, window, self._kernels.limit
        )

    def _heads_in(self, context: Any, window: int, *, gaps: bool) -> Heads:
        return Heads(
            self._head_dim, self._heads // self._kv_heads, self._kv_heads,
            context.block_size_tokens, self._head_norms[0] is not None, self._rotary is not None,
            window, gaps and window > 1, e4m3=context.kv_cache.dtype == E4M3,
        ).limited(self._limits)  # fmt: skip


def tokens_of_row(context: Any) -> int:
    """Most tokens that a row brings to a decode step of such a context."""
    return 1 + int(context.num_speculative_tokens)


def capacity(context: Any) -> int:
    """Tokens that a row may have."""
    tokens: int = context.block_table.shape[1] * context.block_size_tokens
    return tokens
