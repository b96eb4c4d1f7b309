"""The search for tile configs of the fused decode step: where they are used, in the step.

A config is measured among those of the other GEMMs, in a whole step (``timed_step.py``). One GEMM
after the other is varied. A config that changes the logits is reported and dropped.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tqdm import tqdm

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.gemm.tile_config import TileConfig, padded
from megatron_async.kernels.gemm.untuned.search import deepest, neighbours, short_list, spread
from megatron_async.models.fused.timed_step import Configs, Rig

WORTH = 0.998
"""A config replaces another one if the step takes at most this share of its time."""


class Search:
    """The best configs so far, by GEMM; all times, and what was dropped and why.

    Args:
        end: when to stop, by ``time.monotonic``.
        report: is told of configs that are better, and of those that fail.

    Raises:
        ValueError: a GEMM has no config to begin with.
    """

    def __init__(
        self, rig: Rig, end: float = math.inf, report: Callable[[str], None] | None = None
    ) -> None:
        self.rig, self.end = rig, end
        self.report = report or (lambda line: None)
        self.most = padded(rig.rows)
        self.products = rig.decoder({}).gemms
        self.best: Configs = {}
        for name, product in self.products.items():
            used = product.tiling(self.most)
            # Many rows without a config in use take one with large TMA tiles.
            self.best[name] = used or deepest(**self.shape_of(name))[-1]
        self.first_configs = dict(self.best)
        rig.compile(self.best)
        self.first = self.step = rig.step_us(self.best)
        self.log: list[tuple[str, TileConfig, float]] = []
        self.dropped: list[str] = []

    def shape_of(self, name: str) -> dict[str, Any]:
        """What says which configs a GEMM can have."""
        product = self.products[name]
        problem = product.case(self.most)
        return {
            "problem": problem, "tma": product.tma, "sm_count": product.sm_count,
            "limit": product.limit,
        }  # fmt: skip

    @property
    def changed(self) -> list[str]:
        """The GEMMs for which something better was found."""
        return [name for name, best in self.best.items() if best != self.first_configs[name]]

    def vary(self, name: str, configs: Sequence[TileConfig]) -> None:
        """Measure configs of one GEMM, and take the best."""
        product, seen = self.products[name], {t for n, t, _ in self.log if n == name}
        problem = product.case(self.most)
        configs = [
            config
            for config in dict.fromkeys(configs)
            if config not in seen and config.can_serve(problem, product.limit)
        ]
        if time.monotonic() > self.end:
            return
        decoder = self.rig.decoder({})
        cuda.compile_together(
            [(c.kernel, decoder.defines(product, self.most, c)) for c in configs],
            cuda.architecture(self.rig.device.index or 0),
        )
        for config in tqdm(configs, name, file=sys.stderr, leave=False, disable=None):
            if time.monotonic() > self.end:
                return
            tried = {**self.best, name: config}
            try:
                step = self.rig.step_us(tried)
            except (ArithmeticError, RuntimeError) as error:
                self.dropped.append(f"{name} {tuple(map(int, config))}: {str(error)[:100]}")
                self.report(f"dropped {self.dropped[-1]}")
                continue
            self.log.append((name, config, step))
            if step < WORTH * self.step:
                # Again next to the one it replaces: clocks change.
                now = self.rig.step_us(self.best)
                step = max(step, self.rig.step_us(tried))
                if step < WORTH * now:
                    self.report(f"{name} {tuple(map(int, config))}: {now:.1f} -> {step:.1f} us")
                    self.best, self.step = tried, step

    def vary_constants(
        self, module: ModuleType, names: Sequence[str], choices: Sequence[tuple[int, ...]]
    ) -> None:
        """Constants of a kernel's module: the best stay for the rest of the search."""

        def step(values: tuple[int, ...]) -> float:
            for name, value in zip(names, values, strict=True):
                setattr(module, name, value)
            self.rig.compile(self.best)
            least = min(self.rig.step_us(self.best) for _ in range(2))
            self.report(f"{dict(zip(names, values, strict=True))}: {least:.1f} us")
            return least

        used = tuple(getattr(module, name) for name in names)
        steps = {values: step(values) for values in (used, *choices)}
        best = min(steps, key=steps.__getitem__)
        self.step = step(best if steps[best] < WORTH * steps[used] else used)


CONSTANTS: list[tuple[ModuleType, tuple[str, ...], list[tuple[int, ...]]]] = [
    (
        decode_attention,
        ("WARPS", "STAGES", "MIN_SHARED_BYTES"),
        [(4, 2, 0), (4, 3, 0), (8, 2, 0), (2, 4, 0), (3, 2, 0), (2, 3, 0)],
    ),
    (skinny_gemm, ("ALONE_BYTES",), [(0,), (112 * 1024,)]),
]


def search_short_lists(search: Search, names: Sequence[str], count: int) -> None:
    """Configs of each GEMM that are likely to be fast."""
    label = f"batch {search.rig.rows}"
    names = [name for name in names if name in search.products]
    for name in tqdm(names, label, file=sys.stderr, disable=None, leave=False):
        # Heads are wide: there is little to choose, and each try takes long.
        most = max(1, count // 3) if name == "head" else count
        search.vary(name, short_list(count=most, **search.shape_of(name)))


def search_all(search: Search, names: Sequence[str], rounds: int, count: int) -> None:
    """Constants, then all GEMMs in turn: at first configs at random, then the best one's
    neighbours. In the end the constants are what they were."""
    used = [(module, n, getattr(module, n)) for module, each, _ in CONSTANTS for n in each]
    names = [name for name in names if name in search.products]
    try:
        for constants in CONSTANTS:
            search.vary_constants(*constants)
        for number, name in itertools.product(range(rounds), names):
            if number == 0:
                search.vary(name, spread(count=count, **search.shape_of(name)))
            search.vary(name, list(neighbours(search.best[name])))
    finally:
        for module, constant, value in used:
            setattr(module, constant, value)
