"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434) whose latents live in the context's cache.

A token's key and value of each head are products of its latent, which all heads share, and of the
head's part of ``linear_kv_up_proj``. With a context nobody computes them: queries are multiplied by
the part for keys first (they are *absorbed*), attend to the latents themselves, and what comes out
is multiplied by the part for values. Without a context keys and values are computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.megatron_compat.specs import LatentAttention
from megatron_async.models.batch import Batch
from megatron_async.models.layers.attention import PagedAttention, packed_lengths
from megatron_async.models.layers.norm import RMSNorm, fusable
from megatron_async.models.layers.rope import apply_rope_to_pairs
from megatron_async.models.quantized.deferred import defer

from megatron.core.tensor_parallel.mappings import (  # isort: skip
    gather_from_tensor_model_parallel_region,
)


class PagedLatentAttention(PagedAttention, LatentAttention):  # type: ignore[misc]
    """Causal multi-latent self-attention: over a whole sequence, or through an inference context.

    Projections and norms are megatron's: ``linear_q_proj``, or ``linear_q_down_proj``,
    ``q_layernorm`` and ``linear_q_up_proj``; ``linear_kv_down_proj``, ``kv_layernorm``,
    ``linear_kv_up_proj``; ``linear_proj``. Rotated pairs are neighbours, as in its checkpoints.

    Attributes:
        given_scale: of a model that its user has built, what megatron multiplies scores by: it
            knows of YaRN, and reads no ``softmax_scale``. None where we build.
    """

    given_scale: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):  # megatron takes no subclass
            if name in self._modules:
                defer(self._modules[name], self.config)

    def _scale(self) -> float:
        if self.given_scale is not None:
            return self.given_scale
        own = getattr(self, "softmax_scale", 1 / math.sqrt(self.q_head_dim))
        return float(own if self.config.softmax_scale is None else self.config.softmax_scale)

    @property
    def latent_rank(self) -> int:
        """Elements of a latent; behind them stands the rotated key of all heads."""
        rank: int = self.config.kv_lora_rank
        return rank

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: Batch | None = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
        sequence_len_offset: Tensor | None = None,
        *,
        inference_params: Batch | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; only ``hidden_states`` and the context are read, the mask is always causal.

        Args:
            hidden_states: without a context ``[S, B, hidden]``, positions 0 to S-1; with one,
                ``[T, 1, hidden]``, see :class:`PagedSelfAttention`.

        Returns:
            The projected output, like ``hidden_states``, and the bias still to be added.

        Raises:
            ConfigError: see :func:`packed_lengths`.
        """
        context = inference_context if inference_context is not None else inference_params
        lengths = None
        if packed_seq_params is not None or attention_bias is not None:
            lengths = packed_lengths(packed_seq_params, attention_bias, hidden_states, context)
        if lengths is not None:
            output = torch.cat([self._causal(part) for part in hidden_states.split(lengths)])
        elif context is None:
            output = self._causal(hidden_states)
        else:
            output = self._with_context(context, hidden_states)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(output.flatten(2))
        return projected

    def _queries(self, hidden_states: Tensor) -> list[Tensor]:
        """``[S, B, heads, ...]``: what is not rotated, and what is to be."""
        config = self.config
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            down = _all_columns(self.linear_q_down_proj(hidden_states)[0], config.q_lora_rank)
            query, _ = self.linear_q_up_proj(self.q_layernorm(down))
        heads = query.unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))
        return list(heads.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1))

    def _latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``[S, B, ...]``: normed latents, and the key of all heads that is to be rotated."""
        sizes = [self.latent_rank, self.config.qk_pos_emb_head_dim]
        both = _all_columns(self.linear_kv_down_proj(hidden_states)[0], sum(sizes))
        latent, key = both.split(sizes, dim=-1)
        return self.kv_layernorm(latent.contiguous()), key

    def _causal(self, hidden_states: Tensor) -> Tensor:
        query, query_rotated = self._queries(hidden_states)
        latent, key_rotated = self._latents(hidden_states)
        key_rotated = key_rotated[:, :, None]
        if self.rotary is not None:
            cos, sin = self.rotary.prefix(hidden_states.shape[0])
            query_rotated = apply_rope_to_pairs(query_rotated, cos, sin)
            key_rotated = apply_rope_to_pairs(key_rotated, cos, sin)
        up, _ = self.linear_kv_up_proj(latent)
        sizes = [self.config.qk_head_dim, self.config.v_head_dim]
        key, value = up.unflatten(-1, (query.shape[2], sum(sizes))).split(sizes, dim=-1)
        key_rotated = key_rotated.expand(-1, -1, query.shape[2], -1)
        query, key = torch.cat((query, query_rotated), -1), torch.cat((key, key_rotated), -1)
        output = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
        )
        return output.permute(2, 0, 1, 3).contiguous()

    def _with_context(self, context: Batch, hidden_states: Tensor) -> Tensor:
        query, query_rotated = (x.squeeze(1) for x in self._queries(hidden_states))
        one_by_one = not query.is_cuda or context.batch_invariant
        weight = self.linear_kv_up_proj.weight.view(query.shape[1], -1, self.latent_rank)
        sizes = [self.config.qk_head_dim, self.config.v_head_dim]
        of_keys, of_values = weight.split(sizes, dim=1)
        cached = self.latent_rank + self.config.qk_pos_emb_head_dim
        absorbed = query.new_empty(*query.shape[:2], cached)
        by_head(query, of_keys, absorbed[..., : self.latent_rank], one_by_one=one_by_one)
        rotated = absorbed[..., self.latent_rank :]
        latent = None
        if self._packs(context, hidden_states):
            self._append_packed(context, hidden_states, query_rotated, rotated)
        else:
            latent = self._rotated(context, hidden_states, query_rotated, rotated)
        output = context.attend_latent(
            self.layer_index, absorbed, latent, self.softmax_scale, self.latent_rank
        )
        values = output.new_empty(*output.shape[:2], self.config.v_head_dim)
        by_head(output, of_values.transpose(1, 2), values, one_by_one=one_by_one)
        return values[:, None]

    def _rotated(self, context: Batch, hidden_states: Tensor, query: Tensor, out: Tensor) -> Tensor:
        """What goes into the cache, ``[T, 1, rank + rotated]``; rotates ``query`` into ``out``."""
        latent, key = (x.squeeze(1)[:, None] for x in self._latents(hidden_states))
        if self.rotary is not None:
            cos, sin = self.rotations(context)
            query, key = (apply_rope_to_pairs(x, cos, sin) for x in (query, key))
        out.copy_(query)
        return torch.cat((latent, key), dim=-1)

    def _packs(self, context: Batch, hidden_states: Tensor) -> bool:
        """Whether one kernel may take the packed projection to the cache."""
        return (
            trial.LATENT
            and fusable(hidden_states)
            and hasattr(context, "append_latent")
            and type(self.kv_layernorm) in (RMSNorm, torch.nn.RMSNorm)
            and self.kv_layernorm.eps is not None
            and self.rotary is not None
            and self.rotary.long is None
        )

    def _append_packed(
        self, context: Any, hidden_states: Tensor, query: Tensor, out: Tensor
    ) -> None:
        """:meth:`_rotated` and the append in one kernel."""
        cached = self.latent_rank + self.config.qk_pos_emb_head_dim
        both = _all_columns(self.linear_kv_down_proj(hidden_states)[0], cached)
        assert self.rotary is not None
        context.append_latent(
            self.layer_index, query, both.squeeze(1), out, self.rotary.cos_sin,
            self.kv_layernorm.weight, self.kv_layernorm.eps,
        )  # fmt: skip


def by_head(x: Tensor, weights: Tensor, out: Tensor, *, one_by_one: bool) -> None:
    """Each head's rows times a matrix of its own: ``[T, heads, n]`` and ``[heads, n, m]`` to
    ``out`` ``[T, heads, m]``; all may be strided.

    Args:
        one_by_one: a GEMM for each head, where a batched one would let a row's bits depend on the
            number of rows.
    """
    if not one_by_one and torch.is_grad_enabled():
        out.copy_(torch.bmm(x.transpose(0, 1), weights).transpose(0, 1))
    elif not one_by_one:
        torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    else:
        for head in range(x.shape[1]):
            out[:, head] = torch.matmul(x[:, head], weights[head])


def _all_columns(x: Tensor, size: int) -> Tensor:
    """``[..., size]`` of a linear layer whose columns may be split over ranks."""
    if x.shape[-1] == size:
        return x
    gathered: Tensor = gather_from_tensor_model_parallel_region(x)
    return gathered
