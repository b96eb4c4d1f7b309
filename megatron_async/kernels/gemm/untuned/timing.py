"""A skinny GEMM by itself on a GPU: its inputs, and how long a tile config takes.

Launches follow each other as in a decode step, each with another weight, so that weights come from
memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_async.device.cuda import no_collection
from megatron_async.device.cuda_timeline import mean_us
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm, statistics_of
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    GemmProblem,
    TileConfig,
)

ROUND_BYTES = 400 * 2**20
"""Bytes, at least, of weights that follow each other: several times the L2 cache."""
MEASURED_BYTES = 2 * 2**30
"""Bytes that a measurement reads at least, in some 0.5 ms on an H200."""
ERROR_LIMIT = 2e-2
"""Relative, of what a config computes."""
_PER_STATISTIC = 64


def weight_bytes(problem: GemmProblem) -> int:
    """Bytes of a weight, without scales."""
    return problem.n * problem.k * (1 if problem.scale_columns else 2)


def bytes_needed(problem: GemmProblem) -> int:
    """Bytes of memory that weights of a measurement take."""
    each = weight_bytes(problem)
    return each * max(1, -(-ROUND_BYTES // each))


def norm_statistics(problem: GemmProblem, reader: int) -> int:
    """The statistics that a kernel is compiled for: of the norm that reads what epilogue ``ADD``
    writes, elsewhere as the norm of the input, so that there is one build."""
    norm = reader if problem.epilogue == ADD else problem.norm
    return RMS_NORM if norm == RMS_NORM else LAYER_NORM


class TimedGemm:
    """One problem with random inputs, and the times of configs for it.

    Args:
        reader: the norm that reads the statistics which epilogue ``ADD`` writes.
        memory: the weights, uint8, at least :func:`bytes_needed`; see :func:`random_weights`.
    """

    def __init__(self, problem: GemmProblem, reader: int, memory: Tensor) -> None:
        rows, n, k, norm, epilogue, columns, e4m3_inputs = problem
        assert norm is not None and epilogue is not None
        self.problem, self._reader, self._device = problem, reader, memory.device
        of = {"device": memory.device, "dtype": torch.bfloat16}
        dtype = torch.float8_e4m3fn if columns else torch.bfloat16
        self.weights = memory[: bytes_needed(problem)].view(dtype).view(-1, n, k)
        draw = torch.Generator(memory.device).manual_seed(0)
        self.x = torch.randn(rows, k, generator=draw, **of)  # type: ignore[call-overload]
        self.out = torch.zeros(rows, n // 2 if epilogue == SILU_GATE else n, **of)  # type: ignore[call-overload]
        self._given: dict[str, object] = {}
        if e4m3_inputs:
            self.x = self.x.to(torch.float8_e4m3fn)
            self._given["input_scale"] = torch.ones(rows, device=memory.device)
        if columns:
            self._given["weight_scale"] = torch.ones(n, k // columns, device=memory.device)
        if norm != NO_NORM:
            unit = torch.ones(k, **of)  # type: ignore[call-overload]
            bias = torch.zeros_like(unit) if norm == LAYER_NORM else None
            statistics = statistics_of(self.x, norm, _PER_STATISTIC)
            self._given |= {"norm": (unit, bias, 1e-5), "statistics": statistics}
        if epilogue == ADD:
            self._given["residual"] = torch.zeros_like(self.out)
            if reader == RMS_NORM:
                unit = torch.ones_like(self.out[0])
                self._given["scaled"] = unit, torch.empty_like(self.out)
        self._wanted: Tensor | None = None

    def launcher(self, config: TileConfig) -> Callable[[int], None]:
        """Launches of ``config``; number i takes weight i of several.

        Raises:
            ArithmeticError: the config computes something else than the first one did.
            ConfigError: it does not compile.
            RuntimeError: it is not launched.
        """
        rows, n, k, norm, epilogue, columns, e4m3_inputs = self.problem
        assert norm is not None and epilogue is not None
        statistics = norm_statistics(self.problem, self._reader)
        gemm = SkinnyGemm(
            n, k, rows, norm, epilogue, statistics, config, self._device, scale_columns=columns,
            e4m3_inputs=e4m3_inputs,
        )  # fmt: skip
        given = dict(self._given)
        if epilogue == ADD:
            tiles = n // gemm.statistic_rows
            given["statistics_out"] = torch.empty(rows, tiles, 2, device=self._device)

        def launch(number: int) -> None:
            weight = self.weights[number % len(self.weights)]
            gemm(self.x, weight, self.out, **given)  # type: ignore[arg-type]

        launch(0)
        self._check()
        return launch

    def time_us(self, config: TileConfig, replays: int = 4) -> float:
        """Microseconds of a launch, the least of ``replays`` means.

        Raises:
            ArithmeticError, ConfigError, RuntimeError: see :meth:`launcher`.
        """
        launch = self.launcher(config)
        round_bytes = len(self.weights) * weight_bytes(self.problem)
        count = len(self.weights) * -(-MEASURED_BYTES // round_bytes)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which collects garbage for longer than a measurement takes.
        with no_collection(), torch.cuda.stream(torch.cuda.Stream(self._device)):
            graph.capture_begin(capture_error_mode="thread_local")
            for number in range(count):
                launch(number)
            graph.capture_end()
        graph.replay()
        return min(mean_us(graph.replay, 1) for _ in range(replays)) / count

    def _check(self) -> None:
        got = self.out.double()
        if self._wanted is None:
            self._wanted = got
        error = float((got - self._wanted).norm() / self._wanted.norm())
        if not error < ERROR_LIMIT:
            raise ArithmeticError(f"relative error {error:.3g}")


def random_weights(byte_count: int, device: torch.device) -> Tensor:
    """Memory for :class:`TimedGemm`: small numbers, if they are bfloat16; if e4m3, none is NaN.

    Returns:
        uint8 ``[byte_count]``.

    Raises:
        torch.OutOfMemoryError: less memory is free.
    """
    draw = torch.Generator(device).manual_seed(0)
    some = torch.randn(2**20, generator=draw, device=device).mul_(0.02).to(torch.bfloat16)
    made = torch.empty(-(-byte_count // 2), device=device, dtype=torch.bfloat16)
    for part in made.split(len(some)):
        part.copy_(some[: len(part)])
    return made.view(torch.uint8)[:byte_count].bitwise_and_(0xFE)
