"""A layer of experts for few rows in one kernel: how ``moe_row.cu`` is built and called.

For few rows three launches are mostly latency: here the grid routes, and then streams the weights
of the chosen experts, in one. All its CTAs run at once and wait for each other's words, which not
every engine may do (``device/waiting_grids.py``). Three launches of the same source, a phase each,
wait for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import Bf16, Fp32, Int32, Int64, kernel
from megatron_async.kernels.moe.settings import SIGMOID
from megatron_async.kernels.ranks.peers import Peers
from megatron_async.kernels.shared_memory import HOPPER_BYTES, STATIC_BYTES, block_limit

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.skinny_gemm import Sending
    from megatron_async.kernels.moe.shape import Live, MoeShape, MoeWeights

SOURCE = "moe_row"
Bytes = Annotated[Tensor, torch.uint8]
Weights = Annotated[Tensor, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
MOST_ROWS = 4
THREADS, LOADS = 256, 8
"""Threads of a CTA, and loads of a thread in a step, 16 bytes each: two steps of loads are on their
way."""
E4M3_THREADS = 512
"""Threads where weights are e4m3, which take instructions to widen, if each warp has two rows of
the first linear layers or more: those of some warps hide what others wait for. On an H200 four
layers and the output layer of Qwen3-30B-A3B took 297.4 us with it and 298.8 with 256; of a rank of
two 200.3 and 197.9."""
FEW_LOADS = 16
"""Loads of a thread of bfloat16 where a warp has less than four such rows: four layers and the
output layer of a rank of two took 208.7 us with it and 210.4 with 8; of one rank 329.4 and
325.7."""
CLAIMED = 2
"""Sixteenths of the rows of the first linear layers that no CTA is dealt: those that come first,
which the memory served faster, take them."""
MIN_SHARED_BYTES = 116 * 1024
"""One CTA on an SM, not two on one and none on another."""
_MOST_SLOTS = _MOST_GROUPS = 32
_MOST_EXPERTS, _MOST_HIDDEN = 512, 8192
"""A thread has what it needs of the router's weights in registers."""
FUNCTIONS = ("silu", "quick_gelu", "gelu", "gelu_tanh", "squared_relu", "relu")
"""By their numbers in ``moe_activation.cuh``."""
_TILES = (8, 16)
_GAIN = 0.9
"""The smaller tile is taken if it leaves the busiest CTA at most such a share of the columns."""


class RowArguments(NamedTuple):
    """Parameters of ``moe_row.cu``, in order."""

    x: Bf16
    stats_in: Fp32
    stats_tiles: int
    eps: float
    norm_weight: Bf16
    norm_bias: Bf16 | None
    router: Bf16
    router_bias: Bf16 | None
    expert_bias: Fp32 | None
    gate: Bf16 | None
    live: Int64 | None
    first_live: int
    scaling: float
    w1: Weights
    b1: Bf16 | None
    shared_w1: Weights | None
    w2: Weights
    b2: Bf16 | None
    shared_w2: Weights | None
    limit: float
    offset: float
    launches: Int32
    logits: Int32
    activated: Int32
    claims: Int32
    ids: Int32
    weights: Fp32
    found: Int32
    residual: Bf16 | None
    out: Bf16
    stats_out: Fp32 | None
    next_weight: Bf16 | None
    scaled: Bf16 | None


class RowScales(NamedTuple):
    """Further parameters of ``moe_row.cu`` with ``W8``, in order."""

    w1_scale: Fp32
    shared_w1_scale: Fp32 | None
    w2_scale: Fp32
    shared_w2_scale: Fp32 | None


class PackedRowScales(NamedTuple):
    """:class:`RowScales` with ``W4``."""

    w1_scale: Bytes
    shared_w1_scale: Bytes | None
    w2_scale: Bytes
    shared_w2_scale: Bytes | None


class RowSumming(NamedTuple):
    """Further parameters of ``moe_row.cu`` with ``SUMS``, in order; those of ``ranks/peers.py``
    follow."""

    own_rank: int
    received: Int64
    rank_launches: Int32


class Found(NamedTuple):
    """Where a launch leaves what it chose, as :class:`~.decode.MoeDecode` has it: experts and their
    weights for each row, and of how many experts it read."""

    ids: Tensor
    weights: Tensor
    experts: Tensor


def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    return device.type == "cuda" and cuda.unavailable(device.index or 0) is None


