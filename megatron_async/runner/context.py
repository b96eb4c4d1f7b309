"""Device-resident state, addressed by slot, and what the model sees of one forward."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import torch

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.config import (
    MAX_COUNT,
    MAX_DRAFTS,
    MAX_REQUESTS,
    check_buffer_size,
    check_integer,
    check_paused_buffer_size,
)
from megatron_async.device.memory import GIB, must_fit
from megatron_async.device.releasable import Region
from megatron_async.errors import ConfigError
from megatron_async.kernels import trial
from megatron_async.kernels.attention import paged_attention
from megatron_async.kernels.attention.decode_attention import DecodeAttentions, Heads, heads_of
from megatron_async.models.kv_cache_spec import KVCacheSpec
from megatron_async.models.recurrent_state_spec import RecurrentStateSpec
from megatron_async.runner.attention_metadata import (
    AttentionMetadata,
    metadata_of_tokens,
    no_tokens,
)
from megatron_async.runner.recurrent_states import RecurrentStates
from megatron_async.runner.slot_state import SlotState
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS

from megatron.core.inference.contexts import BaseInferenceContext  # isort: skip

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE_TOKENS = 64


@functools.cache
def _warn_of_slow_attention(kv_channels: int) -> None:
    logger.warning(
        "a head size of %d is above %d, the largest of the Triton kernels: attention runs in "
        "PyTorch's operations and reads whole block tables, which is slow",
        kv_channels,
        paged_attention.KERNEL_HEAD_DIM,
    )


@functools.cache
def _warn_of_latents_on_trial() -> None:
    logger.warning(
        "multi-latent attention runs in PyTorch's operations and reads whole block tables, which "
        "is slow: its kernels are %s",
        trial.REASON,
    )


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
        super().__init__(materialize_only_last_token_logits=True)
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
        # Of "cuda" the current GPU: kernels are loaded for one, and another may be current later.
        self.device = torch.empty(0, device=device).device
        self.max_sequence_length = max_sequence_length
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.attached = False
        """It serves an engine."""
        self.block_size_tokens = block_size_tokens
        self.num_cuda_graphs = num_cuda_graphs
        self.params_dtype = params_dtype
        self.batch_invariant = batch_invariant
        self.regions: list[Region] = []
        self._releasable = releasable
        self.decoder_hidden_states: torch.Tensor | None = None
        """Of the last forward, ``[T, 1, hidden]``; the model sets it."""
        num_drafts = check_integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_DRAFTS)
        self.num_speculative_tokens = num_drafts

        tensors = 1 if cache_mla_latent else 2
        token_bytes = (
            tensors * num_layers * num_attention_heads * kv_channels * params_dtype.itemsize
        )
        block_bytes = (token_bytes + further_token_bytes) * block_size_tokens
        size = f"block_count={block_count}"
        self.max_blocks_per_request = -(-max_sequence_length // block_size_tokens)
        if block_bytes == 0 and block_count is None:  # no layer attends: blocks count tokens alone
            block_count = max_requests * self.max_blocks_per_request
        if block_count is None:
            size = f"buffer_size_gb={buffer_size_gb}"
            if buffer_size_gb is None:
                raise ConfigError("give buffer_size_gb or block_count")
            check_buffer_size(buffer_size_gb)
            block_count = int(buffer_size_gb * GIB) // block_bytes - 1
            if block_count < 1:
                raise ConfigError(
                    f"buffer_size_gb={buffer_size_gb} holds no KV block: a block of "
                    f"{block_size_tokens} tokens takes {block_bytes / GIB:.6f} GiB and one more "
                    "is kept for padding; raise it or lower block_size_tokens"
                )
        else:
            block_count = check_integer("block_count", block_count, 1, MAX_COUNT)
        self.block_count = block_count
        self.block_size_bytes = block_bytes
        self.paused_block_count: int | None = None
        if paused_buffer_size_gb is not None and block_bytes:
            self.paused_block_count = int(paused_buffer_size_gb * GIB) // block_bytes
        self.slot_count = slot_count or 2 * max_requests
        self.null_slot = self.slot_count

        with must_fit(
            self.device,
            (block_count + 1) * token_bytes * block_size_tokens,
            f"the KV cache ({size}, block_size_tokens={block_size_tokens})",
            f"{size.partition('=')[0]} or block_size_tokens",
        ):
            # [layers, key or value, blocks, tokens, heads, head dimension]
            blocks = block_count + 1, block_size_tokens
            shape = (num_layers, tensors, *blocks, num_attention_heads, kv_channels)
            self.kv_cache = self._zeros(shape, dtype=params_dtype)
        slots = self.slot_count + 1
        with must_fit(
            self.device,
            8 * slots * (self.max_blocks_per_request + MAX_STOP_TOKEN_IDS + num_drafts + 8),
            f"the state of {slots} slots for {max_sequence_length} tokens each",
            "max_requests, depth or max_sequence_length, or raise block_size_tokens",
        ):
            sizes = {
                "max_blocks_per_request": self.max_blocks_per_request,
                "num_drafts": num_drafts,
            }
            self.slots = SlotState(self.slot_count, sizes, self.device)
        self.block_table = self.slots.block_table
        self.finished = self.slots.finished
        self.kv_length = self.slots.kv_length
        if self.device.type == "cuda":
            if cache_mla_latent and not trial.LATENT:
                _warn_of_latents_on_trial()
            elif not cache_mla_latent and kv_channels > paged_attention.KERNEL_HEAD_DIM:
                _warn_of_slow_attention(kv_channels)

        self.begin(no_tokens(self.device))
        self.states: RecurrentStates | None = None
        """Of a model with recurrent layers."""

        self._metadata = no_tokens(self.device)
        self._decode_attentions = DecodeAttentions(self.device)

    def beside(self, spec: KVCacheSpec) -> DynamicInferenceContext:
        """A context of the same slots and blocks, with a cache of its own for another model."""
        with must_fit(
            self.device,
            (self.block_count + 1) * self.block_size_tokens * spec.token_bytes,
            f"the KV cache of the model that drafts ({self.block_count} blocks)",
            "block_count or buffer_size_gb",
        ):
            _, _, *blocks, _, _ = self.kv_cache.shape
            tensors = 2 if spec.latent_rank is None else 1
            shape = (spec.num_layers, tensors, *blocks, spec.num_kv_heads, spec.head_dim)
            cache = self._zeros(shape, dtype=spec.dtype)
        other = copy.copy(self)
        other.take_cache(cache)
        other.states = None
        return other

    def _zeros(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not self._releasable or not size:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        region = Region(size, self.device)
        self.regions.append(region)
        return region.part(0, shape, dtype).zero_()

    def take_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep keys and values in ``kv_cache`` from now on."""
        self.kv_cache = kv_cache
        self.params_dtype = kv_cache.dtype
        self.begin(no_tokens(self.device))
        self._decode_attentions = DecodeAttentions(self.device)

    def reset(self) -> None:
        """Forget all slots; nothing may be in flight."""
        self.slots.reset()
        if self.states is not None:
            self.states.reset()

    def release(self) -> None:
        """Free the cache, which nobody uses any more."""
        self.kv_cache = self.kv_cache.new_empty(0)
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
            zeros=self._zeros,
        )
        return self.states

    # --- one forward --------------------------------------------------------------------------

    def begin(self, metadata: AttentionMetadata) -> None:
        """The forward that follows is over these tokens; in stream order."""
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
        if self._metadata.window is None and self.num_speculative_tokens == 0:
            return 1
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
        keys, values = self.kv_cache[layer]
        paged_attention.append_kv(keys, values, key, value, self.slot_mapping)
        return self._attend_appended(query, keys, values, softmax_scale, limits)

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
        (keys,) = self.kv_cache[layer]
        if latent is not None:
            keys.flatten(0, 1).index_copy_(0, self.slot_mapping, latent)
        return self._attend_appended(query, keys, keys, softmax_scale, {"latent": rank})

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
        from megatron_async.kernels.attention.latent_append import latent_append

        (keys,) = self.kv_cache[layer]
        latent_append(
            query, packed.contiguous(), out, keys, self.slot_mapping, self.position_ids, cos_sin,
            weight, eps,
        )  # fmt: skip

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
        from megatron_async.kernels.attention.rope_append import rope_append

        keys, values = self.kv_cache[layer]
        heads = self._decode_heads(packed, cos_sin, q_weight, k_weight, limits)
        if heads is not None:
            capacity = self.max_blocks_per_request * self.block_size_tokens
            rows = packed.shape[0] // heads.window
            attention = self._decode_attentions.get(heads, rows, capacity)
            out = packed.new_empty(packed.shape[0], heads.kv_heads * heads.group, heads.head_dim)
            attention(
                packed.contiguous(), keys, values, self.block_table, self.token_slots,
                self.position_ids.contiguous(), self.slot_mapping, out, scale=softmax_scale,
                cos_sin=cos_sin, q_weight=q_weight, k_weight=k_weight, eps=eps,
            )  # fmt: skip
            return out
        query = rope_append(
            packed,
            keys,
            values,
            self.slot_mapping,
            self.position_ids,
            cos_sin,
            q_weight,
            k_weight,
            eps,
        )
        return self._attend_appended(query, keys, values, softmax_scale, limits)

    def _decode_heads(
        self,
        packed: torch.Tensor,
        cos_sin: torch.Tensor | None,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        limits: dict[str, Any] | None = None,
    ) -> Heads | None:
        """What one kernel takes all of this step's attention as, if there is one that does."""
        is_plain_decode = (
            self._metadata.chunks is None and self._metadata.decode_lengths_host is None
        )
        window = self.window
        if not is_plain_decode or self.batch_invariant or window is None:
            return None
        return heads_of(
            packed, self.kv_cache, cos_sin, q_weight, k_weight, window, gaps=self.has_gaps,
            limits=limits,
        )  # fmt: skip

    def _attend_appended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        softmax_scale: float,
        limits: dict[str, Any],
    ) -> torch.Tensor:
        rows = self._metadata.decode_rows
        if self._metadata.chunks is None or self._each_token_is_a_row(query, limits):
            return self._attend_decode(query, keys, values, softmax_scale, limits)
        out = query.new_zeros(*query.shape[:2], limits.get("latent", query.shape[2]))
        if rows:
            out[:rows] = self._attend_decode(query[:rows], keys, values, softmax_scale, limits)
        paged_attention.paged_mixed_attention(
            query, keys, values, self.block_table, self._metadata.chunks, softmax_scale, out,
            **limits,
        )  # fmt: skip
        return out

    def _each_token_is_a_row(self, query: torch.Tensor, limits: dict[str, Any]) -> bool:
        """Whether the tokens of chunks attend like decode rows: to be invariant, or on CUDA
        because no kernel takes the chunks."""
        if self.batch_invariant:
            return True
        return query.is_cuda and not paged_attention.has_kernel(query, limits.get("latent"))

    def _attend_decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        limits: dict[str, Any],
    ) -> torch.Tensor:
        if self._each_token_is_a_row(query, limits):
            # Decode rows and the tokens of chunks alike: each attends up to its own position.
            lengths = self.position_ids + 1
            if query.is_cuda:
                return paged_attention.paged_decode_attention(
                    query, keys, values, self.block_table, lengths, scale, self.token_slots,
                    **limits,
                )  # fmt: skip
            tables = self.block_table[self.token_slots]
            return paged_attention.paged_decode_attention_by_length(
                query, keys, values, tables, lengths.tolist(), scale, self.token_slots.tolist(),
                **limits,
            )  # fmt: skip
        slots = self.token_slots[: self._metadata.decode_rows]
        if self._metadata.decode_lengths_host is not None:
            tables = self.block_table[slots]
            return paged_attention.paged_decode_attention_by_length(
                query, keys, values, tables, self._metadata.decode_lengths_host, scale,
                slots.tolist(), **limits,
            )  # fmt: skip
        return paged_attention.paged_decode_attention(
            query, keys, values, self.block_table, self._metadata.decode_lengths, scale, slots,
            **limits,
        )  # fmt: skip

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
