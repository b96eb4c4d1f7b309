"""The search for tile configs of the fused decode step: where they are used, in the step.

A CUDA graph of the whole forward of a model with a few layers is timed. Kernels that follow each
other share SMs, so a config is measured among those of the other GEMMs. One GEMM after the other is
varied. A config that changes the logits is reported and dropped.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from megatron_async.device import waiting_grids
from megatron_async.device.cuda_timeline import mean_us
from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.drafting.mtp_input import DraftInput
from megatron_async.kernels.gemm import skinny_gemm
from megatron_async.kernels.gemm.tile_choice import deepest, neighbours, short_list, spread
from megatron_async.kernels.gemm.tile_config import MAX_ROWS, TileConfig, padded
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.recurrent_state_spec import recurrent_state_spec
from megatron_async.models.fused import coverage
from megatron_async.models.fused.blocks.gemms import Gemm
from megatron_async.models.fused.blocks.moe_block import is_mixture
from megatron_async.models.fused.coverage import mtp_blocks
from megatron_async.models.fused.decoder import FusedDecoder
from megatron_async.models.fused.mtp import FusedMtp
from megatron_async.models.fused.report import PROJECTION

BLOCK_SIZE = 64
ERROR_LIMIT = 2e-2
WORTH = 0.998
"""A config replaces another one if the step takes at most this share of its time."""

Configs = dict[str, TileConfig]
"""By the GEMM's name."""


class FusedStep:
    """The kernels of a step: the decoder's, and in a model with MTP layers the projection of the
    first one, whose other GEMMs have shapes of the decoder's."""

    def __init__(self, model: Any, configs: Configs) -> None:
        self.decoder = FusedDecoder(model, tilings=configs)
        self.off, self.takes = self.decoder.off, self.decoder.takes
        self._mtp: FusedMtp | None = None
        if any(b.reason is None for b in mtp_blocks(model) if b.kind == PROJECTION):
            self._mtp = FusedMtp(model, configs)
            weight: torch.Tensor = model.mtp.layers[0].eh_proj.weight
            draw = torch.Generator(weight.device).manual_seed(1)
            size = (MAX_ROWS, 1, weight.shape[0])
            hidden = torch.randn(size, generator=draw, device=weight.device)
            self._hidden = hidden.to(weight.dtype)

    @property
    def gemms(self) -> dict[str, Gemm]:
        """By name, see :class:`~.decoder.FusedDecoder`; the projection is "eh_proj"."""
        found = dict(self.decoder.gemms)
        if self._mtp is not None:
            found["eh_proj"] = self._mtp.gemms["eh_proj"]
        return found

    def defines(self, gemm: Gemm, rows: int, tiling: TileConfig) -> dict[str, int]:
        """Macros of a GEMM's kernel for padded ``rows``."""
        return self.decoder.defines(gemm, rows, tiling)

    def compile(self, rows: list[int], context: Any) -> None:
        """Compile what steps of ``rows`` rows need, side by side."""
        self.decoder.compile(rows, context)
        if self._mtp is not None:
            self._mtp.compile(rows, 1, context)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, context: Any, logits: torch.Tensor
    ) -> torch.Tensor | None:
        """The decoder's forward into ``logits``; returns what the projection puts out."""
        self.decoder.forward(tokens, positions, context, logits)
        return None if self._mtp is None else self._project(self._mtp, tokens, positions)

    def _project(
        self, mtp: FusedMtp, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        nothing, hidden = torch.zeros_like(tokens), self._hidden[: len(tokens)]
        tails = hidden[:1]
        of = DraftInput(0, 0, tokens[:, None], positions, hidden, nothing, nothing, tails)
        return mtp.project(of)


class Step(NamedTuple):
    """A captured step, and what its graph needs: the kernels, and where the logits go."""

    decoder: FusedStep
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
        config = first_layers(config, min(layers, config.num_layers))
        layers = config.num_layers
        self.device = device
        self.rows, self.replays = rows, replays
        self.model = build_random_model(config, device=self.device, dtype=torch.bfloat16)
        equal_experts(self.model)
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
            window=1,
            has_gaps=False,
            num_speculative_tokens=0,
            batch_invariant=False,
            is_decode_only=lambda: True,
            device=self.device,
            position_ids=self.positions,
            states=self._states(),
            grids_may_wait=waiting_grids.claim(self.device, self) is None,
        )
        self.tokens = torch.randint(config.vocab_size, (rows,), device=self.device)
        self.wanted: list[torch.Tensor] = []
        reason = attention_in_modules(self.model) or self.decoder({}).off([rows], self.context)
        if reason is not None:
            raise ValueError(reason)

    def close(self) -> None:
        """Another rig, or an engine, may launch kernels whose CTAs wait for each other."""
        waiting_grids.release(self)

    def _states(self) -> SimpleNamespace | None:
        """Like a pool with a slot for each row, of a model with recurrent layers."""
        spec = recurrent_state_spec(self.model)
        if spec is None:
            return None
        layers = [
            {
                name: torch.zeros(self.rows + 1, 1, *shape, dtype=dtype, device=self.device)
                for name, shape, dtype, *_ in spec.tensors
            }
            for _ in range(spec.num_layers)
        ]
        slots = torch.arange(self.rows, device=self.device)
        decode = SimpleNamespace(slots=slots, first=torch.zeros_like(slots), window=1, tokens=None)
        return SimpleNamespace(
            null_slot=self.rows,
            entries=1,
            layers=layers,
            layer=layers.__getitem__,
            step=SimpleNamespace(decode=decode, chunks=None),
            step_rows=None,
            window_rows=None,
            kernels=None,
        )

    def _restart(self) -> None:
        """Recurrent states are zeros again, so that the same step gives the same logits."""
        if self.context.states is not None:
            for layer in self.context.states.layers:
                for tensor in layer.values():
                    tensor.zero_()

    def decoder(self, configs: Configs) -> FusedStep:
        return FusedStep(self.model, configs)

    def compile(self, configs: Configs) -> None:
        """Compile a step's kernels in parallel."""
        self.decoder(configs).compile([self.rows], self.context)

    def capture(self, configs: Configs) -> Step:
        """A step's graph, and how far its logits are from those of the first one."""
        decoder = self.decoder(configs)
        size = decoder.gemms["head"].n
        logits = torch.zeros(self.rows, size, device=self.device, dtype=torch.bfloat16)
        assert decoder.takes(logits, self.context)
        self._restart()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        projected = decoder.forward(self.tokens, self.positions, self.context, logits)
        torch.cuda.synchronize()
        got = [x.double() for x in (logits, projected) if x is not None]
        self.wanted = self.wanted or got
        errors = [(x - y).norm() / y.norm() for x, y in zip(got, self.wanted, strict=True)]
        error = float(torch.stack(errors).max())
        with torch.cuda.graph(graph, stream=stream):
            decoder.forward(self.tokens, self.positions, self.context, logits)
        return Step(decoder, graph, logits, error)

    def mean_us(self, step: Step) -> float:
        """Microseconds of a step, the mean of ``replays``."""
        return mean_us(step.graph.replay, self.replays)

    def step_us(self, configs: Configs) -> float:
        """Microseconds of a step, the least of several means.

        Raises:
            ArithmeticError: the logits are not those of the first call.
        """
        step = self.capture(configs)
        if not step.error < ERROR_LIMIT:
            raise ArithmeticError(f"relative error {step.error:.3g}")
        return min([self.mean_us(step) for _ in range(4)][1:])

    def compare(self, before: Configs, after: Configs) -> tuple[float, float]:
        """Microseconds of a step with either."""
        first, second = in_turns(self.mean_us, [self.capture(before), self.capture(after)])
        return first, second


