"""What the blocks of a decode step hand on: the residual stream, and what the next norm needs.

A fused block norms its input inside its first GEMM. For that it takes the partial statistics of the
residual stream and, before an RMSNorm, the stream times the norm's weight. The block that writes
the stream leaves both for its *reader*, the norm of the next block; a reader that is a module needs
neither and has no :class:`Norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import MAX_ROWS, RMS_NORM

AllReduce = Callable[[Tensor], object]
"""Adds up a bfloat16 ``[R, hidden]`` over the ranks of a group, in place and in stream order."""

LAYER, HALF = range(2)
"""Between two layers, and between a layer's attention and its MLP. In hybrid models, whose layers
have one block each, every other border is one of them."""

FINEST_TILE = 8
"""Elements that one partial statistic covers at least."""


class Norm(NamedTuple):
    """A norm that is computed inside a GEMM: ``RMS_NORM`` or ``LAYER_NORM``, and its parameters."""

    kind: int
    weight: Tensor
    bias: Tensor | None
    eps: float

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None, float]:
        """The parameters as a GEMM takes them."""
        return self[1:]


class Workspace:
    """Static buffers for up to :data:`MAX_ROWS` rows, shared by all blocks: one runs at a time.

    WAR: statistics alternate between two buffers, so that a block's GEMM that still reads those of
    its input never meets the writer of the next ones.
    """

    scratch: ClassVar[frozenset[str]] = frozenset({"_buffers", "_quantized", "_statistics"})

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._device = device
        self._hidden_size = hidden_size
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._quantized: dict[int, tuple[Tensor, Tensor]] = {}
        count = MAX_ROWS * hidden_size // FINEST_TILE * 2
        with torch.inference_mode(False):
            self._statistics = [torch.empty(count, device=device) for _ in (LAYER, HALF)]

    def buffer(self, role: str, width: int) -> Tensor:
        """bfloat16 ``[MAX_ROWS, width]``, the same for all blocks that ask for it."""
        key = role, width
        if key not in self._buffers:
            with torch.inference_mode(False):  # for all blocks: others write to it too
                self._buffers[key] = torch.empty(
                    MAX_ROWS, width, dtype=torch.bfloat16, device=self._device
                )
        return self._buffers[key]

    def quantized(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """E4m3 ``[rows, width]`` and fp32 ``[rows, 1]``, the same for all that ask for the width:
        what is written is read by the next kernel alone."""
        if width not in self._quantized:
            with torch.inference_mode(False):
                self._quantized[width] = (
                    torch.empty(MAX_ROWS, width, dtype=torch.float8_e4m3fn, device=self._device),
                    torch.empty(MAX_ROWS, 1, device=self._device),
                )
        numbers, scale = self._quantized[width]
        return numbers[:rows], scale[:rows]

    def residual(self, rows: int) -> Residual:
        """The residual stream of ``rows`` rows."""
        size = self._hidden_size
        return Residual(self, self.buffer("hidden", size)[:rows])

    def statistics(self, rows: int, where: int, per_tile: int) -> Tensor:
        """fp32 ``[rows, tiles, 2]`` at the end of a layer or in its middle, of ``per_tile``
        elements each."""
        count = rows * (self._hidden_size // per_tile) * 2
        return self._statistics[where][:count].view(rows, -1, 2)


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of one forward: ``hidden`` bfloat16 ``[R, hidden size]``."""

    workspace: Workspace
    hidden: Tensor

    @property
    def _scaled(self) -> Tensor:
        rows, size = self.hidden.shape
        return self.workspace.buffer("scaled", size)[:rows]

    def input_of(self, norm: Norm) -> Tensor:
        """What a GEMM that computes ``norm`` reads."""
        return self._scaled if norm.kind == RMS_NORM else self.hidden

    def scaled_for(self, reader: Norm | None) -> tuple[Tensor, Tensor] | None:
        """The weight of the reader's norm, and where the stream times it goes; None if it does
        not go anywhere."""
        if reader is None or reader.kind != RMS_NORM:
            return None
        return reader.weight, self._scaled

    def statistics(self, where: int, per_tile: int) -> Tensor:
        """Where a block leaves the partial statistics of ``per_tile`` elements each."""
        return self.workspace.statistics(self.hidden.shape[0], where, per_tile)

    def add(self, x: Tensor, bias: Tensor | None, reader: Norm | None, where: int) -> Tensor | None:
        """``hidden += x + bias``; the statistics for the reader, in one kernel with the sum."""
        return self._write(x, bias, self.hidden, reader, where)

    def replace(self, x: Tensor, reader: Norm | None, where: int) -> Tensor | None:
        """``hidden = x``; the statistics for the reader."""
        return self._write(x, None, None, reader, where)

    def _write(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        reader: Norm | None,
        where: int,
    ) -> Tensor | None:
        hidden = self.hidden
        statistics = None if reader is None else self.statistics(where, hidden.shape[1])
        _add_statistics(hidden)(
            x.reshape(hidden.shape), residual, hidden, x_bias=bias, statistics=statistics,
            scaled=self.scaled_for(reader),
        )  # fmt: skip
        return statistics


def _add_statistics(hidden: Tensor) -> Callable[..., None]:
    from megatron_async.kernels.norm import add_statistics

    return (
        add_statistics.add_statistics if hidden.is_cuda else add_statistics.add_statistics_reference
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over one token of each row.

    Args:
        token_ids, position_ids: int64 ``[R]``.
        context: its metadata are those of these rows.
        logits: bfloat16 ``[R, vocab]``, filled by the head.
        hidden_states: ``[R, hidden size]``, filled with those after the final norm; None if
            nobody wants them.
    """

    residual: Residual
    token_ids: Tensor
    position_ids: Tensor
    context: Any
    logits: Tensor
    hidden_states: Tensor | None
