"""MXFP4 weights (OCP Microscaling Formats 1.0), unpacked when they are read.

32 neighbours of a row share a power of two; each is one of 16 numbers, of 4 bits
(``kernels/moe/mxfp4.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_async.checkpoint.targets import Target
from megatron_async.errors import CheckpointError
from megatron_async.kernels.moe.mxfp4 import BLOCK, unpack_stored

Kind = Literal["blocks", "scales"]
Arrange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Target(Target):
    """One of the two stored tensors of a parameter ``[experts, rows, columns]``, or of a share
    of it. That is filled when both are there, expert by expert; ``select`` arranges an expert's
    rows, and takes this rank's.

    Args:
        kind: which of the two.
        waiting: what has come of the two, shared by both.
        first: number of the parameter's first expert among those that are stored.
    """

    kind: Kind
    waiting: dict[str, Tensor]
    first: int
    dtypes: ClassVar[tuple[str, ...]] = ("U8",)

    def may_be_filled_in_place(self) -> bool:
        """Not: one may come without the other."""
        return False

    def copy_from(self, stored: Tensor) -> None:
        """Keep ``stored``, or fill the view where it is the second of the two."""
        self.waiting[self.kind] = stored
        if len(self.waiting) == 2:
            with torch.no_grad():
                blocks, scales = self.waiting["blocks"], self.waiting["scales"]
                for expert, view in enumerate(self.view, self.first):
                    rows = unpack_stored(blocks[expert].flatten(-2), scales[expert])
                    view.copy_(self.select(rows))
            self.waiting.clear()


def mxfp4_targets(
    stored: str,
    name: str,
    parameter: Tensor,
    shape: Sequence[int],
    select: Arrange,
    first: int = 0,
) -> dict[str, Target]:
    """Targets of ``<stored>_blocks`` and ``<stored>_scales``, which together are ``parameter``.

    Args:
        shape: of what is stored, unpacked: the parameter's, or that of all ranks'.
        select, first: see :class:`Mxfp4Target`.

    Raises:
        CheckpointError: rows of the parameter are no whole blocks.
    """
    *lead, columns = shape
    if columns % BLOCK:
        raise CheckpointError(
            f"{stored}_blocks: MXFP4 weights have rows of a multiple of {BLOCK} elements, and "
            f"those of {name} have {columns}"
        )
    sizes: dict[Kind, tuple[int, ...]] = {
        "blocks": (*lead, columns // BLOCK, BLOCK // 2),
        "scales": (*lead, columns // BLOCK),
    }
    waiting: dict[str, Tensor] = {}
    return {
        f"{stored}_{kind}": Mxfp4Target(
            parameter, size, select, kind=kind, waiting=waiting, first=first
        )
        for kind, size in sizes.items()
    }