def attention_in_modules(model: Any) -> str | None:
    """Why some attention is not in kernels; its module needs more than a rig's context has."""
    for block in coverage.blocks(model):
        if block.kind == coverage.ATTENTION and block.reason is not None:
            return f"the attention of layer {block.layer} is computed by its module: {block.reason}"
    return None


def equal_experts(model: Any) -> None:
    """Give all experts of a layer the weights of its first. What they read stays the same, and a
    GEMM that rounds otherwise, so that another expert is chosen, does not change the logits."""
    for module in model.modules():
        if is_mixture(module):
            for weight in module.weights:
                if weight is not None:
                    weight.data.copy_(weight.data[:1].clone().expand_as(weight))


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The model with its first ``layers`` layers; a hybrid one has as many as have one of each of
    its kinds."""
    pattern = config.hybrid_override_pattern
    if pattern is None:
        return replace(config, num_layers=layers)
    while set(pattern[:layers]) != set(pattern):
        layers += 1
    return replace(config, num_layers=layers, hybrid_override_pattern=pattern[:layers])


def in_turns(
    mean_us: Callable[[Step], float], steps: Sequence[Step], rounds: Iterable[int] = range(6)
) -> list[float]:
    """Microseconds of each step, measured in turns, since clocks and power change: medians over all
    ``rounds`` but the first, which warms up."""
    times = [[mean_us(step) for step in steps] for _ in rounds][1:]
    return [statistics.median(several) for several in zip(*times, strict=True)]


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
