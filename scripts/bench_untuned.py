"""Time skinny GEMMs of shapes that are not in the table of tile configs: which config is chosen,
and how far it is from the best of those that are tried.

    python scripts/bench_untuned.py --seconds 140 > untuned.txt
    python scripts/bench_untuned.py --models phi4,nemo --rows 1,32 --known untuned.txt

Models' GEMMs are timed one by one, with weights that come from memory. Each line of JSON is one
measurement: the problem, the config (as numbers, in the order of ``TileConfig``), why it was tried
and microseconds. ``old`` is the heuristic of ``tile_choice.py`` alone, ``new`` what engines take
now, ``start`` the best of those that an engine's start times, ``near`` a config measured for
another shape that fits, ``rank`` and ``wide`` others. ``torch`` is PyTorch's product without
epilogue (cuBLAS). Kernels are compiled in processes beside the
measurements, and problems take turns, so that the run may end at any time: after ``--seconds`` it
prints the table, in which a layer is all GEMMs of the model weighted by their number, the output
layer by one over the layers. ``--known`` reads the lines of an earlier run, and goes on from there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_async.device.cuda_timeline import mean_us
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.skinny_gemm import defines
from megatron_async.kernels.gemm.tile_choice import find, heuristic_config
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    GemmProblem,
    TileConfig,
    measured,
)
from megatron_async.kernels.gemm.untuned.ranking import short_ranking
from megatron_async.kernels.gemm.untuned.search import balanced
from megatron_async.kernels.gemm.untuned.timing import (
    TimedGemm,
    bytes_needed,
    norm_statistics,
    random_weights,
    weight_bytes,
)
from megatron_async.kernels.shared_memory import block_limit
from megatron_async.models.fused.autotune import CANDIDATES

Sizes = tuple[int, int, int, int, int, int, int]
MODELS: dict[str, Sizes] = {
    # layers, hidden size, MLP width, query and KV heads, head dimension, vocabulary
    "llama13b": (40, 5120, 13824, 40, 40, 128, 32000),
    "qwen14b": (48, 5120, 13824, 40, 8, 128, 152064),
    "nemo": (40, 5120, 14336, 32, 8, 128, 131072),
    "phi4": (40, 5120, 17920, 40, 10, 128, 100352),
    "llama8b": (32, 4096, 14336, 32, 8, 128, 128256),
}
WORKERS = max(1, min(15, (os.cpu_count() or 2) - 1))
SPARE_SECONDS = 8.0
"""For times of the best in turns, and the table."""


class Layer(NamedTuple):
    """GEMMs of a model, each with how many of it there are for each layer."""

    name: str
    gemms: dict[str, tuple[int, int, int, int]]
    weights: dict[str, float]


def layer_of(model: str, ranks: int) -> Layer:
    """A layer of one of ``ranks`` ranks: (n, k, norm, epilogue) by name."""
    layers, hidden, width, heads, kv_heads, size, vocabulary = MODELS[model]
    end = ADD if ranks == 1 else STORE
    gemms = {
        "qkv": ((heads + 2 * kv_heads) * size // ranks, hidden, RMS_NORM, STORE),
        "projection": (hidden, heads * size // ranks, NO_NORM, end),
        "fc1": (2 * width // ranks, hidden, RMS_NORM, SILU_GATE),
        "fc2": (hidden, width // ranks, NO_NORM, end),
        "head": (vocabulary // ranks, hidden, RMS_NORM, STORE),
    }
    weights = dict.fromkeys(gemms, 1.0) | {"head": 1 / layers}
    return Layer(model if ranks == 1 else f"{model} TP{ranks}", gemms, weights)


class Case(NamedTuple):
    """A config to be timed, and why."""

    problem: GemmProblem
    config: TileConfig
    why: str


def nearest(problem: GemmProblem, count: int, limit: int) -> Iterator[TileConfig]:
    """Configs measured for shapes most like this one, at the same rows, that can be built."""

    def distance(other: GemmProblem) -> float:
        return abs(math.log(other.n / problem.n)) + abs(math.log(other.k / problem.k))

    like = [e for e in measured().values() if e.problem.rows == problem.rows]
    like = [e for e in like if e.problem.scale_columns == problem.scale_columns]
    fitting = [e for e in like if e.config.can_serve(problem, limit)]
    for entry in sorted(fitting, key=lambda e: distance(e.problem))[:count]:
        yield entry.config


def old_config(problem: GemmProblem, sms: int, limit: int) -> TileConfig | None:
    """What the heuristic says of a shape that is not in the table."""
    rows, n, k, norm, epilogue, *_ = problem
    assert norm is not None and epilogue is not None
    if rows > ANY_SHAPE_ROWS:
        return None
    return heuristic_config(n, k, rows, norm, epilogue, sm_count=sms, limit=limit)


def chosen_of(problem: GemmProblem, sms: int, limit: int) -> list[Case]:
    """What is chosen without a measurement."""
    old, new = old_config(problem, sms, limit), find(problem, sm_count=sms, limit=limit)
    found = [] if old is None else [Case(problem, old, "old")]
    if new is not None and new.config != old:
        found.append(Case(problem, new.config, "new"))
    return found


def cases_of(problem: GemmProblem, count: int, sms: int, limit: int) -> list[Case]:
    """Configs of a problem in the order in which they are timed."""
    ranking = [
        (f"rank {place}", config)
        for place, config in enumerate(
            short_ranking(problem, count, tma=True, sm_count=sms, limit=limit), 1
        )
    ]
    near = [("near", config) for config in nearest(problem, 3, limit)]
    most = max(4, count // 2)
    others = balanced(problem, most, tma=True, sm_count=sms, limit=limit)
    wide = [("wide", config) for config in others]
    found = ranking[:2]
    for several in itertools.zip_longest(ranking[2:], near, wide):
        found += [each for each in several if each is not None]
    whys: dict[TileConfig, str] = {}
    for why, config in found:
        if config.can_serve(problem, limit):
            whys[config] = f"{whys[config]}, {why}" if config in whys else why
    return [Case(problem, config, why) for config, why in whys.items()]


def reader_of(problem: GemmProblem) -> int:
    return RMS_NORM if problem.epilogue == ADD else NO_NORM


def compile_case(case: Case, sms: int, limit: int, architecture: str) -> str | None:
    """Compile a kernel into the cache, in a process of its own; why it does not, if so."""
    rows, n, k, norm, epilogue, *_ = case.problem
    assert norm is not None and epilogue is not None
    statistics = norm_statistics(case.problem, reader_of(case.problem))
    macros = defines(n, k, rows, norm, epilogue, statistics, case.config, sms, limit)
    try:
        cuda.compile_together([(case.config.kernel, macros)], architecture)
    except Exception as error:  # the measurement goes on without it
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


Times = dict[tuple[GemmProblem, TileConfig], tuple[float, str]]


class Bench:
    """Times of all cases so far."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device, self.times = device, Times()
        self.torch_us: dict[GemmProblem, float] = {}
        self.memory = random_weights(most_bytes, device)
        self._timed: dict[GemmProblem, TimedGemm] = {}

    def timed(self, problem: GemmProblem) -> TimedGemm:
        if problem not in self._timed:
            self._timed[problem] = TimedGemm(problem, reader_of(problem), self.memory)
        return self._timed[problem]

    def time(self, case: Case) -> None:
        """Time a case and print it."""
        try:
            us = self.timed(case.problem).time_us(case.config)
        except (ArithmeticError, RuntimeError) as error:
            note(f"failed: {case.problem} {tuple(map(int, case.config))}: {str(error)[:160]}")
            if "illegal" in str(error) or "launch failure" in str(error):
                raise
            return
        self.keep(case.problem, case.config, case.why, us)

    def keep(self, problem: GemmProblem, config: TileConfig, why: str, us: float) -> None:
        before = self.times.get((problem, config), (us, why))
        self.times[problem, config] = min(us, before[0]), before[1]
        line = {"problem": problem, "config": [int(v) for v in config], "why": why}
        print(json.dumps({**line, "us": round(us, 3)}), flush=True)

    def time_torch(self, problem: GemmProblem) -> None:
        """PyTorch's product."""
        count = bytes_needed(problem) // weight_bytes(problem)
        weights = self.memory[: bytes_needed(problem)].view(torch.bfloat16)
        weights = weights.view(count, problem.n, problem.k)
        x = torch.randn(problem.rows, problem.k, device=self.device, dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        F.linear(x, weights[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            graph.capture_begin(capture_error_mode="thread_local")
            for weight in weights:
                F.linear(x, weight)
            graph.capture_end()
        graph.replay()
        us = min(mean_us(graph.replay, 1) for _ in range(4)) / count
        self.torch_us[problem] = us
        print(json.dumps({"problem": problem, "why": "torch", "us": round(us, 3)}), flush=True)

    def best(self, problem: GemmProblem) -> tuple[float, TileConfig] | None:
        of = [(us, config) for (each, config), (us, _) in self.times.items() if each == problem]
        return min(of, default=None)

    def best_at_start(
        self, problem: GemmProblem, used: TileConfig | None, limit: int
    ) -> float | None:
        """The best of what an engine's start would time, if any was."""
        sms = cuda.sm_count(self.device.index or 0)
        ranked = short_ranking(problem, CANDIDATES, tma=True, sm_count=sms, limit=limit)
        times = [self.us_of(problem, config) for config in (used, *ranked)]
        return min((us for us in times if us is not None), default=None)

    def us_of(self, problem: GemmProblem, config: TileConfig | None) -> float | None:
        found = None if config is None else self.times.get((problem, config))
        return None if found is None else found[0]


def note(text: str) -> None:
    print(f"# {text}", flush=True)


def read_known(path: Path, bench: Bench) -> None:
    """Times of an earlier run."""
    for line in path.read_text().splitlines():
        if not line.startswith("{"):
            continue
        values = json.loads(line)
        problem = GemmProblem(*values["problem"])
        if values["why"] == "torch":
            bench.torch_us[problem] = values["us"]
            continue
        numbers = values["config"]
        config = TileConfig(*numbers[:5], *map(bool, numbers[5:]))
        bench.times[problem, config] = values["us"], values["why"]


def all_cases(
    pool: Executor, problems: list[GemmProblem], count: int, sms: int, limit: int
) -> list[Case]:
    """At first what is chosen for each problem, then others, with problems taking turns."""
    by_kind = [
        list(pool.map(functools.partial(of, sms=sms, limit=limit), problems, chunksize=4))
        for of in (chosen_of, functools.partial(cases_of, count=count))
    ]
    in_turns = [
        case
        for several in by_kind
        for case in itertools.chain.from_iterable(itertools.zip_longest(*several))
        if case is not None
    ]
    first: dict[tuple[GemmProblem, TileConfig], Case] = {}
    for case in in_turns:
        key = case.problem, case.config
        before = first.get(key)
        why = case.why if before is None else f"{before.why}, {case.why}"
        first[key] = case._replace(why=why)
    return list(first.values())


def measure(
    bench: Bench, pool: Executor, cases: list[Case], end: float, sms: int, limit: int
) -> None:
    """Time the cases in their order as their kernels are there, until ``end``."""
    architecture = cuda.architecture(bench.device.index or 0)
    waiting = [
        (case, pool.submit(compile_case, case, sms, limit, architecture))
        for case in cases
        if (case.problem, case.config) not in bench.times
    ]
    note(f"{len(waiting)} configs, {end - time.monotonic():.0f} s are left")
    while waiting and time.monotonic() < end:
        number = next((i for i, (_, future) in enumerate(waiting) if future.done()), None)
        if number is None:
            time.sleep(0.01)
            continue
        case, future = waiting.pop(number)
        failed = future.result()
        if failed is None:
            bench.time(case)
        else:
            note(f"not compiled: {case}: {failed}")
    note(f"{len(waiting)} configs were not timed")


def again(bench: Bench, problems: list[GemmProblem], end: float, sms: int, limit: int) -> None:
    """The best and the chosen ones once more next to each other, since clocks change."""
    for problem in problems:
        if time.monotonic() > end:
            note("not all of the best were timed again")
            return
        best, new = bench.best(problem), find(problem, sm_count=sms, limit=limit)
        chosen = [best and best[1], old_config(problem, sms, limit), new and new.config]
        several = dict.fromkeys(c for c in chosen if bench.us_of(problem, c) is not None)
        if len(several) < 2:
            continue
        timed = bench.timed(problem)
        try:
            rounds = [[timed.time_us(c, 2) for c in several if c is not None] for _ in range(2)]
        except (ArithmeticError, RuntimeError) as error:
            note(f"failed: {problem}: {str(error)[:160]}")
            continue
        for config, us in zip(several, map(min, zip(*rounds, strict=True)), strict=True):
            assert config is not None
            bench.times[problem, config] = us, bench.times[problem, config][1]
            line = {"problem": problem, "config": [int(v) for v in config], "why": "again"}
            print(json.dumps({**line, "us": round(us, 3)}), flush=True)


def table(bench: Bench, layers: list[Layer], rows: list[int], sms: int, limit: int) -> None:
    """Sums over a layer: of the old choice, of the new one, of a start's, and of the best that was
    tried."""
    print(
        "layer, rows: us old, new, start, best, torch; old, new and start above the best; "
        "GEMM: us old new start best torch"
    )
    for layer, each in itertools.product(layers, rows):
        sums = dict.fromkeys(("old", "new", "start", "best", "torch"), 0.0)
        gaps = []
        for name, gemm in layer.gemms.items():
            problem = GemmProblem(each, *gemm)
            best, new = bench.best(problem), find(problem, sm_count=sms, limit=limit)
            ranks = {
                "old": bench.us_of(problem, old_config(problem, sms, limit)),
                "new": bench.us_of(problem, new and new.config),
                "start": bench.best_at_start(problem, new and new.config, limit),
                "best": best and best[0],
                "torch": bench.torch_us.get(problem),
            }
            for kind, us in ranks.items():
                sums[kind] += layer.weights[name] * (float("nan") if us is None else us)
            shown = " ".join("-" if u is None else f"{u:.1f}" for u in ranks.values())
            if best is not None:
                why = bench.times[problem, best[1]][1]
                shown += f"; {why}, {tuple(map(int, best[1]))}"
            gaps.append(f"{name} {shown}")
        shown = ", ".join(f"{value:.1f}" for value in sums.values())
        above = ", ".join(f"{sums[k] / sums['best'] - 1:+.1%}" for k in ("old", "new", "start"))
        print(f"{layer.name}, {each}: {shown}; {above}")
        for line in gaps:
            print(f"    {line}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=140, help="of everything (default: 140)")
    parser.add_argument("--models", default=",".join(MODELS), help="some of the five")
    parser.add_argument("--ranks", default="1,2", help="that share a model (default: 1,2)")
    parser.add_argument("--rows", default="1,32,8,64", help="default: 1,32,8,64")
    parser.add_argument(
        "--count", type=int, default=9, help="ranked configs of a GEMM (default: 9)"
    )
    parser.add_argument("--known", type=Path, help="lines of an earlier run, not timed again")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    rows, models = [int(each) for each in args.rows.split(",")], args.models.split(",")
    ranks = [int(each) for each in args.ranks.split(",")]
    layouts = [each for each in itertools.product(models, ranks) if each != ("llama8b", 1)]
    layers = [layer_of(*layout) for layout in layouts]
    device = torch.device("cuda", torch.cuda.current_device())
    sms, limit = cuda.sm_count(device.index), block_limit(device)
    several = [
        GemmProblem(each, *gemm)
        for each, layer in itertools.product(rows, layers)
        for gemm in layer.gemms.values()
    ]
    problems = list(dict.fromkeys(several))
    bench = Bench(device, max(map(bytes_needed, problems)))
    if args.known is not None:
        read_known(args.known, bench)
    note(f"{torch.cuda.get_device_name(device)}: {len(problems)} problems")
    pool = ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn"))
    try:
        cases = all_cases(pool, problems, args.count, sms, limit)
        spare = SPARE_SECONDS + 0.05 * len(problems)
        measure(bench, pool, cases, end - spare, sms, limit)
        for problem in problems:
            if problem not in bench.torch_us and time.monotonic() < end - SPARE_SECONDS:
                bench.time_torch(problem)
        again(bench, problems, end - 2, sms, limit)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        table(bench, layers, sorted(rows), sms, limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
