"""The search for tilings of the fused decode step: where they are used, in the step.

A CUDA graph of the whole forward of a model with a few layers is timed. Kernels that follow each
other share multiprocessors, so a tiling is measured among those of the other products. One product
after the other is varied. A tiling that changes the logits is reported and dropped.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
from tqdm import tqdm

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.estimated_tilings import (
    box_cuts,
    candidates,
    even_tilings,
    lane_cuts,
)
from megatron_async.kernels.gemm.measured_tilings import known
from megatron_async.kernels.gemm.tilings import (
    ANY_SHAPE_ROWS,
    SHARED_BYTES,
    Tiling,
    padded,
)
from megatron_async.models.config import ModelConfig
from megatron_async.models.fused.decoder import FusedDecoder, Product

from .benchmark.shapes import build_shape

BLOCK_SIZE = 64
ERROR_LIMIT = 2e-2
WORTH = 0.998
"""A tiling replaces another one if the step takes at most this share of its time."""


class Step(NamedTuple):
    """A captured step, and what its graph needs: the kernels, and where the logits go."""

    decoder: FusedDecoder
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    error: float


class Rig:
    """A model of few layers with random weights, and a cache with ``context`` tokens in each row.

    Args:
        config: the model; ``layers`` of its layers are built.
        rows: that decode a token in each step.
        replays: steps of a measurement, whose mean is taken.

    Raises:
        ValueError: the fused step does not take such a model, or not on this device.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        *,
        layers: int = 4,
        context: int = 384,
        replays: int = 8,
        device: torch.device,
    ) -> None:
        layers = min(layers, config.num_layers)
        self.device = device
        self.rows, self.replays = rows, replays
        self.model = build_shape(
            replace(config, num_layers=layers), device=self.device, dtype=torch.bfloat16
        )
        columns = -(-(context + 1) // BLOCK_SIZE)
        cache = (layers, 2, rows * columns + 1, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        table = 1 + torch.arange(rows * columns, device=self.device).view(rows, columns)
        self.positions = torch.full((rows,), context, device=self.device)
        self.context = SimpleNamespace(
            kv_cache=torch.randn(cache, device=self.device, dtype=torch.bfloat16),
            block_table=table,
            token_slots=torch.arange(rows, device=self.device),
            slot_mapping=table[:, context // BLOCK_SIZE] * BLOCK_SIZE + context % BLOCK_SIZE,
            block_size_tokens=BLOCK_SIZE,
            last_token_index=None,
            is_decode_only=lambda: True,
        )
        self.tokens = torch.randint(config.vocab_size, (rows,), device=self.device)
        self.wanted: torch.Tensor | None = None
        reason = self.decoder({}).off([rows], self.context)
        if reason is not None:
            raise ValueError(reason)

    def decoder(self, tilings: dict[str, Tiling]) -> FusedDecoder:
        return FusedDecoder(self.model, tilings=tilings)

    def compile(self, tilings: dict[str, Tiling]) -> None:
        """Compile a step's kernels side by side."""
        self.decoder(tilings).compile([self.rows], self.context)

    def capture(self, tilings: dict[str, Tiling]) -> Step:
        """A step's graph, and how far its logits are from those of the first one."""
        decoder = self.decoder(tilings)
        size = decoder.products["head"].n
        logits = torch.zeros(self.rows, size, device=self.device, dtype=torch.bfloat16)
        assert decoder.takes(logits, self.context)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        decoder.forward(self.tokens, self.positions, self.context, logits)
        torch.cuda.synchronize()
        got = logits.double()
        if self.wanted is None:
            self.wanted = got
        error = float((got - self.wanted).norm() / self.wanted.norm())
        with torch.cuda.graph(graph, stream=stream):
            decoder.forward(self.tokens, self.positions, self.context, logits)
        return Step(decoder, graph, logits, error)

    def mean_us(self, step: Step) -> float:
        """Microseconds of a step, the mean of ``replays``."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self.replays):
            step.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.replays

    def step_us(self, tilings: dict[str, Tiling]) -> float:
        """Microseconds of a step, the least of several means.

        Raises:
            ArithmeticError: the logits are not those of the first call.
        """
        step = self.capture(tilings)
        if not step.error < ERROR_LIMIT:
            raise ArithmeticError(f"relative error {step.error:.3g}")
        return min([self.mean_us(step) for _ in range(4)][1:])

    def compare(
        self, before: dict[str, Tiling], after: dict[str, Tiling], turns: int = 5
    ) -> tuple[float, float]:
        """Microseconds of a step with either, the medians of ``turns`` in turns."""
        steps = [self.capture(before), self.capture(after)]
        times = [[self.mean_us(step) for step in steps] for _ in range(turns + 1)][1:]
        return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def start_of(product: Product, rows: int) -> Tiling:
    """Where the search begins: the tiling in use, or boxes of many rows.

    Raises:
        ValueError: there are none.
    """
    used = product.tiling(rows)
    if used is not None:
        return used
    found = fullest(product, rows)
    if not found:
        raise ValueError(f"no tiling of {product.n} x {product.k} can be built for {rows} rows")
    return found[-1]


def spread(product: Product, rows: int, count: int) -> list[Tiling]:
    """Some of a product's tilings at random, and as many that take boxes."""
    shape = (product.n, product.k, rows, product.norm, product.epilogue)
    found = [list(candidates(*shape)), [tiling for tiling in boxes(product) if tiling.fits(*shape)]]
    for some in found:
        random.Random(0).shuffle(some)
    return [tiling for some in found for tiling in some[:count]]


def boxes(product: Product) -> Iterator[Tiling]:
    """Tilings that take boxes, with all numbers of stages."""
    if product.boxes:
        for cut, stages in itertools.product(box_cuts(product.n), range(2, 11)):
            yield cut._replace(stages=stages)


def fullest(product: Product, rows: int) -> list[Tiling]:
    """Of each cut into boxes those with the most stages: a block alone on a multiprocessor, and two
    beside each other."""
    shape = (product.n, product.k, rows, product.norm, product.epilogue)
    found: dict[Tiling, None] = {}
    for limit in (SHARED_BYTES, SHARED_BYTES // 2):
        by_cut = {}
        for tiling in boxes(product):  # of a cut the most stages come last
            if tiling.fits(*shape) and tiling.shared_bytes(product.k, rows) <= limit:
                by_cut[tiling._replace(stages=0)] = tiling
        found.update(dict.fromkeys(by_cut.values()))
    return list(found)


def even(product: Product, rows: int, count: int) -> list[Tiling]:
    """Of :func:`.even_tilings` the first ``count`` by lanes, and half as many by boxes: at most
    three that cut the weight in the same way."""
    shape = (product.n, product.k, rows, product.norm, product.epilogue)
    by_boxes = box_cuts(product.n) if product.boxes else ()
    chosen: list[Tiling] = []
    for cuts, most in ((lane_cuts(product.n), count), (by_boxes, count // 2)):
        taken: Counter[tuple[int, int]] = Counter()
        for tiling in even_tilings(cuts, *shape):
            alike = tiling.weight_rows, tiling.splits
            if taken[alike] < 3 and taken.total() < most:
                taken[alike] += 1
                chosen.append(tiling)
    return chosen


def short_list(product: Product, rows: int, count: int) -> list[Tiling]:
    """Those of :func:`even`, and what other numbers of rows take; of many rows all boxes."""
    if rows > ANY_SHAPE_ROWS:
        return fullest(product, rows)
    return [*known(product.n, product.k), *even(product, rows, count)]


def neighbours(tiling: Tiling) -> Iterator[Tiling]:
    """Those that differ in one field, or that trade one against another."""
    yield from (tiling._replace(stages=s) for s in range(2, 14))
    yield from (tiling._replace(warps_n=w) for w in range(1, 17))
    yield from (tiling._replace(row_tiles=r) for r in range(1, 17 if tiling.box else 5))
    yield from (tiling._replace(splits=s) for s in (1, 2, 3, 4, 6, 8))
    yield from (tiling._replace(warps_k=w) for w in (1, 2, 4, 8, 16))
    yield tiling._replace(stream=not tiling.stream)
    yield tiling._replace(memory=not tiling.memory)
    if tiling.box:
        yield tiling._replace(row_tiles=1, warps_n=tiling.row_tiles, box=False)
    else:
        tiles = tiling.row_tiles * tiling.warps_n
        yield tiling._replace(row_tiles=tiles, warps_n=1, warps_k=1, stream=True, box=True)
    if tiling.row_tiles > 1:
        yield tiling._replace(row_tiles=1, warps_n=tiling.warps_n * tiling.row_tiles)
    if tiling.warps_n % 2 == 0:
        half = tiling.warps_n // 2
        yield tiling._replace(row_tiles=2 * tiling.row_tiles, warps_n=half)
        yield tiling._replace(warps_n=half, warps_k=2 * tiling.warps_k)


class Search:
    """The best tilings so far, by product; all times, and what was dropped and why.

    Args:
        end: when to stop, by ``time.monotonic``.
        report: is told of tilings that are better, and of those that fail.

    Raises:
        ValueError: a product has no tiling to begin with.
    """

    def __init__(
        self, rig: Rig, end: float = math.inf, report: Callable[[str], None] | None = None
    ) -> None:
        self.rig, self.end = rig, end
        self.report = report or (lambda line: None)
        self.most = padded(rig.rows)
        decoder = rig.decoder({})
        self.products = decoder.products
        self.best: dict[str, Tiling] = {}
        for name, product in self.products.items():
            self.best[name] = start_of(product, self.most)
        rig.compile(self.best)
        self.first = self.step = rig.step_us(self.best)
        self.log: list[tuple[str, Tiling, float]] = []
        self.dropped: list[str] = []

    def vary(self, name: str, tilings: Sequence[Tiling]) -> None:
        """Measure tilings of one product, and take the best."""
        product, seen = self.products[name], {t for n, t, _ in self.log if n == name}
        shape = (product.n, product.k, self.most, product.norm, product.epilogue)
        tilings = [t for t in dict.fromkeys(tilings) if t not in seen and t.fits(*shape)]
        if time.monotonic() > self.end:
            return
        decoder = self.rig.decoder({})
        cuda.compile_together(
            [("linear", decoder.defines(product, self.most, t)) for t in tilings],
            cuda.architecture(self.rig.device.index or 0),
        )
        for tiling in tqdm(tilings, name, file=sys.stderr, leave=False, disable=None):
            if time.monotonic() > self.end:
                return
            tried = {**self.best, name: tiling}
            try:
                step = self.rig.step_us(tried)
            except (ArithmeticError, RuntimeError) as error:
                self.dropped.append(f"{name} {tuple(map(int, tiling))}: {str(error)[:100]}")
                self.report(f"dropped {self.dropped[-1]}")
                continue
            self.log.append((name, tiling, step))
            if step < WORTH * self.step:
                # Again beside the one it replaces: clocks change.
                now = self.rig.step_us(self.best)
                step = max(step, self.rig.step_us(tried))
                if step < WORTH * now:
                    self.report(f"{name} {tuple(map(int, tiling))}: {now:.1f} -> {step:.1f} us")
                    self.best, self.step = tried, step


def line_of(product: Product, tiling: Tiling) -> str:
    """For ``MEASURED``."""
    fields = [str(value) for value in tiling[:5]]
    fields += [f"{name}={value}" for name, value in list(tiling._asdict().items())[5:] if value]
    return f"({product.n}, {product.k}): Tiling({', '.join(fields)}),"
