"""Skinny GEMMs, of few rows with a weight: how ``skinny_gemm_mma.cu`` and ``skinny_gemm_wgmma.cu``
are built and called."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.compile import (
    Bf16,
    E4m3,
    Fp32,
    Int32,
    Int64,
    Kernel,
    TensorMap,
    kernel,
)
from megatron_async.kernels.gemm.tile_config import (
    E4M3_STAGE_K,
    LAYER_NORM,
    MANY_ROWS_KERNEL,
    SHARED_BYTES,
    SILU_GATE,
    STAGE_K,
    TileConfig,
    row_groups,
    stage_columns,
)
from megatron_async.kernels.ranks.peers import Peers
from megatron_async.kernels.shared_memory import STATIC_BYTES, block_limit

ALONE_BYTES = 116 * 1024
"""Shared memory that each CTA takes at least where there are about as many as SMs (from
:func:`alone_ctas` on), but not more: started while the kernel before still runs, two of them would
else share one SM and others have none."""

MOST_MAPS = 1024
"""TMA maps that are kept, by address."""


class MmaArguments(NamedTuple):
    """Parameters of ``skinny_gemm_mma.cu``, in order."""

    x: Bf16
    w: Bf16
    bias: Bf16 | None
    norm_weight: Bf16 | None
    norm_bias: Bf16 | None
    stats_in: Fp32 | None
    stats_tiles: int
    eps: float
    residual: Bf16 | None
    out: Bf16 | None
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32 | None
    M: int
    out_row: int
    workspace: Fp32 | None
    arrivals: Int32 | None


class E4m3Arguments(NamedTuple):
    """Parameters of ``skinny_gemm_mma.cu`` with ``W8``, in order: the same and the scales."""

    x: Bf16
    w: E4m3
    bias: Bf16 | None
    norm_weight: Bf16 | None
    norm_bias: Bf16 | None
    stats_in: Fp32 | None
    stats_tiles: int
    eps: float
    residual: Bf16 | None
    out: Bf16 | None
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32 | None
    M: int
    out_row: int
    workspace: Fp32 | None
    arrivals: Int32 | None
    weight_scale: Fp32


class WgmmaArguments(NamedTuple):
    """Parameters of ``skinny_gemm_wgmma.cu``, in order: those of ``skinny_gemm_mma.cu``, of which
    it does not read ``x``, ``w``, ``norm_weight`` and ``norm_bias`` (None), and the TMA maps."""

    x: Bf16 | None
    w: Bf16 | None
    bias: Bf16 | None
    norm_weight: Bf16 | None
    norm_bias: Bf16 | None
    stats_in: Fp32 | None
    stats_tiles: int
    eps: float
    residual: Bf16 | None
    out: Bf16 | None
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32 | None
    M: int
    out_row: int
    workspace: Fp32 | None
    arrivals: Int32 | None
    w_map: TensorMap
    x_map: TensorMap


class WgmmaE4m3Arguments(NamedTuple):
    """Parameters of ``skinny_gemm_wgmma.cu`` with ``W8``, in order: the same and the scales."""

    x: Bf16 | None
    w: E4m3 | None
    bias: Bf16 | None
    norm_weight: Bf16 | None
    norm_bias: Bf16 | None
    stats_in: Fp32 | None
    stats_tiles: int
    eps: float
    residual: Bf16 | None
    out: Bf16 | None
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32 | None
    M: int
    out_row: int
    workspace: Fp32 | None
    arrivals: Int32 | None
    weight_scale: Fp32
    w_map: TensorMap
    x_map: TensorMap


class WgmmaInputsArguments(NamedTuple):
    """Parameters of ``skinny_gemm_wgmma.cu`` with ``W8`` and ``X8``, in order: the same, and
    scales of x behind those of the weight."""

    x: Bf16 | None
    w: E4m3 | None
    bias: Bf16 | None
    norm_weight: Bf16 | None
    norm_bias: Bf16 | None
    stats_in: Fp32 | None
    stats_tiles: int
    eps: float
    residual: Bf16 | None
    out: Bf16 | None
    next_weight: Bf16 | None
    scaled: Bf16 | None
    stats_out: Fp32 | None
    M: int
    out_row: int
    workspace: Fp32 | None
    arrivals: Int32 | None
    weight_scale: Fp32
    input_scale: Fp32
    w_map: TensorMap
    x_map: TensorMap


class SendingArguments(NamedTuple):
    """Parameters ``SENDING`` of either, behind the others; those of ``ranks/peers.py`` follow."""

    place: int
    received: Int64
    launches: Int32


class Sending(NamedTuple):
    """Where a GEMM sends its output, in place of storing it: to the memory of all ranks of a group,
    see ``peer_sum.cu``.

    Args:
        sums: with epilogue ``ADD``, it waits for what the others send, and adds up over all ranks;
            with ``STORE`` another kernel does. All its CTAs must run at once
            (``device/waiting_grids.py``).
        bare: the memory is that of ``peer_rows.cu``, which ``skinny_gemm_many.cu`` sums over.
    """

    memory: tuple[Tensor, ...]
    place: int
    launches: Tensor
    capacity: int
    sums: bool = False
    bare: bool = False

    def takes(self, config: TileConfig, n: int) -> bool:
        """Whether a GEMM of ``n`` columns with such a tile config can sum."""
        of_its_kind = self.bare == (config.kernel == MANY_ROWS_KERNEL)
        return of_its_kind and not config.persistent and config.ctas(n) <= len(self.launches)

    @property
    def macros(self) -> dict[str, int]:
        """The macros of the kernel."""
        return {
            "SUMS" if self.sums else "SENDS": 1, "RANKS": len(self.memory),
            "CAPACITY": self.capacity, "LAUNCHES": len(self.launches),
        }  # fmt: skip

    @property
    def arguments(self) -> tuple[SendingArguments, Peers]:
        """The kernel's, behind the others."""
        received = self.memory[self.place]
        return SendingArguments(self.place, received, self.launches), Peers.of(self.memory)


