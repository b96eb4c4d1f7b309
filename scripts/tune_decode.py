"""Search for faster tilings of the fused decode step of a known shape, for the table.

    python scripts/tune_decode.py --shape llama8b --rows 32 --context 384

``megatron-async tune`` makes the short search, for any model, and keeps what it finds on this
machine. This one varies more and takes minutes: a spread of each product's tilings at first, then
those that differ from the best one in a field, and constants of the kernels. At the end stand lines
for ``kernels/cuda/measured_tilings.py``. ``--quick`` tries the short list alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from megatron_async.inference.benchmark.shapes import SHAPES
from megatron_async.inference.tune_search import (
    WORTH,
    Rig,
    Search,
    line_of,
    neighbours,
    short_list,
    spread,
)
from megatron_async.kernels.attention import decode_attention as cuda_attention
from megatron_async.kernels.gemm import skinny_gemm as cuda_linear
from megatron_async.kernels.gemm.tilings import MAX_ROWS

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
    rig = Rig(
        SHAPES[args.shape],
        args.rows,
        layers=args.layers,
        context=args.context,
        replays=args.replays,
        device=torch.device("cuda", 0),
    )
    say = functools.partial(print, flush=True)
    try:
        search = Search(rig, time.monotonic() + args.seconds, say)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.shape} rows {args.rows}: {search.first:.1f} us with the tilings in use")
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
