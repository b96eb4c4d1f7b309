"""megatron-core self-attention whose keys and values live in the inference context."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import ConfigError
from megatron_async.kernels.attention.paged_attention import masked_attention
from megatron_async.models.batch import Batch
from megatron_async.models.layers.norm import AllHeads, RMSNorm, fusable
from megatron_async.models.layers.rope import RotaryTable, apply_rope

from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import (  # isort: skip
    make_sharded_tensors_for_checkpoint,
)

_RMS_NORMS = (RMSNorm, torch.nn.RMSNorm)


class NoCoreAttention(torch.nn.Module):
    """Stands in for megatron's core attention, which :class:`PagedAttention` never calls.

    Attributes:
        softmax_offset: a logit of each of this rank's heads, under megatron's name; None without.
    """

    def __init__(self, config: Any = None, **_: Any) -> None:
        super().__init__()
        offset = None
        if config is not None and config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        self.register_parameter("softmax_offset", offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the offset as megatron's own core attention stores it: split by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        split = {"softmax_offset": 0}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, split, sharded_offsets
        )
        return found


class PagedAttention(MegatronModule):  # type: ignore[misc]
    """What our attention layers have beside megatron's.

    Attributes:
        limits: ``window`` and ``soft_cap`` (see ``ModelConfig``) where the layer has them.
        query_scaling: beta and tokens of ``ModelConfig.query_scaling_beta``; None without.
        cache_layer: its layer of the KV cache, where not all layers attend; None counts all.
    """

    config: Any
    layer_number: int
    limits: dict[str, Any]
    query_scaling: tuple[float, int] | None
    cache_layer: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(None)

    def attach(self, rotary: RotaryTable | None) -> None:
        """Take the model's rotary table (shared, not owned); None for no rotation."""
        # Not a submodule: the model owns and moves the one table that all its layers read.
        self.__dict__["rotary"] = rotary
        self.limits = {}
        self.query_scaling = None
        offset = 0
        if self.config.pipeline_model_parallel_size > 1:
            offset = get_transformer_layer_offset(self.config)
        place: int = self.layer_number - 1 - offset
        self.layer_index = place if self.cache_layer is None else self.cache_layer
        self.softmax_scale = self._scale()

    def _scale(self) -> float:
        scale = self.config.softmax_scale
        return 1 / math.sqrt(self.config.kv_channels) if scale is None else float(scale)

    @property
    def rotary(self) -> RotaryTable | None:
        """The table of this layer's rotation."""
        table: RotaryTable | None = self.__dict__["rotary"]
        return table

    @property
    def sinks(self) -> Tensor | None:
        """A logit of each of this rank's heads, which takes its share of the softmax."""
        offset: Tensor | None = getattr(self.core_attention, "softmax_offset", None)
        return None if offset is None else offset.flatten()

    @property
    def attend_options(self) -> dict[str, Any]:
        """What a context's attention is told of this layer."""
        sinks = self.sinks
        return self.limits if sinks is None else {**self.limits, "sinks": sinks}

    def limit(
        self, window: int | None, soft_cap: float | None, query_scaling: tuple[float, int] | None
    ) -> None:
        """Attend within a window of tokens, cap the scores, scale queries by position; None is
        without."""
        limits = {"window": window, "soft_cap": soft_cap}
        self.limits = {name: value for name, value in limits.items() if value is not None}
        self.query_scaling = query_scaling

    def rotations(self, context: Batch) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a forward's tokens; the layer rotates."""
        rotary = self.rotary
        assert rotary is not None
        is_long = context.long_rotation if rotary.long is not None else None
        return rotary.lookup(context.position_ids, is_long)


def packed_lengths(
    packed: Any, bias: Tensor | None, hidden_states: Tensor, context: Batch | None
) -> list[int] | None:
    """Lengths of the sequences that megatron's ``PackedSeqParams`` say, one behind the other in
    ``[T, 1, hidden]``; None without. Reads them on the host.

    Raises:
        ConfigError: there is an attention bias, or they say something else than lengths.
    """
    if bias is not None:
        raise ConfigError("attention is causal over whole sequences: pass no attention_bias")
    if packed is None:
        return None
    if context is not None:
        raise ConfigError("an inference context packs by itself: pass no packed_seq_params")
    starts, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    if starts is None or hidden_states.shape[1] != 1 or packed.qkv_format not in (None, "thd"):
        raise ConfigError(
            f"packed_seq_params have qkv_format={packed.qkv_format!r} and a batch of "
            f"{hidden_states.shape[1]}; give 'thd', cu_seqlens_q and a batch of 1"
        )
    ends = [int(end) for end in starts.tolist()]
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    is_whole = ends[0] == 0 and ends[-1] == len(hidden_states) and min(lengths, default=0) >= 0
    if not is_whole or (padded is not None and padded.tolist() != ends):
        raise ConfigError(
            f"cu_seqlens_q={ends} must be from 0 to the {len(hidden_states)} tokens, without "
            "padding between sequences"
        )
    return [length for length in lengths if length]


