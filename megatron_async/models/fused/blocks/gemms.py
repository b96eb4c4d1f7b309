"""The skinny GEMMs of a model's fused blocks: their shapes, how they are tiled, their kernels."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.skinny_gemm import Sending, SkinnyGemm, defines
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SHARED_BYTES,
    GemmProblem,
    TileConfig,
    load_tuned,
    lookup,
)
from megatron_async.kernels.shared_memory import block_limit

logger = logging.getLogger(__name__)

Work = tuple[str, dict[str, int]]
"""A kernel's source, and its macros."""

LEAST_E4M3_ROWS = 9
"""Rows from which on a linear layer that quantizes its input multiplies e4m3 by e4m3. With fewer
its weight is widened. A step of Llama-8B on an H200 takes 2.978 ms at 9 rows and 3.066 at 16; with
widened weights 3.163 and 3.172."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A skinny GEMM of the model.

    Args:
        n, k: shape of the weight.
        norm: of the input, as the kernel reads it.
        epilogue: see ``kernels/gemm/tile_config.py``.
        fixed: the tile config at all numbers of rows; None chooses.
        tma: whether there is TMA.
        found: what ``megatron-async tune`` found to be best on this machine.
        sm_count: SMs of the GPU.
        limit: bytes of shared memory that a CTA may have.
        scale_columns: 0 for bfloat16 weights; of e4m3 weights, columns that share a scale.
        quantizes: its layer quantizes its input, see :meth:`reads_e4m3`.
    """

    n: int
    k: int
    norm: int
    epilogue: int
    fixed: TileConfig | None = None
    tma: bool = True
    found: Mapping[GemmProblem, TileConfig] = field(default_factory=dict, hash=False, compare=False)
    sm_count: int = field(kw_only=True)
    limit: int = field(default=SHARED_BYTES, kw_only=True)
    scale_columns: int = field(default=0, kw_only=True)
    quantizes: bool = field(default=False, kw_only=True)

    def reads_e4m3(self, rows: int) -> bool:
        """Whether it multiplies padded ``rows`` in e4m3, which are normed already."""
        if not self.quantizes or rows < LEAST_E4M3_ROWS or self.scale_columns != self.k:
            return False
        return self._tiling_of(self._e4m3_case(rows)) is not None

    def case(self, rows: int) -> GemmProblem:
        """The problem for padded ``rows``."""
        if self.reads_e4m3(rows):
            return self._e4m3_case(rows)
        return GemmProblem(rows, self.n, self.k, self.norm, self.epilogue, self.scale_columns)

    def _e4m3_case(self, rows: int) -> GemmProblem:
        return GemmProblem(rows, self.n, self.k, NO_NORM, self.epilogue, self.scale_columns, True)

    def tiling(self, rows: int) -> TileConfig | None:
        """Its tile config for padded ``rows``; None if there is none."""
        return self._tiling_of(self.case(rows))

    def _tiling_of(self, case: GemmProblem) -> TileConfig | None:
        if self.fixed is not None:
            return self.fixed if self.fixed.tma or not case.e4m3_inputs else None
        found = lookup(self.found, case)
        if found is not None and found.tma <= self.tma and found.can_serve(case, self.limit):
            return found
        rows, n, k, norm, epilogue, scale_columns, e4m3_inputs = case
        assert norm is not None and epilogue is not None
        return choose(
            n, k, rows, norm, epilogue, self.tma, sm_count=self.sm_count, limit=self.limit,
            scale_columns=scale_columns, e4m3_inputs=e4m3_inputs,
        )  # fmt: skip


