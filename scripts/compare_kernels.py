"""Time a decode step with these CUDA sources beside the same step with others, on a GPU.

    mkdir -p /tmp/before
    git archive HEAD~1 megatron_async/kernels | tar -x -C /tmp/before
    python scripts/compare_kernels.py /tmp/before/megatron_async/kernels --shape llama8b

The folder takes the place of this package's sources alone: both sides are cut and called by the
same Python. The two steps take turns, so that what clocks and power do hits both alike; each is a
graph of the whole forward of a model with a few layers. ``error`` is the relative difference of the
logits: 0 where sums are taken in the same order. Exit status 1: it is above 2e-2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_async.inference.benchmark.shapes import SHAPES
from megatron_async.inference.tune_search import ERROR_LIMIT, Rig, Step
from megatron_async.kernels import compile as cuda


def capture(rig: Rig, sources: Path) -> Step:
    """A step with the kernels of ``sources``."""
    own, cuda.SOURCES = cuda.SOURCES, sources
    cuda._kernel.cache_clear()
    try:
        rig.compile({})
        return rig.capture({})
    finally:
        cuda.SOURCES = own
        cuda._kernel.cache_clear()


def compare(
    rig: Rig, sources: Sequence[Path], rounds: int, label: str
) -> tuple[list[float], float]:
    """Median microseconds of a step with each of the ``sources``, and the last one's error."""
    steps = [capture(rig, folder) for folder in sources]
    times: list[list[float]] = [[] for _ in steps]
    for number in tqdm(range(rounds + 1), label, file=sys.stderr, leave=False, disable=None):
        for step, several in zip(steps, times, strict=True):
            time = rig.mean_us(step)
            if number:  # the first round warms up
                several.append(time)
    return [statistics.median(several) for several in times], steps[-1].error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, metavar="FOLDER", help="the other CUDA sources")
    parser.add_argument("--shape", default="llama8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", default="32,1", metavar="R,...")
    parser.add_argument("--context", default="384", metavar="N,...", help="tokens of each row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--replays", type=int, default=20, help="steps of each mean")
    args = parser.parse_args()
    if not (args.other / "gemm" / "linear.cu").is_file():
        parser.error(f"{args.other} holds no gemm/linear.cu; name a folder kernels")
    wrong = False
    print("shape, rows, context: us with the others -> us with these, ratio, error")
    for rows in map(int, args.rows.split(",")):
        for context in map(int, args.context.split(",")):
            label = f"{args.shape}, {rows}, {context}"
            rig = Rig(
                SHAPES[args.shape],
                rows,
                layers=args.layers,
                context=context,
                replays=args.replays,
                device=torch.device("cuda", 0),
            )
            sources = [args.other, cuda.SOURCES]
            (before, after), error = compare(rig, sources, args.rounds, label)
            print(
                f"{label}: {before:.1f} -> {after:.1f}, {after / before:.4f}, {error:.2g}",
                flush=True,
            )
            wrong |= not error < ERROR_LIMIT
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
