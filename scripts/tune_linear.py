"""Measures the tilings of ``kernels/cuda/linear.cu`` on a GPU: ``python scripts/tune_linear.py``.

Each time is the mean of calls inside one CUDA graph that goes round copies of the weight, so that
they come from memory, as in a decode step. A tiling whose result is wrong is reported and dropped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from megatron_async.kernels.cuda import compile as cuda
from megatron_async.kernels.cuda.linear import (
    ADD,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    Linear,
    Tiling,
    candidates,
    choose,
    defines,
    padded,
    statistics_of,
)

BANDWIDTH = 4.3e12
"""Bytes per second of a large copy on an H200."""
ROUND_BYTES = 300e6
SHAPES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "llama8b": (
        (6144, 4096, RMS_NORM, STORE),
        (4096, 4096, NO_NORM, ADD),
        (28672, 4096, RMS_NORM, SILU_GATE),
        (4096, 14336, NO_NORM, ADD),
        (128256, 4096, RMS_NORM, STORE),
    ),
    "qwen0.6b": (
        (4096, 1024, RMS_NORM, STORE),
        (1024, 2048, NO_NORM, ADD),
        (6144, 1024, RMS_NORM, SILU_GATE),
        (1024, 3072, NO_NORM, ADD),
        (151936, 1024, RMS_NORM, STORE),
    ),
    "gpt2": (
        (2304, 768, LAYER_NORM, STORE),
        (768, 768, NO_NORM, ADD),
        (3072, 768, LAYER_NORM, GELU_TANH),
        (768, 3072, NO_NORM, ADD),
        (50257, 768, LAYER_NORM, STORE),
    ),
}
"""N, K, norm of the input, epilogue."""


class Case:
    """One product with its inputs and what must come out."""

    def __init__(self, shape: tuple[int, int, int, int], rows: int) -> None:
        self.n, self.k, self.norm, self.epilogue = shape
        self.rows = rows
        n, k = self.n, self.k
        draw = torch.Generator("cuda").manual_seed(n * 7 + k + rows)
        kwargs = {"generator": draw, "device": "cuda", "dtype": torch.bfloat16}
        self.copies = max(2, min(24, int(ROUND_BYTES // (2 * n * k))))
        self.weights = [torch.randn(n, k, **kwargs) * 0.02 for _ in range(self.copies)]
        self.x = torch.randn(rows, k, **kwargs) + 0.1
        self.norm_weight = torch.rand(k, **kwargs) + 0.5
        self.norm_bias = torch.randn(k, **kwargs) if self.norm == LAYER_NORM else None
        self.bias = torch.randn(n, **kwargs) if self.norm == LAYER_NORM else None
        self.residual = torch.randn(rows, n, **kwargs)
        self.width = n // 2 if self.epilogue == SILU_GATE else n
        self.statistics = statistics_of(self.x, self.norm, 64) if self.norm else None
        self.reference = self._reference(self.weights[0])

    def _reference(self, weight: torch.Tensor) -> torch.Tensor:
        x = self.x.double()
        if self.norm == RMS_NORM:
            x = F.rms_norm(x, (self.k,), self.norm_weight.double(), 1e-5)
        elif self.norm == LAYER_NORM:
            assert self.norm_bias is not None
            x = F.layer_norm(x, (self.k,), self.norm_weight.double(), self.norm_bias.double(), 1e-5)
        y = x @ weight.double().T
        if self.bias is not None:
            y += self.bias.double()
        if self.epilogue == ADD:
            y += self.residual.double()
        elif self.epilogue == SILU_GATE:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        elif self.epilogue == GELU_TANH:
            y = F.gelu(y, approximate="tanh")
        return y

    def measure(self, tiling: Tiling) -> tuple[float, float]:
        """Microseconds a call, relative error."""
        statistic = LAYER_NORM if self.norm == LAYER_NORM else RMS_NORM
        most = padded(self.rows)
        device = torch.device("cuda")
        linear = Linear(self.n, self.k, most, self.norm, self.epilogue, statistic, tiling, device)
        out = torch.full((self.rows, self.width), float("nan"), device="cuda").bfloat16()
        per = linear.statistic_rows
        stats = None
        if self.epilogue == ADD:
            stats = torch.full((self.rows, self.n // per, 2), float("nan"), device="cuda")
        norm = (self.norm_weight, self.norm_bias, 1e-5) if self.norm else None

        def call(number: int) -> None:
            linear(
                self.x, self.weights[number % self.copies], out, bias=self.bias, norm=norm,
                statistics=self.statistics, residual=self.residual, statistics_out=stats,
            )  # fmt: skip

        call(0)
        error = float((out.double() - self.reference).norm() / self.reference.norm())
        if stats is not None:
            wanted = statistics_of(out, statistic, per)
            error = max(error, float((stats - wanted).norm() / wanted.norm()))
        calls = max(24, self.copies) if self.n < 50000 else 6
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(calls):
                call(number)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (3 * calls), error


def pick(case: Case, count: int) -> list[Tiling]:
    """The tiling that would be chosen, and a spread of others."""
    best: dict[tuple[object, ...], list[Tiling]] = {}
    for tiling in candidates(case.n, case.k, padded(case.rows), case.norm, case.epilogue):
        size = tiling.shared_bytes(case.k, padded(case.rows), case.norm)
        key = (*tiling[:4], *tiling[5:], size > 112 * 1024)
        best.setdefault(key, []).append(tiling)
    deepest = [max(group, key=lambda t: t.stages) for group in best.values()]
    random.Random(0).shuffle(deepest)
    first = choose(case.n, case.k, padded(case.rows), case.norm, case.epilogue)
    return list(dict.fromkeys(([first] if first else []) + deepest))[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama8b,qwen0.6b,gpt2")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--count", type=int, default=40, help="tilings of each product")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    cases = [
        (name, shape, int(rows))
        for name in args.shapes.split(",")
        for shape in SHAPES[name]
        for rows in args.rows.split(",")
    ]
    found = []
    for name, shape, rows in tqdm(cases, file=sys.stderr, disable=None):
        case = Case(shape, rows)
        tilings = pick(case, args.count)
        statistic = LAYER_NORM if case.norm == LAYER_NORM else RMS_NORM
        cuda.compile_together(
            [
                ("linear", defines(case.n, case.k, padded(case.rows), case.norm, case.epilogue,
                                   statistic, tiling))
                for tiling in tilings
            ],
            cuda.architecture(0),
        )  # fmt: skip
        measured = []
        for tiling in tilings:
            microseconds, error = case.measure(tiling)
            if not error < 1e-2:
                print(f"WRONG {shape} rows {rows} {tuple(map(int, tiling))}: error {error:.3g}")
                continue
            measured.append((microseconds, tiling))
        chosen = next((us for us, tiling in measured if tiling == tilings[0]), float("nan"))
        measured.sort()
        floor = 2e6 * case.n * case.k / BANDWIDTH
        weight = case.weights[0]
        del case
        torch.cuda.empty_cache()
        best = ", ".join(f"{us:.2f} {tuple(map(int, t))}" for us, t in measured[:3])
        print(f"{name} {shape} rows {rows}: floor {floor:.2f} chosen {chosen:.2f} best {best}")
        del weight
        found.append(
            {"name": name, "shape": shape, "rows": rows, "measured": [(u, *t) for u, t in measured]}
        )
    if args.json:
        Path(args.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
