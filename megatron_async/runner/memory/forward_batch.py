"""One forward: what a model's layers are told of its tokens, and their way to the KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from megatron_async.kernels.attention.e4m3_cache import E4M3
from megatron_async.megatron_compat.contexts import BaseInferenceContext
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.description.recurrent_state_spec import RecurrentStateSpec
from megatron_async.runner.memory.attention_metadata import (
    AttentionMetadata,
    metadata_of_tokens,
    no_tokens,
)
from megatron_async.runner.memory.cache_attention import CacheAttention
from megatron_async.runner.memory.kv_cache import KVCache
from megatron_async.runner.memory.recurrent_states import RecurrentStates


class ForwardBatch(BaseInferenceContext):
    """What megatron-core calls an inference context: each forward begins with :meth:`begin`, and
    its layers find their tokens and the cache here.

    Args:
        cache: slots and blocks.
        kv: keys and values, those of another model :meth:`KVCache.beside` the cache's; None takes
            the cache's, and its recurrent states.

    Attributes:
        kv_cache: ``[layers, key or value, blocks, tokens of a block, heads, head dimension]``.
        scales: of a cache of e4m3, fp32 ``[layers, key or value, heads]``, powers of two; they are
            ones until somebody fills them, before anything is kept.
        states: recurrent states of the model; None without.
        grids_may_wait: the grids of the engine that has it may wait for their own CTAs, and for
            those of other ranks, see ``device/waiting_grids.py``.
        gemm_autotune_seconds: see :class:`~megatron_async.models.batch.Batch`.
        decoder_hidden_states: of the last forward, ``[T, 1, hidden]``; the model sets them.
        position_ids, token_slots, slot_mapping, last_token_index, window, has_gaps: of the forward
            that runs now, see :class:`AttentionMetadata`.
    """

    of_one_forward: ClassVar[frozenset[str]] = frozenset({
        "decoder_hidden_states", "metadata", "position_ids", "token_slots", "slot_mapping",
        "last_token_index", "_padding_mask",
    })  # fmt: skip

    def __init__(self, cache: KVCache, kv: torch.Tensor | None = None) -> None:
        super().__init__()
        sizes = cache.sizes
        self.cache = cache
        self.device = cache.device
        self.slots = cache.slots
        self.block_table = cache.slots.block_table
        self.finished = cache.slots.finished
        self.kv_length = cache.slots.kv_length
        self.null_slot = cache.null_slot
        self.slot_count = sizes.slot_count
        self.max_sequence_length = sizes.max_sequence_length
        self.block_size_tokens = sizes.block_size_tokens
        self.num_speculative_tokens = sizes.num_speculative_tokens
        self.batch_invariant = sizes.batch_invariant
        self.grids_may_wait = False
        self.gemm_autotune_seconds = 0.0
        self.decoder_hidden_states: torch.Tensor | None = None
        self.states: RecurrentStates | None = cache.states if kv is None else None
        self.scales: torch.Tensor | None = None
        self.take_cache(cache.kv if kv is None else kv)

    def limit_length(self, most: int) -> None:
        """Requests have no more than ``most`` tokens; before an engine has it."""
        self.cache.sizes = replace(self.cache.sizes, max_sequence_length=most)
        self.max_sequence_length = most

    def limit_blocks(self, most: int) -> None:
        """No more than ``most`` blocks are used; before an engine has it."""
        self.cache.sizes = replace(self.cache.sizes, block_count=most)

    def beside(self, spec: KVCacheSpec) -> ForwardBatch:
        """Forwards of another model over the same slots and blocks, with a cache of its own."""
        return ForwardBatch(self.cache, self.cache.beside(spec))

    def take_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep keys and values in ``kv_cache`` from now on."""
        self.kv_cache = kv_cache
        if kv_cache.dtype == E4M3 and self.scales is None:
            shape = (*kv_cache.shape[:2], kv_cache.shape[4])
            self.scales = torch.ones(shape, dtype=torch.float32, device=self.device)
        self.attention = CacheAttention(
            kv_cache, self.block_table, batch_invariant=self.batch_invariant, scales=self.scales
        )
        self.begin(no_tokens(self.device))

    def keep_states(self, spec: RecurrentStateSpec, snapshot_count: int) -> RecurrentStates:
        """Have room for recurrent states: see :meth:`KVCache.keep_states`."""
        self.states = self.cache.keep_states(spec, snapshot_count)
        return self.states

    def release(self) -> None:
        """Free the cache, which nobody uses any more."""
        self.cache.release()
        self.attention.release()
        self.kv_cache, self.states = self.attention.kv_cache, None

    def begin(self, metadata: AttentionMetadata) -> None:
        """The forward that follows is over these tokens; in stream order."""
        if metadata.window is None and self.num_speculative_tokens == 0:
            metadata = metadata._replace(window=1)
        self.metadata = metadata
        self.position_ids = metadata.position_ids
        self.token_slots = metadata.token_slots
        self.slot_mapping = metadata.slot_mapping
        self.last_token_index = metadata.last_token_index
        self.window = metadata.window
        self.has_gaps = metadata.has_gaps
        self._padding_mask: torch.Tensor | None = None

    def begin_forward(
        self,
        token_slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        decode_rows: int,
        chunks: torch.Tensor | None = None,
        last_token_index: torch.Tensor | None = None,
        read_lengths: bool = False,
        window: int | None = None,
    ) -> None:
        """:meth:`begin` of T tokens: see
        :func:`~megatron_async.runner.memory.attention_metadata.metadata_of_tokens`."""
        self.begin(
            metadata_of_tokens(
                self.slots,
                self.block_size_tokens,
                token_slots,
                positions,
                decode_rows=decode_rows,
                chunks=chunks,
                last_token_index=last_token_index,
                read_lengths=read_lengths,
                window=window,
            )
        )

    def begin_decode(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        lengths: torch.Tensor,
        window: int = 1,
    ) -> None:
        """:meth:`begin` of ``window`` tokens a row, from int64 [T] each that stay as they are:
        ``slot_mapping`` is block * block size + offset, ``lengths`` are positions + 1."""
        self.begin(
            AttentionMetadata(
                positions, slots, slot_mapping, slots.shape[0], lengths, window=window
            )
        )

    @property
    def long_rotation(self) -> torch.Tensor:
        """Whether each token's request is rotated as a long one, int32 [T]."""
        return self.slots.long_rotation[self.token_slots]

    @property
    def padding_mask(self) -> torch.Tensor:
        """True for tokens that are padding, or of requests that have ended: bool [1, T]."""
        if self._padding_mask is None:
            self._padding_mask = (self.slot_mapping < self.block_size_tokens)[None]
        return self._padding_mask

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        **limits: Any,
    ) -> torch.Tensor:
        """Append key and value [T, Hkv, D] to ``layer`` of the cache and attend with query
        [T, Hq, D]. Returns [T, Hq, D]; rows of padding tokens hold anything finite. ``limits``
        are ``window``, ``soft_cap`` and ``sinks`` of the layer, see ``kernels/attention``."""
        return self.attention.attend(self.metadata, layer, query, key, value, softmax_scale, limits)

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor | None,
        softmax_scale: float,
        rank: int,
    ) -> torch.Tensor:
        """:meth:`attend` to latents: append ``latent`` [T, 1, D], whose first ``rank`` elements are
        its value, and attend with query [T, Hq, D]. Returns [T, Hq, rank]. None has been appended
        by :meth:`append_latent`."""
        return self.attention.attend_latent(
            self.metadata, layer, query, latent, softmax_scale, rank
        )

    def append_latent(
        self,
        layer: int,
        query: torch.Tensor,
        packed: torch.Tensor,
        out: torch.Tensor,
        cos_sin: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        """Append latents from the packed projection on CUDA, normed and rotated, and rotate
        ``query`` into ``out``, in one kernel (``kernels/attention/latent_append.py``)."""
        self.attention.append_latent(self.metadata, layer, query, packed, out, cos_sin, weight, eps)

    def attend_packed(
        self,
        layer: int,
        packed: torch.Tensor,
        softmax_scale: float,
        cos_sin: torch.Tensor | None,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        **limits: Any,
    ) -> torch.Tensor:
        """:meth:`attend` on CUDA from the packed projection, normed, rotated and appended by one
        kernel (``kernels/attention/rope_append.py``). Where one kernel takes all of a decode step's
        attention, it does that too."""
        return self.attention.attend_packed(
            self.metadata, layer, packed, softmax_scale, cos_sin, q_weight, k_weight, eps, limits
        )

    # --- what megatron-core's GPTModel and TransformerBlock ask -------------------------------

    def is_static_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        """True when the forward that runs now has one token for each row."""
        return self.metadata.chunks is None

    def using_cuda_graph_this_step(self) -> bool:
        """megatron-core's own graphs stay off: the whole step is captured instead."""
        return False

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows of [1, T, H] that are sampled: [R, H]."""
        if self.last_token_index is None:
            return hidden_states[0]
        return hidden_states[0, self.last_token_index]
