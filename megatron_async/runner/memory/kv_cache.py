"""The memory of an engine's requests on the device: KV cache, slots, recurrent states."""

from __future__ import annotations

import numpy as np
import torch

from megatron_async.device.memory import must_fit
from megatron_async.device.releasable import Region
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.description.recurrent_state_spec import RecurrentStateSpec
from megatron_async.runner.memory.cache_attention import warn_if_slow
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.recurrent_states import RecurrentStates
from megatron_async.runner.memory.slot_state import SlotState, allocate_slots


class KVCache:
    """KV cache and per-slot state.

    The last slot, ``null_slot``, belongs to padding rows: it is always finished, and its block
    table points at the null block.

    Args:
        further_token_bytes: what a token takes in caches :meth:`beside` this one.

    Attributes:
        kv: ``[layers, key or value, blocks, tokens of a block, heads, head dimension]``.
        states: the states of a model with recurrent layers; None without.
        attached: it serves an engine.
        regions: memory of caches and recurrent states that can be given back.

    Raises:
        CacheTooLargeError: cache and slots do not fit into the device's memory.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        spec: KVCacheSpec,
        device: torch.device | str | None = None,
        *,
        further_token_bytes: int = 0,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        # "cuda" is the current GPU: kernels are loaded for one, and another may be current later.
        self.device = torch.empty(0, device=device).device
        self.sizes = sizes
        self.spec = spec
        self.regions: list[Region] = []
        self.null_slot = sizes.slot_count
        self.block_size_bytes = (spec.token_bytes + further_token_bytes) * sizes.block_size_tokens
        self.states: RecurrentStates | None = None
        self.attached = False
        self.kv = self._allocate(
            spec,
            f"the KV cache ({sizes.asked}, block_size_tokens={sizes.block_size_tokens})",
            f"{sizes.asked.partition('=')[0]} or block_size_tokens",
        )
        self.slots: SlotState = allocate_slots(
            sizes.slot_count,
            sizes.max_sequence_length,
            sizes.max_blocks_per_request,
            sizes.num_speculative_tokens,
            self.device,
        )
        warn_if_slow(self.kv)

    def beside(self, spec: KVCacheSpec) -> torch.Tensor:
        """Keys and values of another model in the same blocks."""
        return self._allocate(
            spec,
            f"the KV cache of the model that drafts ({self.sizes.block_count} blocks)",
            "block_count or buffer_size_gb",
        )

    def keep_states(self, spec: RecurrentStateSpec, snapshot_count: int) -> RecurrentStates:
        """Have room for the state of a model's recurrent layers in each slot, and for snapshots.

        Raises:
            CacheTooLargeError: they do not fit into the device's memory.
        """
        self.states = RecurrentStates(
            spec,
            self.sizes.slot_count,
            entries=1 + self.sizes.num_speculative_tokens,
            snapshot_count=snapshot_count,
            device=self.device,
            zeros=self._zeros,
        )
        return self.states

    def reset(self) -> None:
        """Forget all slots; nothing may be in flight."""
        self.slots.reset()
        if self.states is not None:
            self.states.reset()

    def release(self) -> None:
        """Free the cache, which nobody uses any more."""
        self.kv = self.kv.new_empty(0)
        self.regions.clear()
        self.states = None

    def _allocate(self, spec: KVCacheSpec, what: str, lower: str) -> torch.Tensor:
        blocks = self.sizes.block_count + 1, self.sizes.block_size_tokens
        tensors = 2 if spec.latent_rank is None else 1
        size = (spec.num_layers, tensors, *blocks, spec.num_kv_heads, spec.head_dim)
        with must_fit(self.device, torch.Size(size).numel() * spec.stored.itemsize, what, lower):
            return self._zeros(size, dtype=spec.stored)

    def _zeros(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not self.sizes.releasable or not size:
            if size and self.device.type == "cpu":
                return _untouched_zeros(size).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=self.device)
        region = Region(size, self.device)
        self.regions.append(region)
        part = region.part(0, shape, dtype)
        return part if self.device.type == "cpu" else part.zero_()  # new pages there are zeros


def _untouched_zeros(size: int) -> torch.Tensor:
    """Bytes whose pages take memory when they are first touched; ``torch.zeros`` writes all."""
    try:
        return torch.from_numpy(np.zeros(size, np.uint8))
    except MemoryError as error:
        raise torch.OutOfMemoryError(f"out of memory: {error}") from None