class PagedSelfAttention(PagedAttention, SelfAttention):  # type: ignore[misc]
    """Causal self-attention: over a whole sequence, or through an inference context.

    Projections, grouping and query/key norms are megatron's.
    """

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
        sequence_len_offset: Tensor | None = None,
        *,
        inference_params: Batch | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; only ``hidden_states`` and the context are read, the mask is always causal.

        Args:
            hidden_states: without a context ``[S, B, hidden]``, positions 0 to S-1; with one,
                ``[T, 1, hidden]``: the tokens of all sequences one after the other, their
                positions in ``inference_context.position_ids`` (int64 ``[T]``).

        Returns:
            The projected output, like ``hidden_states``, and the bias still to be added.

        Raises:
            ConfigError: an attention bias is asked for, or sequences are packed in a way that is
                not read.
        """
        context = inference_context if inference_context is not None else inference_params
        lengths = None
        if packed_seq_params is not None or attention_bias is not None:
            lengths = packed_lengths(packed_seq_params, attention_bias, hidden_states, context)
        if context is not None and self._packs(context, hidden_states):
            output = self._with_packed(context, hidden_states)
        else:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            if lengths is not None:
                each = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
                output = torch.cat([self._causal(*parts) for parts in each])
            elif context is None:
                output = self._causal(query, key, value)
            else:
                output = self._with_context(context, query, key, value)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(output.flatten(2))
        return projected

    def attended(self, context: Batch, hidden_states: Tensor) -> Tensor:
        """What the output projection gets in a forward with a context, ``[T, 1, heads x size]``."""
        if self._packs(context, hidden_states):
            return self._with_packed(context, hidden_states).flatten(2)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        return self._with_context(context, query, key, value).flatten(2)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rotary, length = self.rotary, query.shape[0]
        if rotary is not None:
            cos, sin = rotary.prefix(length)
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        positions = torch.arange(length, device=query.device)
        if self.query_scaling is not None:
            query = query * self._query_factors(positions)[:, None, None, None].to(query.dtype)
        groups = query.shape[2] // key.shape[2]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        sinks = self.sinks
        if self.limits or sinks is not None:
            mask = positions <= positions[:, None]
            mask &= positions > positions[:, None] - self.limits.get("window", length)
            output = masked_attention(
                query, key, value, mask, self.softmax_scale, self.limits.get("soft_cap"),
                None if sinks is None else sinks[:, None],
            )  # fmt: skip
            return output.permute(2, 0, 1, 3).contiguous()
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
        )
        return output.permute(2, 0, 1, 3).contiguous()

    def _with_context(self, context: Batch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.rotary is not None:
            cos, sin = self.rotations(context)
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        if self.query_scaling is not None:
            query = query * self._query_factors(context.position_ids)[:, None, None].to(query.dtype)
        output = context.attend(
            self.layer_index, query, key, value, self.softmax_scale, **self.attend_options
        )
        return output.unsqueeze(1)

    def _query_factors(self, positions: Tensor) -> Tensor:
        """fp32 factors of queries at int64 ``positions``, of the same shape."""
        assert self.query_scaling is not None
        beta, tokens = self.query_scaling
        return 1 + beta * torch.log1p((positions // tokens).float())

    def _packs(self, context: Batch, hidden_states: Tensor) -> bool:
        """Whether one kernel may take the packed projection to the cache."""
        norms = (self.q_layernorm, self.k_layernorm)
        same = all(x is None or isinstance(x, IdentityOp) for x in norms)
        if not same:
            same = all(isinstance(x, _RMS_NORMS) and x.eps is not None for x in norms)
            same = same and not isinstance(norms[0], AllHeads)
            same = same and norms[0].eps == norms[1].eps
        return (
            fusable(hidden_states)
            and hasattr(context, "attend_packed")
            and same
            and self.query_scaling is None
            and (self.rotary is None or self.rotary.long is None)
            and self.hidden_size_per_attention_head % 2 == 0
            and self.config.num_query_groups >= self.world_size
        )

    def _with_packed(self, context: Any, hidden_states: Tensor) -> Tensor:
        packed, _ = self.linear_qkv(hidden_states)
        rotary, norm = self.rotary, self.q_layernorm
        has_norm = isinstance(norm, _RMS_NORMS)
        output: Tensor = context.attend_packed(
            self.layer_index,
            packed.squeeze(1),
            self.softmax_scale,
            None if rotary is None else rotary.cos_sin,
            norm.weight if has_norm else None,
            self.k_layernorm.weight if has_norm else None,
            norm.eps if has_norm else 0.0,
            **self.attend_options,
        )
        return output.unsqueeze(1)
