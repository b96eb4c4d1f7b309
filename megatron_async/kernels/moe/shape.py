"""A layer of experts as the kernels take it: its shape, its weights, and which rows are live."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings


class ScaleColumns(NamedTuple):
    """Columns of a row that share a scale, in e4m3 weights of :class:`MoeWeights` by their names;
    all columns of the row for a scale a row. 0 stands for a weight that is none of e4m3: both of
    the first, or both of the second, and those of shared experts that there are not."""

    w1: int
    w2: int
    shared_w1: int = 0
    shared_w2: int = 0

    @property
    def are_all(self) -> bool:
        """Whether the first weights are e4m3 as well as the second ones."""
        return self.w1 > 0 and self.w2 > 0


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What kernels of a layer are compiled for.

    Args:
        hidden, inner: sizes; ``inner`` is one expert's.
        shared: shared experts of ``inner`` each.
        center: the norm is a LayerNorm, else an RMSNorm.
        expert_begin, expert_end: the experts that there are weights of, of all that the router
            chooses from; None for the last one. What rows have of others counts as zero.
        scale_columns: of e4m3 weights; None for weights of the dtype of the rows.
        is_packed: the weights of experts are MXFP4, see ``mxfp4.py``.
    """

    hidden: int
    inner: int
    settings: RouterSettings
    activation: ExpertActivation
    shared: int = 0
    center: bool = False
    expert_begin: int = 0
    expert_end: int | None = None
    scale_columns: ScaleColumns | None = None
    is_packed: bool = False

    @property
    def held(self) -> int:
        """Experts that there are weights of."""
        end = self.settings.num_experts if self.expert_end is None else self.expert_end
        return end - self.expert_begin

    @property
    def weight_size(self) -> float | None:
        """Bytes of an element of weights that are widened; None where not all are."""
        if self.is_packed:
            return 0.5
        return 1 if self.scale_columns is not None and self.scale_columns.are_all else None

    @property
    def slots(self) -> int:
        """Experts of a row, shared ones included."""
        return self.settings.top_k + self.shared

    def most_experts(self, rows: int) -> int:
        """The most experts that ``rows`` rows may need, shared ones included."""
        return min(self.held, rows * self.settings.top_k) + self.shared

    @property
    def scale_steps(self) -> tuple[int, int]:
        """Steps through a row of the first and of the second weight, in columns, that are such that
        all columns of a step have one scale; 0 where any step is."""
        columns, all_shared = self.scale_columns, self.shared * self.inner
        if columns is None:
            return 0, 0
        first, second = (
            0 if of_group == of_row else of_group
            for of_group, of_row in ((columns.w1, self.hidden), (columns.w2, self.inner))
        )
        if self.shared and columns.shared_w1 not in (0, self.hidden):
            first = math.gcd(first, columns.shared_w1)
        if self.shared and columns.shared_w2 not in (0, all_shared):
            # A shared expert may begin within a group.
            second = math.gcd(second, columns.shared_w2, self.inner)
        return first, second


class MoeWeights(NamedTuple):
    """Parameters of a layer, contiguous and of one dtype but for ``expert_bias``, which is fp32.

    The first weights of experts and of shared ones may be e4m3, and so may the second ones. Then
    each has scales, fp32 and of its shape but for the columns, of which as many share one as
    :class:`ScaleColumns` says. Those of experts may be MXFP4, with its scales.

    ``norm`` is weight ``[H]`` and bias ``[H]`` or None; the others are those of
    ``reference.py``. ``shared_w1`` is ``[2 S, H]`` or ``[S, H]``, ``shared_w2`` ``[H, S]`` with
    ``S = shared * inner``; ``shared_gate`` ``[1, H]`` weighs them by a sigmoid.
    """

    norm: tuple[Tensor, Tensor | None]
    router: Tensor
    w1: Tensor
    w2: Tensor
    router_bias: Tensor | None = None
    expert_bias: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_gate: Tensor | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    shared_w1_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None


class Live(NamedTuple):
    """Row t is live where ``values[t] >= first``; int64 ``[T]``. The others read no expert."""

    values: Tensor
    first: int
