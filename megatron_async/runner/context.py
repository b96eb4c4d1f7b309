"""Cache and per-slot state on the device, and what the model sees of one forward."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_async.config import (
    MAX_COUNT,
    MAX_DRAFTS,
    MAX_REQUESTS,
    check_integer,
    check_paused_buffer_size,
)
from megatron_async.device.releasable import Region
from megatron_async.megatron_compat.contexts import BaseInferenceContext
from megatron_async.models.kv_cache_spec import KVCacheSpec
from megatron_async.models.recurrent_state_spec import RecurrentStateSpec
from megatron_async.runner.attention_metadata import (
    AttentionMetadata,
    metadata_of_tokens,
    no_tokens,
)
from megatron_async.runner.cache_attention import CacheAttention, warn_if_slow
from megatron_async.runner.cache_memory import CacheMemory, cache_size
from megatron_async.runner.recurrent_states import RecurrentStates
from megatron_async.runner.slot_state import allocate_slots

DEFAULT_BLOCK_SIZE_TOKENS = 64


class DynamicInferenceContext(BaseInferenceContext):
    """KV cache and per-slot state on the device. Names of the arguments are megatron-core's.

    The last slot, ``null_slot``, belongs to padding rows: it is always finished, and its block
    table points at the null block.

    Args:
        params_dtype: dtype of keys and values.
        num_layers: attention layers of this rank, MTP layers included.
        kv_channels: head dimension.
        num_attention_heads: heads in the KV cache (megatron's query groups) of this rank.
        max_sequence_length: most tokens of a request.
        buffer_size_gb: size of the KV cache in GiB. This or ``block_count``.
        paused_buffer_size_gb: part of it that requests may keep which wait for a block; None is
            all. ``paused_block_count`` is what it comes to.
        max_requests: most rows of a forward.
        slot_count: slots; None is twice ``max_requests``. A slot is held until the last ticket of
            its request has retired, so ``max_requests * (depth + 1)`` never run short.
        max_tokens: most tokens of a forward; None leaves it to the engine.
        block_size_tokens: tokens of a block.
        block_count: usable blocks, the null block not counted.
        num_cuda_graphs: most row buckets to capture; None is all.
        device: where the state lives; None takes the current GPU, or the CPU without one.
        batch_invariant: attend with every token as a row of its own, prefill chunks too, so that
            a token's bits do not depend on the forward that computes it.
        num_speculative_tokens: drafts that each decode row brings along, for a model that drafts.
        cache_mla_latent: the cache holds latents, keys that their values are a part of, and nothing
            else; ``kv_channels`` counts their elements (multi-latent attention).
        releasable: the cache can be given back and had again (sleep mode); ``regions`` is its
            memory, that of caches beside it, and that of recurrent states.
        further_token_bytes: what a token takes in caches beside this one, see :meth:`beside`;
            ``buffer_size_gb`` is for all of them.

    Raises:
        ConfigError: a value is out of range, or the buffer holds no block.
        CacheTooLargeError: cache and slots do not fit into the device's memory.
    """

    def __init__(
        self,
        *,
        params_dtype: torch.dtype,
        num_layers: int,
        kv_channels: int,
        num_attention_heads: int,
        max_sequence_length: int,
        buffer_size_gb: float | None = None,
        paused_buffer_size_gb: float | None = None,
        max_requests: int = 64,
        slot_count: int | None = None,
        max_tokens: int | None = None,
        block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS,
        block_count: int | None = None,
        num_cuda_graphs: int | None = None,
        device: torch.device | str | None = None,
        batch_invariant: bool = False,
        num_speculative_tokens: int = 0,
        further_token_bytes: int = 0,
        cache_mla_latent: bool = False,
        releasable: bool = False,
    ) -> None:
        super().__init__()
        check_paused_buffer_size(paused_buffer_size_gb)
        max_requests = check_integer("max_requests", max_requests, 1, MAX_REQUESTS)
        block_size_tokens = check_integer("block_size_tokens", block_size_tokens, 1, MAX_COUNT)
        max_sequence_length = check_integer(
            "max_sequence_length", max_sequence_length, 2, MAX_COUNT
        )
        if slot_count is not None:
            slot_count = check_integer("slot_count", slot_count, 1, MAX_COUNT)
        if max_tokens is not None:
            max_tokens = check_integer("max_tokens", max_tokens, 1)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        # "cuda" is the current GPU: kernels are loaded for one, and another may be current later.
        self.device = torch.empty(0, device=device).device
        self.max_sequence_length = max_sequence_length
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.attached = False
        """It serves an engine."""
        self.grids_may_wait = False
        """That engine's grids may wait for their own CTAs, see ``device/waiting_grids.py``."""
        self.block_size_tokens = block_size_tokens
        self.num_cuda_graphs = num_cuda_graphs
        self.batch_invariant = batch_invariant
        self._memory = CacheMemory(self.device, releasable=releasable)
        self.decoder_hidden_states: torch.Tensor | None = None
        """Hidden states of the last forward, ``[T, 1, hidden]``; the model sets it."""
        num_drafts = check_integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_DRAFTS)
        self.num_speculative_tokens = num_drafts

        tensors = 1 if cache_mla_latent else 2
        token_bytes = (
            tensors * num_layers * num_attention_heads * kv_channels * params_dtype.itemsize
        )
        self.block_size_bytes = (token_bytes + further_token_bytes) * block_size_tokens
        self.max_blocks_per_request = -(-max_sequence_length // block_size_tokens)
        self.block_count, self.paused_block_count, asked = cache_size(
            self.block_size_bytes,
            block_size_tokens,
            block_count,
            buffer_size_gb,
            paused_buffer_size_gb,
            max_requests * self.max_blocks_per_request,
        )
        self.slot_count = slot_count or 2 * max_requests
        self.null_slot = self.slot_count

        blocks = self.block_count + 1, block_size_tokens
        kv_cache = self._memory.kv_cache(
            (num_layers, tensors, *blocks, num_attention_heads, kv_channels),
            params_dtype,
            f"the KV cache ({asked}, block_size_tokens={block_size_tokens})",
            f"{asked.partition('=')[0]} or block_size_tokens",
        )
        self.slots = allocate_slots(
            self.slot_count,
            max_sequence_length,
            self.max_blocks_per_request,
            num_drafts,
            self.device,
        )
        self.block_table = self.slots.block_table
        self.finished = self.slots.finished
        self.kv_length = self.slots.kv_length
        self.states: RecurrentStates | None = None
        """The states of a model with recurrent layers."""
        self.take_cache(kv_cache)
        warn_if_slow(kv_cache)

    def beside(self, spec: KVCacheSpec) -> DynamicInferenceContext:
        """A context of the same slots and blocks, with a cache of its own for another model."""
        blocks = self.block_count + 1, self.block_size_tokens
        tensors = 2 if spec.latent_rank is None else 1
        cache = self._memory.kv_cache(
            (spec.num_layers, tensors, *blocks, spec.num_kv_heads, spec.head_dim),
            spec.dtype,
            f"the KV cache of the model that drafts ({self.block_count} blocks)",
            "block_count or buffer_size_gb",
        )
        other = copy.copy(self)
        other.take_cache(cache)
        other.states = None
        return other

    def take_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep keys and values in ``kv_cache`` from now on."""
        self.params_dtype = kv_cache.dtype
        self._attention = CacheAttention(
            kv_cache, self.block_table, batch_invariant=self.batch_invariant
        )
        self.begin(no_tokens(self.device))

    @property
    def kv_cache(self) -> torch.Tensor:
        """``[layers, key or value, blocks, tokens of a block, heads, head dimension]``."""
        return self._attention.kv_cache

    @property
    def regions(self) -> list[Region]:
        """Memory of caches and recurrent states that can be given back."""
        return self._memory.regions

    def reset(self) -> None:
        """Forget all slots; nothing may be in flight."""
        self.slots.reset()
        if self.states is not None:
            self.states.reset()

    def release(self) -> None:
        """Free the cache, which nobody uses any more."""
        self._attention.release()
        self.regions.clear()
        self.states = None

    def keep_states(self, spec: RecurrentStateSpec, snapshot_count: int) -> RecurrentStates:
        """Have room for the state of a model's recurrent layers in each slot, and for snapshots.

        Raises:
            CacheTooLargeError: they do not fit into the device's memory.
        """
        self.states = RecurrentStates(
            spec,
            self.slot_count,
            entries=1 + self.num_speculative_tokens,
            snapshot_count=snapshot_count,
            device=self.device,
            zeros=self._memory.zeros,
        )
        return self.states

    # --- one forward --------------------------------------------------------------------------

    def begin(self, metadata: AttentionMetadata) -> None:
        """The forward that follows is over these tokens; in stream order."""
        if metadata.window is None and self.num_speculative_tokens == 0:
            metadata = metadata._replace(window=1)
        self._metadata = metadata
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
        :func:`~megatron_async.runner.attention_metadata.metadata_of_tokens`."""
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
    def position_ids(self) -> torch.Tensor:
        """Position of each token of the forward that runs now, int64 [T]."""
        return self._metadata.position_ids

    @property
    def token_slots(self) -> torch.Tensor:
        """Slot of each token, int64 [T]."""
        return self._metadata.token_slots

    @property
    def long_rotation(self) -> torch.Tensor:
        """Whether each token's request is rotated as a long one, int32 [T]."""
        return self.slots.long_rotation[self.token_slots]

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Where each token's keys and values go: block * block size + offset, int64 [T]."""
        return self._metadata.slot_mapping

    @property
    def padding_mask(self) -> torch.Tensor:
        """True for tokens that are padding, or of requests that have ended: bool [1, T]."""
        if self._padding_mask is None:
            self._padding_mask = (self.slot_mapping < self.block_size_tokens)[None]
        return self._padding_mask

    @property
    def window(self) -> int | None:
        """Tokens of each row of the decode step that runs now, one row after the other, of
        consecutive positions; None where tokens of one row may come in any other way."""
        return self._metadata.window

    @property
    def has_gaps(self) -> bool:
        """Whether there may be padding in front of the first token of a row's window."""
        return self._metadata.has_gaps

    @property
    def last_token_index(self) -> torch.Tensor | None:
        """Token whose logits each row wants, int64 [R]; None means token r."""
        return self._metadata.last_token_index

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
        return self._attention.attend(
            self._metadata, layer, query, key, value, softmax_scale, limits
        )

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
        return self._attention.attend_latent(
            self._metadata, layer, query, latent, softmax_scale, rank
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
        """On CUDA: append latents from the packed projection, normed and rotated, and rotate
        ``query`` into ``out``, in one kernel (``kernels/attention/latent_append.py``)."""
        self._attention.append_latent(
            self._metadata, layer, query, packed, out, cos_sin, weight, eps
        )

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
        return self._attention.attend_packed(
            self._metadata, layer, packed, softmax_scale, cos_sin, q_weight, k_weight, eps, limits
        )

    # --- what megatron-core's GPTModel and TransformerBlock ask -------------------------------

    def is_static_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        """True when the forward that runs now has one token for each row."""
        return self._metadata.chunks is None

    def using_cuda_graph_this_step(self) -> bool:
        """megatron-core's own graphs stay off: the whole step is captured instead."""
        return False

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows of [1, T, H] that are sampled: [R, H]."""
        if self.last_token_index is None:
            return hidden_states[0]
        return hidden_states[0, self.last_token_index]
