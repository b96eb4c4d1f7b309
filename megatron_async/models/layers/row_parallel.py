"""megatron's row-parallel linear layer, whose partial sums take the way that suits their rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models import parallel

from megatron.core.tensor_parallel.layers import (  # isort: skip
    RowParallelLinear as MegatronRowParallelLinear,
)


class RowParallelLinear(MegatronRowParallelLinear):  # type: ignore[misc]
    """megatron's. Where it serves, several ranks add up by
    :meth:`~megatron_async.models.parallel.ModelParallel.sum_rows` in place of an all-reduce."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_ranks"] = parallel.current()

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[S, B, K]``, this rank's share of K, to the whole ``[S, B, N]``, and a bias that is yet
        to be added."""
        ranks: parallel.ModelParallel | None = self.__dict__["_ranks"]
        if ranks is None or torch.is_grad_enabled() or not self.input_is_parallel:
            result: tuple[Tensor, Tensor | None] = super().forward(input_)
            return result
        total = ranks.sum_rows(F.linear(input_, self.weight))
        if self.skip_bias_add:
            return total, self.bias
        return (total if self.bias is None else total + self.bias), None


class BiasedRowParallelLinear(RowParallelLinear):
    """One with a bias, whatever the config says."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)
