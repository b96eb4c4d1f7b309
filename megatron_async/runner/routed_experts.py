"""Which experts a forward's tokens went to: from the layers of experts to the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.cache.block_allocator import NULL_BLOCK
from megatron_async.device.memory import GIB
from megatron_async.device.protocol import Device
from megatron_async.models.moe.layer import leaving
from megatron_async.models.moe.routed import RoutedLayers
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.step.packet import CPU_ROW_MULTIPLE
from megatron_async.step.plan import Plan
from megatron_async.step.records import Routes

logger = logging.getLogger(__name__)


class RoutedExperts:
    """A buffer on the device that each forward fills, a pinned ring with an entry for each ticket,
    and on the host the experts of every token in the KV cache.

    The layers of F(n) leave ids in the buffer, and F(n) the place of each token in the KV cache. A
    copy behind F(n) brings both into the ring. S(n) comes behind that on the stream, so they are
    there when the record of S(n) is, and nobody waits for them by themselves.

    On the host ids are kept as the device keeps keys and values: by block and offset, and those of
    dead rows in the null block. So when ticket n is taken, a cached prefix that it begins with has
    its ids where its keys and values are.

    Args:
        layers: those that choose experts.
        entries: no fewer than the results' ring has, so none is overwritten before it is taken.
        tokens: of the largest forward.
    """

    def __init__(
        self,
        device: Device,
        layers: RoutedLayers,
        entries: int,
        tokens: int,
        sizes: CacheSizes,
        *,
        keeps_prefixes: bool,
    ) -> None:
        on = device.torch_device
        pinned = on.type == "cuda"
        self._device = device
        self._place = {id(layer): index for index, layer in enumerate(layers.layers)}
        dtype = torch.uint8 if layers.num_experts <= 256 else torch.int16
        chosen = (len(layers.layers), layers.top_k)
        tokens += CPU_ROW_MULTIPLE
        self._ids = torch.zeros(tokens, *chosen, dtype=dtype, device=on)
        self._places = torch.zeros(tokens, dtype=torch.int32, device=on)
        self._id_ring = torch.zeros(entries, *self._ids.shape, dtype=dtype, pin_memory=pinned)
        self._place_ring = torch.zeros(entries, tokens, dtype=torch.int32, pin_memory=pinned)
        self._cached: Any = None
        if keeps_prefixes:
            blocks = sizes.block_count + 1
            shape = (blocks, sizes.block_size_tokens, *chosen)
            self._cached = np.zeros(shape, self._id_ring.numpy().dtype)
        logger.info(
            "routed experts take %.3f GiB of the device and at most %.3f GiB of the host: %d "
            "layers, %d experts for each token",
            (self._ids.nbytes + self._places.nbytes) / GIB,
            (self._id_ring.nbytes + getattr(self._cached, "nbytes", 0)) / GIB,
            *chosen,
        )

    @contextmanager
    def left(self, slot_mapping: Tensor) -> Iterator[None]:
        """Device: the one forward that runs meanwhile leaves its ids.

        Args:
            slot_mapping: int64 ``[T]``, block * block size + offset of each token.
        """
        leaving.to = self._leave
        try:
            yield
        finally:
            leaving.to = None
        self._places[: len(slot_mapping)].copy_(slot_mapping)

    def _leave(self, layer: Any, ids: Tensor) -> None:
        place = self._place.get(id(layer))
        if place is not None:  # no layer that drafts
            self._ids[: len(ids), place].copy_(ids)

    def publish(self, number: int, tokens: int) -> None:
        """Queue the way to the host of what the forward of ticket ``number`` left of its first
        ``tokens`` tokens."""
        self._device.enqueue(partial(self._copy, number % len(self._id_ring), tokens), "routes")

    def _copy(self, entry: int, tokens: int) -> None:
        self._id_ring[entry, :tokens].copy_(self._ids[:tokens], non_blocking=True)
        self._place_ring[entry, :tokens].copy_(self._places[:tokens], non_blocking=True)

    def take(self, plan: Plan, width: int | None) -> Routes:
        """Host: those of a ticket whose record has been taken; once, in order.

        Args:
            width: tokens of each row in a decode step; None where rows lie one behind the other.
        """
        rows = plan.decode_rows
        windows: Sequence[int] = plan.rows.windows[:rows] or (1,) * rows
        firsts, at = [], 0
        for window in windows:
            firsts.append(at)
            at += width or window
        for chunk in plan.prefills:
            firsts.append(at)
            at += len(chunk.tokens)
        entry = plan.number % len(self._id_ring)
        ids = self._id_ring[entry, :at].numpy().copy()
        prefixes: dict[int, Any] = {}
        if self._cached is not None:
            prefixes = self._prefixes(plan)
            places = self._place_ring[entry, :at].numpy()
            self._cached.reshape(-1, *ids.shape[1:])[places] = ids
        return Routes(ids, tuple(firsts), prefixes)

    def _prefixes(self, plan: Plan) -> dict[int, Any]:
        """By row, the ids of the cached tokens that an admitted request begins behind."""
        admitted = {admission.slot for admission in plan.admissions}
        prefixes: dict[int, Any] = {}
        for chunk in plan.prefills:
            if chunk.start and chunk.slot in admitted:
                blocks = [a.block for a in plan.assignments if a.slot == chunk.slot]
                count = chunk.start // self._cached.shape[1]
                assert NULL_BLOCK not in blocks[:count]
                known = self._cached[blocks[:count]]
                prefixes[chunk.row] = known.reshape(-1, *known.shape[2:])
        return prefixes
