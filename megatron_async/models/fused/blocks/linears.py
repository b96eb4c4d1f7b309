"""The linear layers of a block: the column-parallel GEMM at its beginning, which norms the residual
stream, and the row-parallel one at its end, whose output becomes the stream.

A layer that quantizes its input has it quantized by a kernel of its own in front of either, where
the GEMM reads e4m3 (:meth:`~.gemms.Gemm.reads_e4m3`).

One rank: the epilogue of the row-parallel GEMM adds bias and residual and emits the statistics.
Several ranks, each with a share of K: the same epilogue adds up over the ranks before, or the GEMM
stores the partial sums of its rank. What adds these up (``rank_sums.py``) adds bias and residual,
too, and emits the statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async.kernels.gemm.skinny_gemm import Sending
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    FEW_ROWS,
    MANY_ROWS_KERNEL,
    NO_NORM,
    STORE,
    padded,
)
from megatron_async.models.fused.blocks.gemms import Gemm, SkinnyGemms, Work
from megatron_async.models.fused.blocks.kernel_parameters import scale_of
from megatron_async.models.fused.blocks.rank_sums import RankSums
from megatron_async.models.fused.blocks.residual import Norm, Residual
from megatron_async.models.fused.quantized_rows import (
    quantized_rows,
    quantized_stream,
    quantizes,
)


class ColumnParallel:
    """``out = epilogue(norm(hidden) W^T + bias)``.

    Args:
        name, layer: the GEMM's role, and whose it is.
        linear: has the weight ``[n, hidden size]``, and the bias.
        norm: of the residual stream.
        epilogue: see ``kernels/gemm/tile_config.py``.
    """

    def __init__(
        self, name: str, linear: Any, gemms: SkinnyGemms, norm: Norm, epilogue: int, layer: int
    ) -> None:
        self._linear, self._kernels, self._norm = linear, gemms, norm
        self._scale = scale_of(linear)
        self.gemm = gemms.declare(
            name, linear.weight, norm.kind, epilogue, layer, self._scale, quantizes(linear)
        )

    def __call__(self, residual: Residual, given: Tensor | None, out: Tensor) -> None:
        """Fill bfloat16 ``out``, of as many rows as the stream, whose statistics are ``given``."""
        linear, norm, rows = self._linear, self._norm, padded(residual.hidden.shape[0])
        kernel = self._kernels.get(self.gemm, rows)
        if self.gemm.reads_e4m3(rows):
            numbers, scale = quantized_stream(linear, norm, residual)
            kernel(
                numbers, linear.weight, out, bias=linear.bias, weight_scale=self._scale,
                input_scale=scale,
            )  # fmt: skip
            return
        kernel(
            residual.input_of(norm), linear.weight, out, bias=linear.bias, norm=norm.parameters,
            statistics=given, weight_scale=self._scale,
        )  # fmt: skip

    def work(self, rows: int) -> Iterator[Work]:
        """What is compiled for padded ``rows``."""
        yield self._kernels.work(self.gemm, rows)


class RowParallel:
    """``hidden += x W^T + bias`` over all ranks, and the statistics of the sum.

    Args:
        name, layer: the GEMM's role, and whose it is.
        linear: has the weight ``[hidden size, k]`` of this rank, and the bias of all.
        where: :data:`~.residual.LAYER` or :data:`~.residual.HALF`, where in a layer it stands.
        sums: over the ranks that share K; None for one rank.
    """

    def __init__(
        self,
        name: str,
        linear: Any,
        gemms: SkinnyGemms,
        where: int,
        sums: RankSums | None,
        layer: int,
    ) -> None:
        self._linear, self._kernels, self._where = linear, gemms, where
        self._sums, self._scale = sums, scale_of(linear)

        def declare(name: str, epilogue: int) -> Gemm:
            return gemms.declare(
                name, linear.weight, NO_NORM, epilogue, layer, self._scale, quantizes(linear)
            )

        self.gemm = declare(name, ADD if sums is None else STORE)
        self._summed = self.gemm if sums is None else declare(f"{name} and its sum", ADD)

    def _way(self, rows: int, context: Any) -> tuple[Gemm, Sending | None]:
        """The GEMM for padded ``rows``, and where it sends its output."""
        if self._sums is None:
            return self.gemm, None
        tiling = self._summed.tiling(rows)
        if tiling is None or (self._summed, rows) in self._kernels.too_large:
            return self.gemm, self._sending(rows)
        bare = tiling.kernel == MANY_ROWS_KERNEL
        sends = self._sums.summing(rows, context, bare=bare)
        if sends is not None and sends.takes(tiling, self.gemm.n):
            return self._summed, sends
        return self.gemm, self._sending(rows)

    def _sending(self, rows: int) -> Sending | None:
        """Where the GEMM sends what is summed behind it; None where its kernel stores it."""
        assert self._sums is not None
        tiling = self.gemm.tiling(rows)
        if tiling is not None and tiling.kernel == MANY_ROWS_KERNEL:
            return None
        return self._sums.sending(rows)

    def __call__(
        self, x: Tensor, residual: Residual, reader: Norm | None, context: Any
    ) -> Tensor | None:
        """``x`` is bfloat16 ``[R, k]``; returns the statistics for the reader."""
        rows, hidden = x.shape[0], residual.hidden
        gemm, sends = self._way(padded(rows), context)
        kernel = self._kernels.get(gemm, padded(rows), _kind(reader), sends)
        sums = self._sums if sends is not None and sends.sums else None
        if sums is not None and not sums.run_at_once(kernel):
            self._kernels.leave_unsummed(gemm, padded(rows))
            return self(x, residual, reader, context)
        weight, bias, scale = self._linear.weight, self._linear.bias, None
        if gemm.reads_e4m3(padded(rows)):
            x, scale = quantized_rows(self._linear, x, residual.workspace)
        if gemm.epilogue == ADD:
            statistics = residual.statistics(self._where, kernel.statistic_rows)
            kernel(
                x, weight, hidden, bias=bias, residual=hidden, scaled=residual.scaled_for(reader),
                statistics_out=statistics, weight_scale=self._scale, input_scale=scale,
            )  # fmt: skip
            return statistics if reader is not None else None
        assert self._sums is not None
        partial = self._sums.partial(residual) if sends is None else None
        kernel(x, weight, partial, weight_scale=self._scale, input_scale=scale)
        return self._sums.add(partial, bias, residual, reader, self._where)

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``; None if nothing is known against it."""
        if self._sums is None or rows <= FEW_ROWS:
            return None
        gemm, _ = self._way(rows, context)
        if gemm.epilogue == ADD:
            return None
        return f"of more than {FEW_ROWS} rows modules add up over ranks, if no GEMM does"

    def statistic_rows(self, rows: int) -> int | None:
        """Elements that one partial statistic of a step of ``rows`` rows covers, if the epilogue
        emits any."""
        tiling = self.gemm.tiling(padded(rows))
        if self.gemm.epilogue != ADD or tiling is None:
            return None
        return tiling.statistic_rows(padded(rows))

    def work(self, rows: int, reader: Norm | None, context: Any) -> Iterator[Work]:
        """What is compiled for padded ``rows``."""
        gemm, sends = self._way(rows, context)
        yield self._kernels.work(gemm, rows, _kind(reader), sends)
        if self._sums is not None and gemm.epilogue == STORE:
            yield from self._sums.work(rows, reader, sent=sends is not None)


def _kind(reader: Norm | None) -> int:
    return NO_NORM if reader is None else reader.kind
