"""Slots of tokens in the order of their experts (``grouped_triton.py``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron_async.kernels.moe.grouped_triton import count_kernel, order_kernel
from megatron_async.kernels.pdl import uses_pdl

_LEAST_CHUNK, _MOST_CHUNKS = 256, 256
"""Slots of a program that orders them, at least, and how many such programs there are at most."""
_ELEMENTS = 4096
"""Pairs of a slot and an expert that such a program compares at once."""
_ALIGNED = 4
"""Numbers of 16 bytes: kernels are compiled for pointers that are multiples of these."""


@dataclass(frozen=True, slots=True)
class Order:
    """Slots in the order of their experts.

    Args:
        slots: int32 ``[T * k]``, those with an expert first; anything behind them.
        tiles: int32 ``[3, most]``: the expert of each tile or -1 for one that is not there, its
            first row, and the row behind its expert's last one. Behind them, in memory, is how many
            are there.
    """

    slots: Tensor
    tiles: Tensor

    @property
    def most_tiles(self) -> int:
        """The most tiles that there may be."""
        return self.tiles.shape[1]


def most_tiles(slots: int, experts: int, rows: int) -> int:
    """The most tiles of ``rows`` rows that ``slots`` slots may take: one for each expert, and one
    for all others that fill one."""
    first = min(slots, experts)
    return first + (slots - first) // rows


def order_slots(ids: Tensor, experts: int, rows: int) -> Order:
    """Order the slots of ``ids``, int32 ``[T, k]``, by expert, for tiles of ``rows`` rows."""
    slots, device = ids.numel(), ids.device
    padded = triton.next_power_of_2(max(experts, 16))
    step = max(16, min(64, _ELEMENTS // padded))
    chunk = triton.next_power_of_2(max(_LEAST_CHUNK, triton.cdiv(slots, _MOST_CHUNKS)))
    programs, most = triton.cdiv(slots, chunk), most_tiles(slots, experts, rows)
    sizes = [-(-size // _ALIGNED) * _ALIGNED for size in (slots, 3 * most + 1, programs * padded)]
    made = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    order, tiles, counts = made.split(sizes)
    options = {"PADDED": padded, "STEP": step, "num_warps": 4, **launch_options(device)}
    count_kernel[(programs,)](ids, counts, slots, chunk, **options)
    order_kernel[(programs,)](
        ids, counts, order, tiles, slots, chunk, programs, most, rows, **options
    )
    return Order(order[:slots], tiles[: 3 * most].view(3, most))


def launch_options(device: torch.device) -> dict[str, bool]:
    """Options of launches that may begin early, see ``kernels/pdl.py``."""
    pdl = uses_pdl(device)
    return {"PDL": pdl, "launch_pdl": pdl}
