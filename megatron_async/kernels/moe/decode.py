"""A decode step's layer of experts in three kernels: router, and two grouped GEMMs.

Norm and router (``routing/``) -> first linear layers and activation -> second ones, added up over a
row's experts and to the residual stream (``experts_triton.py``). Nothing is sorted: the router
writes a table of which expert has which row, in a kernel of its own where these are many. Shared
experts of a multiple of the routed ones' size are experts that each row has. No value reaches the
host. Few rows have a kernel of their own (``row.py``); so have linear layers in e4m3 and MXFP4, and
in bfloat16 for many rows (``widened/``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.fitting import launch_fitting
from megatron_async.kernels.moe import row
from megatron_async.kernels.moe.experts_triton import down_kernel, up_kernel
from megatron_async.kernels.moe.reference import Routing
from megatron_async.kernels.moe.routing.choice_triton import BLOCK_E, GATE_PLACES
from megatron_async.kernels.moe.routing.router_triton import choose_kernel, router_kernel
from megatron_async.kernels.moe.settings import SIGMOID
from megatron_async.kernels.moe.shape import Live, MoeShape, MoeWeights
from megatron_async.kernels.moe.tiles import (
    CHOICE_ROWS,
    MAX_ROWS,
    MoeTiles,
    RouterTile,
    Tile,
    choose_tiles,
    chosen_apart,
    fewer_rows,
    padded_rows,
    router_tile,
    smaller,
    smaller_chunks,
)
from megatron_async.kernels.moe.widened import experts as widened
from megatron_async.kernels.pdl import uses_pdl
from megatron_async.kernels.shared_memory import block_limit

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.skinny_gemm import Sending

logger = logging.getLogger(__name__)


class MoeDecode:
    """Layers of one shape on one device. Buffers are static: one layer runs at a time.

    Args:
        one_kernel: whether ``row.py`` computes the few rows that it takes; None follows
            ``trial.MOE_ROW`` and the device.
        widens: whether ``widened/`` computes the layers that it takes; None follows
            ``trial.MOE_WIDENED`` and the device.

    Attributes:
        count: int32 ``[1]``, experts that the last layer read, shared ones included.
        normed: ``[MAX_ROWS, H]``, what :meth:`route` made of the rows.
    """

    def __init__(
        self,
        shape: MoeShape,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        sm_count: int = 132,
        tiles: MoeTiles | None = None,
        one_kernel: bool | None = None,
        widens: bool | None = None,
    ) -> None:
        self.shape, self._device, self._dtype = shape, device, dtype
        if one_kernel is None:
            one_kernel = trial.MOE_ROW and row.runs_on(device)
        self._row = row.MoeRow(shape, device, sm_count) if one_kernel else None
        self._fixed, self._sm_count = tiles, sm_count
        self._limit = block_limit(device)
        if widens is None:
            widens = trial.MOE_WIDENED and tiles is None and row.runs_on(device)
        self._widened: widened.WidenedExperts | None = None
        experts = shape.held + shape.shared
        self._blocks = triton.cdiv(shape.settings.num_experts, BLOCK_E.value)
        self._splits = triton.cdiv(shape.hidden, self._router_tile(MAX_ROWS).block_h)
        most = max(self.tiles(rows).down.splits for rows in (16, 32, MAX_ROWS))
        width = self._blocks * BLOCK_E.value + GATE_PLACES.value
        with torch.inference_mode(False):
            self.count = self._integers(1)
            self._arrivals = self._integers(1 + triton.cdiv(shape.hidden, 16))
            self.ids = self._integers(MAX_ROWS, shape.slots)
            self._experts = self._integers(experts)
            self._bits = torch.zeros(experts, dtype=torch.int64, device=device)
            self._row_bits = torch.zeros(self._columns + 1, dtype=torch.int64, device=device)
            self.weights = self._floats(MAX_ROWS, shape.slots)
            self._weight_of = self._floats(experts, MAX_ROWS)
            self._logits = self._floats(self._splits * MAX_ROWS * width)
            self._partial = self._floats(most * MAX_ROWS * shape.hidden if most > 1 else 1)
            self.normed = torch.empty(MAX_ROWS, shape.hidden, dtype=dtype, device=device)
            # By expert and row, or for ``widened/`` by row and place.
            blocks = max(shape.most_experts(MAX_ROWS), shape.slots)
            self._activated = torch.empty(
                blocks * MAX_ROWS, shape.inner, dtype=dtype, device=device
            )
        if widens:
            self._widen(sm_count)

    def _widen(self, sm_count: int) -> None:
        """Leave the linear layers to ``widened/``, if it takes them."""
        reason = widened.why_not(self.shape, self._dtype, self._limit)
        if reason is None:
            self._widened = widened.WidenedExperts(
                self.shape, self._device, sm_count, activated=self._activated
            )
        elif self.shape.weight_size is not None:
            logger.warning("layers of experts are widened by Triton's slower kernels: %s", reason)

    def _integers(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=self._device)

    def _floats(self, *size: int) -> Tensor:
        return torch.zeros(*size, device=self._device)

    def tiles(self, rows: int) -> MoeTiles:
        """Return the tiles of a step of ``rows`` rows."""
        shape = self.shape
        return self._fixed or choose_tiles(
            shape.hidden, shape.inner, padded_rows(rows), self._sm_count,
            element_size=self._dtype.itemsize, limit=self._limit,
            weight_size=shape.weight_size, scale_steps=shape.scale_steps,
        )  # fmt: skip

    def _router_tile(self, rows: int) -> RouterTile:
        return router_tile(
            rows, self._columns, element_size=self._dtype.itemsize, limit=self._limit
        )

    @property
    def _columns(self) -> int:
        """Experts, padded by group."""
        groups, experts = self.shape.settings.num_groups, self.shape.settings.num_experts
        padded = triton.next_power_of_2(groups) * triton.next_power_of_2(experts // groups)
        return int(padded)

    def statistic_rows(self, rows: int) -> int:
        """Return the elements that one partial statistic of a step of ``rows`` rows covers."""
        few = self._of_few(rows)
        if few is not None:
            return few.statistic_rows
        return (self._widened_of(rows) or self.tiles(rows).down).statistic_rows

    @property
    def has_one_kernel(self) -> bool:
        """There is one that takes a few rows."""
        return any(self._of_few(rows) is not None for rows in range(1, row.MOST_ROWS + 1))

    def without(self, source: str, reason: str) -> bool:
        """Leave a CUDA kernel that the GPU does not run to the others; whether these can."""
        if source == row.SOURCE:
            if self._row is not None:
                logger.warning("layers of experts take three kernels for a few rows: %s", reason)
            self._row = None
        elif source == widened.SOURCE:
            if self._widened is not None:
                logger.warning("layers of experts are multiplied by Triton's kernels: %s", reason)
            self._widened = None
        return source in (row.SOURCE, widened.SOURCE)

    @property
    def _holds_all(self) -> bool:
        return self.shape.held == self.shape.settings.num_experts

    def _of_few(self, rows: int) -> row.MoeRow | None:
        """Return the one kernel, if it takes ``rows`` rows, and is the quickest that does."""
        if self._row is None or not self._holds_all:
            return None
        if self._widened is not None and rows >= widened.least_beside_one_kernel(self.shape):
            return None
        refused = row.why_not(self.shape, rows, self._dtype, self._sm_count, self._limit)
        return self._row if refused is None else None

    def _widened_of(self, rows: int) -> widened.WidenedExperts | None:
        """Return ``widened/``, if it computes steps of ``rows`` rows."""
        return self._widened if rows >= widened.least_rows(self.shape) else None

    def __call__(
        self,
        weights: MoeWeights,
        hidden: Tensor,
        statistics: Tensor,
        eps: float,
        out: Tensor,
        *,
        live: Live | None = None,
        residual: Tensor | None = None,
        statistics_out: Tensor | None = None,
        scaled: tuple[Tensor, Tensor] | None = None,
        one_launch: bool = False,
        sums: Sending | None = None,
    ) -> None:
        """``out = experts(norm(hidden)) + residual``, for up to :data:`MAX_ROWS` rows.

        Args:
            hidden: ``[T, H]``.
            statistics: fp32 ``[T, tiles, 2]``, those of ``hidden``, see
                ``kernels/norm/add_statistics.py``.
            out: ``[T, H]``; may be ``hidden``.
            residual: ``[T, H]``; may be ``out``.
            statistics_out: fp32 ``[T, H / statistic_rows, 2]``, those of ``out``; with ``scaled``
                for an RMSNorm, else for a LayerNorm. None computes none.
            scaled: the weight ``[H]`` of the RMSNorm that comes next, and where ``out`` times it
                goes.
            one_launch: the kernel of a few rows may wait for its own CTAs, see
                ``device/waiting_grids.py``.
            sums: over the ranks that have a share of each expert, where :meth:`sums_over_ranks`;
                they sum what each has, but for the residual. All call it alike.
        """
        rows = hidden.shape[0]
        few = self._of_few(rows)
        if few is not None:
            found = row.Found(self.ids[:rows], self.weights[:rows], self.count)
            few(
                weights, hidden, statistics, eps, out, found, live=live, residual=residual,
                statistics_out=statistics_out, scaled=scaled, one_launch=one_launch, sums=sums,
            )  # fmt: skip
            return
        assert sums is None
        self.route(weights, hidden, statistics, eps, live)
        self.up(weights, rows)
        self.down(weights, out, residual, statistics_out, scaled)

    def sums_over_ranks(self, rows: int) -> bool:
        """Whether the kernel that computes ``rows`` rows in one launch can sum over ranks."""
        return self._of_few(rows) is not None

    def work(
        self, rows: int, *, gate: bool, one_launch: bool, sums: Sending | None = None
    ) -> list[tuple[str, dict[str, int]]]:
        """Return the CUDA kernels of a step of ``rows`` rows, for
        :func:`~.compile.compile_together`; Triton compiles at the first call."""
        few = self._of_few(rows)
        if few is not None:
            return few.work(rows, gate=gate, one_launch=one_launch, sums=sums)
        of_rows = self._widened_of(rows)
        return [] if of_rows is None or rows > MAX_ROWS else of_rows.work(rows)

    @property
    def chosen(self) -> widened.Chosen:
        """What :meth:`route` left."""
        return widened.Chosen(self._experts, self._bits, self.count, self.ids, self.weights)

    def routing(self, rows: int) -> Routing:
        """Return what :meth:`route` chose for ``rows`` rows; experts have their number among those
        that there are weights of, and the others none."""
        chosen = slice(self.shape.settings.top_k)
        return Routing(self.ids[:rows, chosen], self.weights[:rows, chosen])

    def route(
        self,
        weights: MoeWeights,
        hidden: Tensor,
        statistics: Tensor,
        eps: float,
        live: Live | None = None,
    ) -> None:
        """Norm the rows and choose their experts."""
        shape, settings = self.shape, self.shape.settings
        rows = hidden.shape[0]
        of_group = triton.next_power_of_2(settings.num_experts // settings.num_groups)
        norm_weight, norm_bias = weights.norm

        apart, columns = chosen_apart(rows, self._columns), self._columns
        expert_bias = _or(weights.expert_bias, self.weights)
        bias, live_values = _or(weights.router_bias, hidden), self._experts
        first_live = 0
        if live is not None:
            live_values, first_live = live.values, live.first
        choice: dict[str, object] = {
            "EXPERTS": settings.num_experts, "FIRST": shape.expert_begin, "HELD": shape.held,
            "TOP_K": settings.top_k, "SHARED": shape.shared, "ROWS": padded_rows(rows),
            "SPLITS": self._splits, "EXPERT_BLOCKS": self._blocks,
            "HAS_BIAS": weights.router_bias is not None,
            "HAS_EXPERT_BIAS": weights.expert_bias is not None,
            "HAS_GATE": weights.shared_gate is not None, "HAS_LIVE": live is not None,
            "SIGMOID": settings.score_function == SIGMOID, "PRE_SOFTMAX": settings.pre_softmax,
            "NORMALIZE": settings.normalize, "GROUPS": settings.num_groups,
            "KEPT": settings.kept_groups, "SUMMED": settings.group_score_experts,
            "GROUPS_PADDED": columns // of_group, "OF_GROUP_PADDED": of_group,
            "PLACES": triton.next_power_of_2(shape.slots),
        }  # fmt: skip

        def launch(tile: RouterTile) -> None:
            router_kernel[(self._blocks * self._splits,)](
                hidden, norm_weight, _or(norm_bias, norm_weight), statistics, statistics.shape[1],
                eps, weights.router, bias, expert_bias, _or(weights.shared_gate, hidden),
                live_values, first_live, settings.scaling_factor, self.normed,
                self._logits, self._arrivals, self.ids, self.weights, self._experts, self._bits,
                self._weight_of, self.count, rows,
                HIDDEN=shape.hidden, CHUNK=tile.chunk, BLOCK_H=tile.block_h, CENTER=shape.center,
                HAS_NORM_BIAS=norm_bias is not None, APART=apart, **choice, **self._common(),
                num_warps=4 if rows <= 4 else 8,
            )  # fmt: skip

        launch_fitting("the router of experts", self._router_tile(rows), smaller_chunks, launch)
        if not apart:
            return

        pdl = uses_pdl(self._device)

        def choose(chunk: int) -> None:
            choose_kernel[(padded_rows(rows) // chunk,)](
                bias, expert_bias, live_values, first_live, settings.scaling_factor, self._logits,
                self._arrivals, self._row_bits, self.ids, self.weights, self._experts, self._bits,
                self._weight_of, self.count, rows, CHUNK=chunk, **choice, PDL=pdl, launch_pdl=pdl,
                num_warps=CHOICE_ROWS,
            )  # fmt: skip

        launch_fitting("the choice of experts", CHOICE_ROWS, fewer_rows, choose)

    def up(self, weights: MoeWeights, rows: int) -> None:
        """First linear layers and activation of the experts that :meth:`route` chose."""
        of_rows = self._widened_of(rows)
        if of_rows is not None:
            of_rows.up(weights, rows, self.normed, self.chosen)
            return
        shape, activation, columns = self.shape, self.shape.activation, self.shape.scale_columns

        def launch(tile: Tile) -> None:
            blocks = triton.cdiv(shape.inner, tile.block_n // (2 if activation.gated else 1))
            up_kernel[(blocks * shape.most_experts(rows),)](
                self.normed, self._words(weights.w1), _or(weights.b1, weights.w1),
                _or(weights.shared_w1, weights.w1), self._experts, self._bits, self._weight_of,
                self.count, self._activated, _or(weights.w1_scale, self.weights),
                _or(weights.shared_w1_scale, self.weights),
                HIDDEN=shape.hidden, INNER=shape.inner, EXPERTS=shape.held,
                SHARED=shape.shared, ROWS=padded_rows(rows), BLOCK_N=tile.block_n,
                BLOCK_K=tile.block_k, BLOCKS=blocks, GATED=activation.gated,
                FUNCTION=activation.function, LIMIT=activation.limit, OFFSET=activation.offset,
                HAS_BIAS=weights.b1 is not None, SWAP=tile.swap, NUM_STAGES=tile.stages,
                E4M3=columns is not None and columns.w1 > 0, COLUMNS=columns.w1 if columns else 0,
                SHARED_COLUMNS=columns.shared_w1 if columns else 0, MXFP4=shape.is_packed,
                **self._common(), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        launch_fitting("experts, first layers", self.tiles(rows).up, smaller, launch)

    def down(
        self,
        weights: MoeWeights,
        out: Tensor,
        residual: Tensor | None = None,
        statistics_out: Tensor | None = None,
        scaled: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Second linear layers, added up; after :meth:`up`."""
        of_rows = self._widened_of(out.shape[0])
        if of_rows is not None:
            sums = widened.Sums(out, residual, statistics_out, scaled)
            of_rows.down(weights, out.shape[0], self.chosen, sums)
            return
        shape, rows, columns = self.shape, out.shape[0], self.shape.scale_columns
        next_weight, scaled_out = scaled or (out, out)

        def launch(tile: Tile) -> None:
            down_kernel[(triton.cdiv(shape.hidden, tile.block_n) * tile.splits,)](
                self._activated, self._words(weights.w2), _or(weights.b2, weights.w2),
                _or(weights.shared_w2, weights.w2), self._experts, self._bits, self.count, self.ids,
                self.weights, self._partial, self._arrivals[1:], _or(residual, out), out,
                _or(statistics_out, self.weights), next_weight, scaled_out, rows,
                _or(weights.w2_scale, self.weights), _or(weights.shared_w2_scale, self.weights),
                HIDDEN=shape.hidden, INNER=shape.inner, EXPERTS=shape.held,
                SHARED=shape.shared, ROWS=padded_rows(rows), SLOTS=shape.slots,
                BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=tile.splits,
                HAS_BIAS=weights.b2 is not None, HAS_RESIDUAL=residual is not None,
                STATISTICS=statistics_out is not None,
                CENTER=scaled is None, SWAP=tile.swap, NUM_STAGES=tile.stages, **self._common(),
                E4M3=columns is not None and columns.w2 > 0, COLUMNS=columns.w2 if columns else 0,
                SHARED_COLUMNS=columns.shared_w2 if columns else 0, MXFP4=shape.is_packed,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        launch_fitting("experts, second layers", self.tiles(rows).down, smaller, launch)

    def _words(self, weight: Tensor) -> Tensor:
        """The weight as the kernels read it: MXFP4 by words."""
        return weight.view(torch.int32) if self.shape.is_packed else weight

    def _common(self) -> dict[str, object]:
        pdl = uses_pdl(self._device)
        precision = "ieee" if self._dtype is torch.float32 else "tf32"
        return {"PRECISION": precision, "PDL": pdl, "launch_pdl": pdl}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """``other`` where there is none: a pointer that is not followed."""
    return other if tensor is None else tensor
