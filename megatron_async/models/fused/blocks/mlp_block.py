"""A layer's MLP in two kernels.

first linear layer (norm and activation inside) -> second one (adds to the residual stream)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async.kernels.gemm.tile_config import padded
from megatron_async.models.fused.blocks.gemms import SkinnyGemms, Work, missing
from megatron_async.models.fused.blocks.kernel_parameters import epilogue_of, norm_of
from megatron_async.models.fused.blocks.linears import ColumnParallel, RowParallel
from megatron_async.models.fused.blocks.rank_sums import RankSums
from megatron_async.models.fused.blocks.residual import LAYER, Norm, Step


class MlpBlock:
    """Norm, first linear layer, activation, second linear layer, residual addition of one layer.

    Args:
        layer: one that ``coverage.mlp_why_not`` has nothing against.
        config: megatron's, of the model.
        sums: over the ranks that share the intermediate dimension; None for one rank.
        where: it leaves statistics.
    """

    def __init__(
        self,
        layer: Any,
        config: Any,
        gemms: SkinnyGemms,
        sums: RankSums | None = None,
        where: int = LAYER,
    ) -> None:
        mlp = layer.mlp
        epilogue = epilogue_of(mlp, config)
        assert epilogue is not None
        self.norm: Norm = norm_of(layer.pre_mlp_layernorm)
        number = layer.layer_number
        self._fc1 = ColumnParallel("fc1", mlp.linear_fc1, gemms, self.norm, epilogue, number)
        self._fc2 = RowParallel("fc2", mlp.linear_fc2, gemms, where, sums, number)
        self._gemms = {"fc1": self._fc1.gemm, "fc2": self._fc2.gemm}

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``; None if it does."""
        return self._fc2.why_not(rows, context) or missing(self._gemms, rows)

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add the layer's MLP to the residual stream, see :class:`~.attention_block.AttentionBlock`
        for the arguments."""
        residual = step.residual
        rows = residual.hidden.shape[0]
        activated = residual.workspace.buffer("activated", self._fc2.gemm.k)[:rows]
        self._fc1(residual, given, activated)
        return self._fc2(activated, residual, reader, step.context)

    def statistic_rows(self, rows: int) -> int | None:
        """Elements that one partial statistic at the end of the block covers, if it emits any."""
        return self._fc2.statistic_rows(rows)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens."""
        most = padded(rows)
        if self.why_not(most, context) is None:
            yield from self._fc1.work(most)
            yield from self._fc2.work(most, reader, context)
