"""Search for faster tilings of the fused decode step on a GPU, where they are used: in the step.

    python scripts/tune_decode.py --shape llama8b --rows 32 --context 384

times a CUDA graph of the whole forward of a model with a few of the shape's layers. Kernels that
follow each other share multiprocessors, so a tiling is measured among those of the other products.
One product after the other is varied: a spread of its tilings at first, then those that differ
from the best one in a field. A tiling that changes the logits is reported and dropped. At the end
stand lines for ``kernels/cuda/tilings.py``. ``--quick`` tries a short list instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from tqdm import tqdm

from megatron_async.inference.shapes import SHAPES, build_shape
from megatron_async.kernels.cuda import attention as cuda_attention
from megatron_async.kernels.cuda import compile as cuda
from megatron_async.kernels.cuda import linear as cuda_linear
from megatron_async.kernels.cuda.tilings import (
    ANY_SHAPE_ROWS,
    MAX_ROWS,
    MULTIPROCESSORS,
    SHARED_BYTES,
    UNIT,
    Tiling,
    candidates,
    known,
    padded,
)
from megatron_async.models.fused_decode import FusedDecoder, Product

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
    """A model of few layers and a cache with ``context`` tokens in each row; times are means of so
    many ``replays``."""

    def __init__(self, shape: str, rows: int, layers: int, context: int, replays: int) -> None:
        config = SHAPES[shape]
        layers = min(layers, config.num_layers)
        self.device = torch.device("cuda")
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


def start_of(product: Product, rows: int) -> Tiling:
    """Where the search begins: the tiling of ``tilings.py``, or boxes of many rows.

    Raises:
        ValueError: there are none.
    """
    known = product.tiling(rows)
    if known is not None:
        return known
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
    """Tilings that take boxes, where there are enough blocks but not many waves of them."""
    if not product.boxes:
        return
    for tiles, splits, stages, memory in itertools.product(
        range(1, 17), (1, 2, 4, 8), range(2, 11), (False, True)
    ):
        tiling = Tiling(tiles, 1, 1, splits, stages, True, False, memory, box=True)
        blocks = tiling.blocks(product.n)
        persistent = blocks > 4 * MULTIPROCESSORS
        if 96 <= blocks <= 2 * MULTIPROCESSORS + 24 or persistent:
            yield tiling._replace(persistent=persistent)


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
    """Tilings by lanes, and half as many by boxes, whose blocks all run at once and give every
    multiprocessor about as much to read, with enough of it on its way."""
    shape = (product.n, product.k, rows, product.norm, product.epilogue)
    chosen: list[Tiling] = []
    for cuts, most in ((_cuts_by_lanes(), count), (boxes(product), count // 2)):
        scores: dict[Tiling, float] = {}
        for cut in cuts:
            # Blocks on a multiprocessor, and units of K of a warp or a box.
            together = -(-cut.blocks(product.n) // MULTIPROCESSORS)
            units = product.k // UNIT / (cut.splits * cut.warps_k)
            if cut.persistent or together > 4 or units < 1:
                continue
            room = SHARED_BYTES // together - 1024
            for stages in range(min(14, math.ceil(units)), 1, -1):
                tiling = cut._replace(stages=stages)
                if tiling.fits(*shape) and tiling.shared_bytes(product.k, rows) <= room:
                    break
            else:
                continue
            share = cut.blocks(product.n) / MULTIPROCESSORS / together * units / math.ceil(units)
            flight = together * tiling.warps_n * tiling.warps_k * stages * 2048 * tiling.row_tiles
            scores[tiling] = share * min(1.0, flight / 65536) - 0.01 * tiling.splits
        taken: Counter[tuple[int, int]] = Counter()
        for tiling in sorted(scores, key=scores.__getitem__, reverse=True):
            alike = tiling.weight_rows, tiling.splits
            if taken[alike] < 3 and taken.total() < most:
                taken[alike] += 1
                chosen.append(tiling)
    return chosen


def _cuts_by_lanes() -> Iterator[Tiling]:
    for row_tiles, warps_n, warps_k, splits, stream, memory in itertools.product(
        (1, 2, 3, 4, 5, 6),
        (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
        (1, 2, 4, 8, 16),
        (1, 2, 3, 4, 6, 8),
        (False, True),
        (False, True),
    ):
        if 4 <= warps_n * warps_k <= 16:
            yield Tiling(row_tiles, warps_n, warps_k, splits, 2, stream, memory=memory)


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
    yield from (tiling._replace(splits=s) for s in (1, 2, 3, 4, 8))
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
    """The best tilings so far, by product."""

    def __init__(self, rig: Rig, end: float) -> None:
        self.rig, self.end = rig, end
        self.most = padded(rig.rows)
        decoder = rig.decoder({})
        self.products = decoder.products
        self.best: dict[str, Tiling] = {}
        for name, product in self.products.items():
            self.best[name] = start_of(product, self.most)
        rig.compile(self.best)
        self.first = self.step = rig.step_us(self.best)
        self.log: list[tuple[str, Tiling, float]] = []

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
            cuda.architecture(0),
        )
        for tiling in tqdm(tilings, name, file=sys.stderr, leave=False, disable=None):
            if time.monotonic() > self.end:
                return
            tried = {**self.best, name: tiling}
            try:
                step = self.rig.step_us(tried)
            except (ArithmeticError, RuntimeError) as error:
                print(f"dropped {name} {tuple(map(int, tiling))}: {str(error)[:100]}")
                continue
            self.log.append((name, tiling, step))
            if step < WORTH * self.step:
                # Again beside the one it replaces: clocks change.
                now = self.rig.step_us(self.best)
                step = max(step, self.rig.step_us(tried))
                if step < WORTH * now:
                    print(
                        f"{name} {tuple(map(int, tiling))}: {now:.1f} -> {step:.1f} us", flush=True
                    )
                    self.best, self.step = tried, step


Cut = tuple[int, ...]


def vary_constants(
    search: Search, module: ModuleType, names: Sequence[str], cuts: list[Cut]
) -> None:
    """Constants of a module of kernels: the best stay for the rest of the search."""

    def step(cut: Cut) -> float:
        for name, value in zip(names, cut, strict=True):
            setattr(module, name, value)
        search.rig.compile(search.best)
        time = min(search.rig.step_us(search.best) for _ in range(2))
        print(dict(zip(names, cut, strict=True)), f"{time:.1f} us", flush=True)
        return time

    known = tuple(getattr(module, name) for name in names)
    steps = {cut: step(cut) for cut in (known, *cuts)}
    best = min(steps, key=steps.__getitem__)
    search.step = step(best if steps[best] < WORTH * steps[known] else known)


ATTENTION = ("WARPS", "STAGES", "LEAST_BYTES")
ATTENTION_CUTS: list[Cut] = [(4, 2, 0), (4, 3, 0), (8, 2, 0), (2, 4, 0), (3, 2, 0), (2, 3, 0)]
ALONE_CUTS: list[Cut] = [(0,), (112 * 1024,)]


def search_all(search: Search, names: Sequence[str], rounds: int, count: int) -> None:
    """The constants, then all products in turn."""
    vary_constants(search, cuda_attention, ATTENTION, ATTENTION_CUTS)
    vary_constants(search, cuda_linear, ["ALONE_BYTES"], ALONE_CUTS)
    for number in range(rounds):
        for name in names:
            if number == 0:
                search.vary(name, spread(search.products[name], search.most, count))
            search.vary(name, list(neighbours(search.best[name])))


def line_of(product: Product, tiling: Tiling) -> str:
    """For ``_MEASURED``."""
    fields = [str(value) for value in tiling[:5]]
    fields += [f"{name}={value}" for name, value in list(tiling._asdict().items())[5:] if value]
    return f"({product.n}, {product.k}): Tiling({', '.join(fields)}),"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=384, help="tokens in the cache of each row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--count", type=int, default=40, help="tilings of the spread")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--products", default="fc1,fc2,qkv,projection,head")
    parser.add_argument(
        "--replays",
        type=int,
        default=12,
        help="steps of a measurement: some hundred show what a GPU's power limit costs",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="of searching, about")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tilings that fill the GPU evenly, with as many stages as fit, and no constants: 20 s",
    )
    parser.add_argument("--json", metavar="FILE", help="every time measured")
    args = parser.parse_args()
    if not 1 <= args.rows <= MAX_ROWS:
        parser.error(f"--rows must be 1 to {MAX_ROWS}")
    rig = Rig(args.shape, args.rows, args.layers, args.context, args.replays)
    try:
        search = Search(rig, time.monotonic() + args.seconds)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.shape} rows {args.rows}: {search.first:.1f} us with the tilings of tilings.py")
    names = args.products.split(",")
    if args.quick:
        for name in names:
            search.vary(name, short_list(search.products[name], search.most, args.count))
    else:
        search_all(search, names, args.rounds, args.count)
    print(f"{args.shape} rows {args.rows}: {search.first:.1f} -> {search.step:.1f} us")
    for name, tiling in search.best.items():
        print(line_of(search.products[name], tiling))
    if args.json:
        log = [(name, [int(v) for v in tiling], step) for name, tiling, step in search.log]
        Path(args.json).write_text(json.dumps({"command": vars(args), "measured": log}))


if __name__ == "__main__":
    main()