class SkinnyGemms:
    """The skinny GEMMs of one model on one GPU. Blocks of the same shape share their kernels.

    Args:
        tilings: tile configs by name ("qkv", "projection", "fc1", "fc2", "head"), at all numbers of
            rows, in place of the measured ones.

    Attributes:
        too_large: GEMMs with padded rows for which the GPU has no room for all CTAs at once.
    """

    def __init__(
        self, device: torch.device, tilings: Mapping[str, TileConfig] | None = None
    ) -> None:
        self._device = device
        index = device.index or 0
        self._fixed = tilings or {}
        self.sm_count = cuda.sm_count(index)
        self.limit = block_limit(device)
        self._tma = cuda.has_wgmma(index)
        self._found = dict(load_tuned(cuda.device_name(index)))
        self._names: dict[tuple[str, Gemm], str] = {}
        self._kernels: dict[tuple[Gemm, int, int, bool], SkinnyGemm] = {}
        self.too_large: set[tuple[Gemm, int]] = set()

    @property
    def digest(self) -> str:
        """Eight digits that tell apart what tile configs were found on this machine."""
        found = sorted((tuple(map(str, key)), config) for key, config in self._found.items())
        return f"{zlib.crc32(repr(found).encode()):08x}"

    def leave_unsummed(self, gemm: Gemm, rows: int) -> None:
        """Have another kernel sum over ranks what this GEMM puts out for padded ``rows``."""
        logger.warning(
            "a GEMM of %d x %d is not summed over ranks where it ends: the GPU has no room for "
            "all its CTAs at once", gemm.n, gemm.k,
        )  # fmt: skip
        self.too_large.add((gemm, rows))

    def declare(
        self,
        name: str,
        weight: torch.Tensor,
        norm: int,
        epilogue: int,
        layer: int | None = None,
        weight_scale: torch.Tensor | None = None,
        quantizes: bool = False,
    ) -> Gemm:
        """The GEMM with ``weight`` ``[n, k]``, by which role it has in which layer.

        Args:
            weight_scale: of an e4m3 weight, fp32 ``[n, groups]``; None for bfloat16.
            quantizes: its layer quantizes its input.
        """
        n, k = weight.shape
        gemm = Gemm(
            n,
            k,
            norm,
            epilogue,
            self._fixed.get(name),
            self._tma,
            self._found,
            sm_count=self.sm_count,
            limit=self.limit,
            scale_columns=0 if weight_scale is None else k // weight_scale.shape[1],
            quantizes=quantizes,
        )
        if (name, gemm) not in self._names:
            taken = name in self._names.values()
            self._names[name, gemm] = f"{name} of layer {layer}" if taken else name
        return gemm

    def adopt(self, found: Mapping[GemmProblem, TileConfig | None]) -> None:
        """Take these tile configs, as if ``megatron-async tune`` had found them, and forget what it
        found where there is None. Kernels that were made stay: graphs hold them."""
        for problem, config in found.items():
            if config is not None:
                self._found[problem] = config
                continue
            for each in (problem, problem._replace(norm=None, epilogue=None)):
                self._found.pop(each, None)

    @property
    def declared(self) -> dict[str, Gemm]:
        """All by name: of each role the first shape has the role's name."""
        return {name: gemm for (_, gemm), name in self._names.items()}

    def get(
        self, gemm: Gemm, rows: int, reader: int = NO_NORM, sends: Sending | None = None
    ) -> SkinnyGemm:
        """Its kernel for padded ``rows``; :func:`missing` must not name it.

        Args:
            reader: the norm that reads the statistics which epilogue ``ADD`` writes;
                :data:`NO_NORM` if nobody does.
            sends: where its output goes, in place of memory of this rank's own.
        """
        key = gemm, rows, statistics_for(gemm, reader), sends is not None
        if key not in self._kernels:
            tiling = gemm.tiling(rows)
            case = gemm.case(rows)
            assert tiling is not None and case.norm is not None
            self._kernels[key] = SkinnyGemm(
                gemm.n, gemm.k, rows, case.norm, gemm.epilogue, key[2], tiling, self._device, sends,
                gemm.scale_columns, case.e4m3_inputs,
            )  # fmt: skip
        return self._kernels[key]

    def work(
        self, gemm: Gemm, rows: int, reader: int = NO_NORM, sends: Sending | None = None
    ) -> Work:
        """What :meth:`get` compiles."""
        tiling = gemm.tiling(rows)
        assert tiling is not None
        macros = {} if sends is None else sends.macros
        return tiling.kernel, defines_of(gemm, rows, reader, tiling) | macros


def missing(gemms: Mapping[str, Gemm], rows: int) -> str | None:
    """Why not all of them have a kernel for padded ``rows``; None if they do."""
    for name, gemm in gemms.items():
        if gemm.tiling(rows) is None:
            return f"no tile config for {name} ({gemm.n} x {gemm.k})"
    return None


def statistics_for(gemm: Gemm, reader: int) -> int:
    """The statistics that a kernel is compiled for.

    Only epilogue ``ADD`` writes any; elsewhere they follow the norm of the input, so that there is
    one build. Where nobody reads them they are LayerNorm's, which come without a scaled copy.
    """
    norm = reader if gemm.epilogue == ADD else gemm.norm
    return RMS_NORM if norm == RMS_NORM else LAYER_NORM


def defines_of(gemm: Gemm, rows: int, reader: int, tiling: TileConfig) -> dict[str, int]:
    """Macros of its kernel for padded ``rows`` with a tile config."""
    statistics, case = statistics_for(gemm, reader), gemm.case(rows)
    assert case.norm is not None
    return defines(
        gemm.n, gemm.k, rows, case.norm, gemm.epilogue, statistics, tiling, gemm.sm_count,
        gemm.limit, gemm.scale_columns, case.e4m3_inputs,
    )  # fmt: skip