def why_not(
    shape: MoeShape, rows: int, dtype: torch.dtype, sm_count: int, limit: int = HOPPER_BYTES
) -> str | None:
    """Why the kernel does not take ``rows`` rows of this shape on a GPU whose CTAs have ``limit``
    bytes of shared memory; None if it does."""
    settings = shape.settings
    if dtype != torch.bfloat16:
        return f"{dtype} is not covered"
    if shape.is_packed and shape.shared:
        return "MXFP4 weights beside shared experts are not covered"
    if shape.scale_columns is not None and not shape.scale_columns.are_all:
        return "weights of two formats are not covered"
    if not 1 <= rows <= MOST_ROWS:
        return f"{rows} rows are not from 1 to {MOST_ROWS}"
    if rows > 1 and rows * settings.top_k > settings.num_experts // 2:
        return f"{rows} rows would read some of {settings.num_experts} experts several times"
    if shape.hidden % 16 or shape.inner % 16 or shape.hidden > _MOST_HIDDEN:
        return f"experts of {shape.inner} x {shape.hidden} are not covered"
    if settings.num_experts > _MOST_EXPERTS or shape.slots > _MOST_SLOTS:
        return f"{shape.slots} of {settings.num_experts} experts are not covered"
    if settings.kept_groups < settings.num_groups and settings.num_groups > _MOST_GROUPS:
        return f"{settings.num_groups} groups are more than {_MOST_GROUPS}"
    if shared_bytes(shape, rows, sm_count, most_threads(shape, sm_count)) > limit:
        return f"{rows} rows of {shape.slots} x {shape.inner} do not fit into shared memory"
    return None


