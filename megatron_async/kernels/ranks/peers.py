"""The last parameters of kernels that write to the memory of other ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_async.kernels.compile import Int64

MOST_RANKS = 8
"""The most ranks of a group whose kernels write to each other's memory."""


class Peers(NamedTuple):
    """Where each rank of a group is written to, by its place; None where it is not. These are the
    parameters ``PEERS`` of ``types.cuh``, in order."""

    to_0: Int64 | None = None
    to_1: Int64 | None = None
    to_2: Int64 | None = None
    to_3: Int64 | None = None
    to_4: Int64 | None = None
    to_5: Int64 | None = None
    to_6: Int64 | None = None
    to_7: Int64 | None = None

    @classmethod
    def of(cls, memory: tuple[Tensor, ...], own: int | None = None) -> Peers:
        """All ranks whose ``memory`` this is, but for the ``own`` one."""
        return cls(*(None if place == own else each for place, each in enumerate(memory)))
