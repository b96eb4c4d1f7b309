"""A layer of experts as the kernels take it: its shape, its weights, and which rows are live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What kernels of a layer are compiled for.

    Args:
        hidden, inner: sizes; ``inner`` is one expert's.
        shared: shared experts of ``inner`` each.
        center: the norm is a LayerNorm, else an RMSNorm.
        expert_begin, expert_end: the experts that there are weights of, of all that the router
            chooses from; None for the last one. What rows have of others counts as zero.
    """

    hidden: int
    inner: int
    settings: RouterSettings
    activation: ExpertActivation
    shared: int = 0
    center: bool = False
    expert_begin: int = 0
    expert_end: int | None = None

    @property
    def held(self) -> int:
        """Experts that there are weights of."""
        end = self.settings.num_experts if self.expert_end is None else self.expert_end
        return end - self.expert_begin

    @property
    def slots(self) -> int:
        """Experts of a row, shared ones included."""
        return self.settings.top_k + self.shared

    def most_experts(self, rows: int) -> int:
        """The most experts that ``rows`` rows may need, shared ones included."""
        return min(self.held, rows * self.settings.top_k) + self.shared


class MoeWeights(NamedTuple):
    """Parameters of a layer, contiguous and of one dtype but for ``expert_bias``, which is fp32.

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


class Live(NamedTuple):
    """Row t is live where ``values[t] >= first``; int64 ``[T]``. The others read no expert."""

    values: Tensor
    first: int