def tile(hidden: int, ctas: int) -> int:
    """Columns of the output that one partial statistic covers: those of a CTA at a time."""
    fine, coarse = (-(-hidden // size // ctas) * size for size in _TILES)
    return _TILES[0] if fine <= _GAIN * coarse else _TILES[1]


def most_threads(shape: MoeShape, ctas: int) -> int:
    """Threads of a CTA, where a tile has a column for each warp."""
    is_e4m3 = shape.scale_columns is not None and not shape.is_packed
    return E4M3_THREADS if is_e4m3 and _rows_of_warp(shape, ctas, E4M3_THREADS) >= 2 else THREADS


def most_loads(shape: MoeShape, ctas: int) -> int:
    """Loads of a thread in a step."""
    is_few = shape.weight_size is None and _rows_of_warp(shape, ctas, THREADS) < 4
    return FEW_LOADS if is_few else LOADS


def _rows_of_warp(shape: MoeShape, ctas: int, threads: int) -> float:
    """Rows of the first linear layers that a warp has of a step of one row."""
    return shape.slots * shape.inner / (ctas * threads // 32)


def shared_bytes(shape: MoeShape, rows: int, ctas: int, threads: int = THREADS) -> int:
    """What a CTA takes of shared memory, at most."""
    logits = -(-(shape.settings.num_experts + 1) // ctas)
    for_a_row = 2 * (shape.hidden + shape.slots * shape.inner) + 24 * shape.slots + 2 * 4 * 16
    for_a_row += 8 * (shape.settings.num_experts + 1)
    return rows * (for_a_row + threads // 32 * (4 * logits + 8) + 4) + 32


def scale_macros(shape: MoeShape) -> dict[str, int]:
    """Macros of ``moe_row.cu`` for e4m3 and MXFP4 weights; none for others."""
    columns = shape.scale_columns
    if shape.is_packed:
        return {"W4": 1}
    if columns is None:
        return {}
    macros = {"W8": 1, "UP_COLUMNS": columns.w1, "DOWN_COLUMNS": columns.w2}
    if shape.shared:
        shared = {"SHARED_UP_COLUMNS": columns.shared_w1, "SHARED_DOWN_COLUMNS": columns.shared_w2}
        macros |= shared
    return macros


class MoeRow:
    """Layers of one shape, of few rows each, on one device and one stream.

    Args:
        ctas: of the grid; no more than the device has SMs are launched.
        threads, loads, claimed: see :data:`THREADS` and :data:`CLAIMED`; None for those of the
            shape and of the weights' format that fit the tile.

    Attributes:
        statistic_rows: elements that one partial statistic covers.
    """

    def __init__(
        self,
        shape: MoeShape,
        device: torch.device,
        ctas: int,
        *,
        threads: int | None = None,
        loads: int | None = None,
        claimed: int = CLAIMED,
    ) -> None:
        if device.type == "cuda":  # more would wait for each other in vain
            ctas = min(ctas, cuda.sm_count(device.index or 0))
        self._shape, self._device, self._ctas = shape, device, ctas
        self._limit = block_limit(device)
        self._loads, self._claimed = loads or most_loads(shape, ctas), claimed
        self.statistic_rows = tile(shape.hidden, ctas)
        self._threads = threads or min(most_threads(shape, ctas), 32 * self.statistic_rows)
        logits = shape.settings.num_experts + 1
        with torch.inference_mode(False):
            # By rows: each launch of as many rows writes all words, see moe_row.cu.
            self._words = [
                tuple(
                    torch.zeros(size, dtype=torch.int32, device=device)
                    for size in (ctas, rows * logits * 2, rows * shape.slots * shape.inner, 2)
                )
                for rows in range(1, MOST_ROWS + 1)
            ]

    def defines(
        self, rows: int, *, gate: bool, phases: int = 7, sums: Sending | None = None
    ) -> dict[str, int]:
        """Macros of ``moe_row.cu``."""
        shape, settings, activation = self._shape, self._shape.settings, self._shape.activation
        further = scale_macros(shape) | ({} if sums is None else sums.macros)
        return further | {
            "H": shape.hidden, "INNER": shape.inner, "EXPERTS": settings.num_experts,
            "TOP_K": settings.top_k, "SHARED": shape.shared, "ROWS": rows, "CTAS": self._ctas,
            "PHASES": phases, "CENTER": int(shape.center), "GATE": int(gate),
            "SIGMOID": int(settings.score_function == SIGMOID),
            "PRE_SOFTMAX": int(settings.pre_softmax), "NORMALIZE": int(settings.normalize),
            "GROUPS": settings.num_groups, "KEPT": settings.kept_groups,
            "SUMMED": settings.group_score_experts, "GATED": int(activation.gated),
            "FUNCTION": FUNCTIONS.index(activation.function),
            "HAS_LIMIT": int(activation.limit is not None), "TILE": self.statistic_rows,
            "THREADS": self._threads, "LOADS": self._loads, "CLAIMED": self._claimed,
            "MIN_SHARED": min(MIN_SHARED_BYTES, self._limit - STATIC_BYTES),
        }  # fmt: skip

    def work(
        self, rows: int, *, gate: bool, one_launch: bool, sums: Sending | None = None
    ) -> list[tuple[str, dict[str, int]]]:
        """Return source and macros of the launches for ``rows`` rows."""
        phases = (7,) if one_launch else (1, 2, 4)
        return [(SOURCE, self.defines(rows, gate=gate, phases=each, sums=sums)) for each in phases]

    def __call__(
        self,
        weights: MoeWeights,
        hidden: Tensor,
        statistics: Tensor,
        eps: float,
        out: Tensor,
        found: Found,
        *,
        live: Live | None = None,
        residual: Tensor | None = None,
        statistics_out: Tensor | None = None,
        scaled: tuple[Tensor, Tensor] | None = None,
        one_launch: bool,
        sums: Sending | None = None,
    ) -> None:
        """See :class:`~.decode.MoeDecode`."""
        rows, settings = hidden.shape[0], self._shape.settings
        launches, logits, activated, claims = self._words[rows - 1]
        norm_weight, norm_bias = weights.norm
        next_weight, scaled_out = (None, None) if scaled is None else scaled
        arguments = RowArguments(
            hidden, statistics, statistics.shape[1], float(eps), norm_weight, norm_bias,
            weights.router, weights.router_bias, weights.expert_bias, weights.shared_gate,
            None if live is None else live.values, 0 if live is None else live.first,
            float(settings.scaling_factor), weights.w1, weights.b1, weights.shared_w1, weights.w2,
            weights.b2, weights.shared_w2, float(self._shape.activation.limit or 0.0),
            float(self._shape.activation.offset), launches, logits, activated, claims, found.ids,
            found.weights, found.experts, residual, out,
            statistics_out, next_weight, scaled_out,
        )  # fmt: skip
        further: tuple[NamedTuple, ...] = ()
        if self._shape.weight_size is not None:
            record = PackedRowScales if self._shape.is_packed else RowScales
            further = (record(*(getattr(weights, name) for name in record._fields)),)
        if sums is not None:
            summing = RowSumming(sums.place, sums.memory[sums.place], sums.launches)
            further = (*further, summing, Peers.of(sums.memory))
        gate = weights.shared_gate is not None
        for source, macros in self.work(rows, gate=gate, one_launch=one_launch, sums=sums):
            kernel(source, macros, self._device).launch((self._ctas, 1, 1), arguments, *further)
