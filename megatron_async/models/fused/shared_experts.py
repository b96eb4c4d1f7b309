"""Shared experts whose weights have another format than those of the routed ones: e4m3 beside 16
bits, or the reverse. They are two GEMMs around the kernels of the routed experts.

first linear layer (norm and activation inside) -> routed experts (add to the residual stream) ->
second one (adds to it, too)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async.models.fused.blocks.gemms import SkinnyGemms, Work, missing
from megatron_async.models.fused.blocks.kernel_parameters import epilogue_of, norm_of
from megatron_async.models.fused.blocks.linears import ColumnParallel, RowParallel
from megatron_async.models.fused.blocks.residual import LAYER, Norm, Residual


def linears_apart(mlp: Any) -> tuple[Any, ...]:
    """The linear layers of the shared experts of a mixture, where their format is not that of the
    routed ones; none where it is, or where nothing is shared."""
    shared = mlp.shared_experts
    if shared is None:
        return ()
    linears, routed = (shared.linear_fc1, shared.linear_fc2), mlp.kept_weights[:2]
    found = zip(linears, routed, strict=True)
    return linears if any(each.weight.dtype != other.dtype for each, other in found) else ()


def apart_why_not(mlp: Any, config: Any) -> str | None:
    """Why the GEMMs do not compute what :func:`linears_apart` found. Whether they take the weights
    is not asked here."""
    shared = mlp.shared_experts
    if shared.gate_weight is not None:
        return "shared experts of another format than the others have a gate"
    if any(linear.bias is not None for linear in linears_apart(mlp)):
        return "shared experts have a bias"
    if epilogue_of(shared, config) is None:
        return "the activation of its shared experts is not covered"
    return None


class SharedExperts:
    """The GEMMs of :func:`linears_apart`.

    Args:
        config: megatron's, of the model.
        layer: its mixture has such.
        where: the second one leaves statistics.
    """

    def __init__(self, config: Any, gemms: SkinnyGemms, layer: Any, where: int = LAYER) -> None:
        shared = layer.mlp.shared_experts
        epilogue = epilogue_of(shared, config)
        assert epilogue is not None
        norm, number = norm_of(layer.pre_mlp_layernorm), layer.layer_number
        self._fc1 = ColumnParallel("shared fc1", shared.linear_fc1, gemms, norm, epilogue, number)
        self._fc2 = RowParallel("shared fc2", shared.linear_fc2, gemms, where, None, number)
        self._gemms = {"shared fc1": self._fc1.gemm, "shared fc2": self._fc2.gemm}

    def why_not(self, rows: int) -> str | None:
        """Why they do not run for padded ``rows``; None if they do."""
        return missing(self._gemms, rows)

    def activated(self, residual: Residual, given: Tensor) -> Tensor:
        """The first linear layer of the stream, bfloat16 ``[R, shared]``. ``given`` are the
        statistics of the stream."""
        rows = residual.hidden.shape[0]
        out = residual.workspace.buffer("shared activated", self._fc2.gemm.k)[:rows]
        self._fc1(residual, given, out)
        return out

    def add(
        self, activated: Tensor, residual: Residual, reader: Norm | None, context: Any
    ) -> Tensor | None:
        """Add the second linear layer to the stream; returns the statistics for the reader."""
        return self._fc2(activated, residual, reader, context)

    def statistic_rows(self, rows: int) -> int | None:
        """See :class:`~.blocks.linears.RowParallel`."""
        return self._fc2.statistic_rows(rows)

    def work(self, rows: int, reader: Norm | None, context: Any) -> Iterator[Work]:
        """What is compiled for padded ``rows``."""
        if self.why_not(rows) is None:
            yield from self._fc1.work(rows)
            yield from self._fc2.work(rows, reader, context)
