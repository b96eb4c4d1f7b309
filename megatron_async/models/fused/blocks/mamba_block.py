"""A Mamba-2 layer in three kernels.

input projection (norm inside) -> convolution, state update, gate and norm -> output projection
(adds to the residual stream)

Rows and windows alike: the GEMMs see all tokens as rows, and the kernel between them reads and
writes each row's state once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async.kernels.gemm.tile_config import FEW_ROWS, STORE, padded
from megatron_async.models.fused.blocks.gemms import SkinnyGemms, Work, missing
from megatron_async.models.fused.blocks.kernel_parameters import norm_of
from megatron_async.models.fused.blocks.linears import ColumnParallel, RowParallel
from megatron_async.models.fused.blocks.residual import Norm, Step
from megatron_async.models.mamba.states import kernels_of, layer_states, step_rows


class MambaBlock:
    """Norm, input projection, mixer, output projection, residual addition of one layer.

    Args:
        layer: one that ``coverage.mamba_why_not`` has nothing against.
        where: it leaves statistics.
    """

    def __init__(self, layer: Any, gemms: SkinnyGemms, where: int) -> None:
        self._mixer = mixer = layer.mixer
        self.norm: Norm = norm_of(layer.norm)
        number = layer.layer_number
        self._in_proj = ColumnParallel("in_proj", mixer.in_proj, gemms, self.norm, STORE, number)
        self._out_proj = RowParallel("out_proj", mixer.out_proj, gemms, where, None, number)
        self._gemms = {"in_proj": self._in_proj.gemm, "out_proj": self._out_proj.gemm}

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``; None if it does."""
        if rows > FEW_ROWS:
            return f"more than {FEW_ROWS} rows of a Mamba-2 layer"
        return missing(self._gemms, rows)

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add the layer's mixer to the residual stream, see :class:`~.attention_block`."""
        residual, context, parameters = step.residual, step.context, self._mixer.parameters_between
        rows = residual.hidden.shape[0]
        projected = residual.workspace.buffer("projected", self._in_proj.gemm.n)[:rows]
        self._in_proj(residual, given, projected)
        kernels = kernels_of(parameters, context)
        assert kernels is not None
        mixed = kernels.mixed(rows)
        kernels.mix_rows(
            projected, parameters, layer_states(context, self._mixer.state_layer),
            step_rows(context).decode, mixed, most=context.states.step.decode.window,
        )  # fmt: skip
        return self._out_proj(mixed, residual, reader, step.context)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens; the mixer's kernel comes with the first of them."""
        most = padded(rows)
        if self.why_not(most, context) is None:
            yield from self._in_proj.work(most)
            yield from self._out_proj.work(most, reader, context)