class SkinnyGemm:
    """One GEMM of a model, for batches of up to ``rows`` rows.

    Args:
        n, k: shape of the weight.
        rows: of x at most, see :func:`padded`.
        norm, norm_statistics: of the input, and the norm (``RMS_NORM``, ``LAYER_NORM``) that
            reads the statistics which epilogue ``ADD`` writes.
        sends: with epilogue ``STORE``, where the output goes, or with ``ADD``, over whose memory it
            is summed; None for ``out`` of one rank.
        scale_columns: 0 for bfloat16 weights; of e4m3 weights, columns that share a scale in a
            row: 32, 64, 128 or ``k``.
        e4m3_inputs: x is e4m3 as well, with a scale for each row; of weights that have such alone.
        rounded: with epilogue ``SILU_GATE``, both halves are rounded to bfloat16 first, and SiLU
            has the bits of ``norm/swiglu.py``.

    Attributes:
        runs_at_once: it sums over no ranks, or the GPU has room for all its CTAs at once.
    """

    def __init__(
        self,
        n: int,
        k: int,
        rows: int,
        norm: int,
        epilogue: int,
        norm_statistics: int,
        config: TileConfig,
        device: torch.device,
        sends: Sending | None = None,
        scale_columns: int = 0,
        e4m3_inputs: bool = False,
        rounded: bool = False,
    ) -> None:
        sm_count, limit = cuda.sm_count(device.index or 0), block_limit(device)
        rows = config.kernel_rows(rows)
        macros = defines(
            n, k, rows, norm, epilogue, norm_statistics, config, sm_count, limit, scale_columns,
            e4m3_inputs, rounded,
        )  # fmt: skip
        macros |= {} if sends is None else sends.macros
        self._sends = sends
        self.kernel: Kernel = kernel(config.kernel, macros, device)
        ctas = config.ctas(n)
        if config.persistent:
            resident = max(1, limit // (self.kernel.shared_bytes + 1024))
            by_threads = 2048 // self.kernel.threads
            each = max(1, config.multicast)
            ctas = min(ctas, max(each, sm_count * min(resident, by_threads, 2) // each * each))
        self._grid = (ctas, 1, 1)
        self.runs_at_once = sends is None or not sends.sums or self.kernel.runs_at_once(ctas)
        self._workspace: Tensor | None = None
        self._arrivals: Tensor | None = None
        if config.workspace:
            tiles = ctas // config.split_k
            self._workspace = torch.empty(ctas * config.weight_rows * max(8, rows), device=device)
            self._arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)
        self.statistic_rows = config.statistic_rows(rows)
        self._n, self._k, self._rows, self._config = n, k, rows, config
        self._gated, self._scale_columns = epilogue == SILU_GATE, scale_columns
        self._e4m3_inputs = e4m3_inputs
        self._weight_maps: dict[int, TensorMap] = {}
        self._x_maps: dict[tuple[int, int], TensorMap] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor | None,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, Tensor | None, float] | None = None,
        statistics: Tensor | None = None,
        residual: Tensor | None = None,
        scaled: tuple[Tensor, Tensor] | None = None,
        statistics_out: Tensor | None = None,
        weight_scale: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        """``out [M, N] = epilogue(norm(x [M, K]) weight^T)``; all contiguous bfloat16, but for
        weights in e4m3, which are multiplied by their scales (:func:`scaled_product`).

        Args:
            norm: (weight, bias, epsilon); for RMSNorm ``x`` is multiplied by the weight already.
            statistics: fp32 ``[M, tiles, 2]``, those of x (without the weight).
            out: None where the output is sent, and not summed.
            residual: ``[M, N]`` that epilogue ``ADD`` adds; may be ``out``.
            scaled: with epilogue ``ADD`` before RMSNorm, its weight ``[N]`` and where ``out`` times
                that goes, ``[M, N]``.
            statistics_out: fp32, those of ``out`` that epilogue ``ADD`` emits.
            weight_scale: of e4m3 weights, contiguous fp32 ``[N, K / scale_columns]``.
            input_scale: of ``x`` in e4m3, contiguous fp32 with an element for each row.

        Raises:
            TypeError: a tensor has another dtype.
        """
        norm_weight, norm_bias, eps = norm if norm is not None else (None, None, 0.0)
        next_weight, scaled_out = scaled or (None, None)
        stats_tiles = 0 if statistics is None else statistics.shape[1]
        row = self._n if out is None else out.stride(0)
        arguments: (
            WgmmaArguments | WgmmaE4m3Arguments | WgmmaInputsArguments
            | MmaArguments | E4m3Arguments
        )  # fmt: skip
        if self._config.tma:
            arguments = WgmmaArguments(
                None, None, bias, None, None, statistics, stats_tiles, float(eps), residual, out,
                next_weight, scaled_out, statistics_out, x.shape[0], row, self._workspace,
                self._arrivals, self._weight_map(weight), self._x_map(x),
            )  # fmt: skip
            *given, w_map, x_map = arguments
            scales = (weight_scale, input_scale) if self._e4m3_inputs else (weight_scale,)
            if self._scale_columns:
                kind = WgmmaInputsArguments if self._e4m3_inputs else WgmmaE4m3Arguments
                arguments = kind(*given, *scales, w_map, x_map)  # type: ignore[call-arg, arg-type]
        else:
            arguments = MmaArguments(
                x, weight, bias, norm_weight, norm_bias, statistics, stats_tiles, float(eps),
                residual, out, next_weight, scaled_out, statistics_out, x.shape[0], row,
                self._workspace, self._arrivals,
            )  # fmt: skip
            if self._scale_columns:
                arguments = E4m3Arguments(*arguments, weight_scale)  # type: ignore[arg-type]
        further = () if self._sends is None else self._sends.arguments
        self.kernel.launch(self._grid, arguments, *further)

    def _weight_map(self, weight: Tensor) -> TensorMap:
        """The weight in TMA tiles of a CTA's rows, which the kernel takes without its dtype."""
        wanted = torch.float8_e4m3fn if self._scale_columns else torch.bfloat16
        if weight.dtype != wanted:
            raise TypeError(f"{self._config.kernel}: w must be {wanted}, not {weight.dtype}")
        key, tiles = weight.data_ptr(), self._config.row_tiles
        row, columns = self._k * weight.element_size(), stage_columns(self._scale_columns)
        found = self._weight_maps.get(key)
        if found is None:
            sizes, strides, tile = [self._k, self._n], [row], [columns, 16 * tiles]
            if self._gated:  # eight rows of gate, eight of up
                sizes, tile = [self._k, 8, 2, self._n // 16], [columns, 8, 2, tiles]
                strides = [row, self._n // 2 * row, 8 * row]
            found = cuda.tensor_map(weight, sizes, strides, tile)
            _keep(self._weight_maps, key, found)
        return found

    def _x_map(self, x: Tensor) -> TensorMap:
        """x in TMA tiles of all its rows."""
        wanted = torch.float8_e4m3fn if self._e4m3_inputs else torch.bfloat16
        if x.dtype != wanted:
            raise TypeError(f"{self._config.kernel}: x must be {wanted}, not {x.dtype}")
        key, row = (x.data_ptr(), x.shape[0]), self._k * x.element_size()
        found = self._x_maps.get(key)
        if found is None:
            columns = E4M3_STAGE_K if self._e4m3_inputs else STAGE_K
            tile = [columns, 8 * row_groups(self._rows) // max(1, self._config.multicast)]
            found = cuda.tensor_map(x, [self._k, x.shape[0]], [row], tile)
            _keep(self._x_maps, key, found)
        return found


def _keep(maps: dict[Any, TensorMap], key: Any, found: TensorMap) -> None:
    """A map says where a tensor lies, and how: launches and graphs have copies of it."""
    if len(maps) >= MOST_MAPS:
        maps.clear()
    maps[key] = found


def alone_ctas(sm_count: int) -> int:
    """CTAs from which on each takes :data:`ALONE_BYTES`, if there are no more than SMs."""
    return sm_count * 25 // 33


def defines(
    n: int,
    k: int,
    rows: int,
    norm: int,
    epilogue: int,
    norm_statistics: int,
    config: TileConfig,
    sm_count: int,
    limit: int = SHARED_BYTES,
    scale_columns: int = 0,
    e4m3_inputs: bool = False,
    rounded: bool = False,
) -> dict[str, int]:
    """Macros of the kernel that ``config`` configures, for a GPU whose CTAs have ``limit`` bytes of
    shared memory."""
    alone = alone_ctas(sm_count) <= config.ctas(n) <= sm_count
    macros = {
        "N": n, "K": k, "MT": row_groups(config.kernel_rows(rows)), "NORM": norm,
        "EPILOGUE": epilogue, "STATS": norm_statistics, "RT": config.row_tiles,
        "SPLIT_K": config.split_k, "ST": config.stages, "PERSISTENT": int(config.persistent),
        "WORKSPACE": int(config.workspace), "OWN": config.owned(rows),
        "MIN_SHARED": min(ALONE_BYTES, limit - STATIC_BYTES) if alone else 0,
    }  # fmt: skip
    if not config.tma:
        macros |= {
            "XR": rows, "WR": config.warps_n, "WK": config.warps_k,
            "STREAM_X": int(config.stream_x),
        }  # fmt: skip
    if scale_columns:
        macros |= {"W8": 1, "SCALE_COLUMNS": scale_columns}
    if e4m3_inputs:
        macros |= {"X8": 1}
    if rounded:
        macros |= {"ROUNDED": 1}
    if config.multicast:
        macros |= {"MULTICAST": config.multicast}
    return macros


def scaled_product(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """What the kernels multiply with e4m3 weights, with PyTorch, in the precision of ``x``.

    Args:
        x: ``[M, K]``, float32 or float64.
        weight: float8_e4m3fn ``[N, K]``.
        weight_scale: fp32 ``[N, groups]``, each of which has ``K / groups`` columns of a row.

    Returns:
        ``[M, N]``: over all groups, the sum of products times the group's scale.
    """
    groups = weight_scale.shape[1]
    parts = x.unflatten(1, (groups, -1)), weight.to(x.dtype).unflatten(1, (groups, -1))
    return torch.einsum("mgk,ngk,ng->mn", *parts, weight_scale.to(x.dtype))


def statistics_of(hidden: Tensor, norm: int, per_tile: int) -> Tensor:
    """What epilogue ``ADD`` emits for ``hidden [M, H]``, with PyTorch: fp32 ``[M, tiles, 2]``."""
    tiles = hidden.float().unflatten(1, (-1, per_tile))
    mean = tiles.mean(2) if norm == LAYER_NORM else torch.zeros_like(tiles[..., 0])
    return torch.stack((mean, (tiles - mean[..., None]).square().sum(2)), 2)
