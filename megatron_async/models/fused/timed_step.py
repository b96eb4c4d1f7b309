"""A fused decode step of a model with few layers, captured and timed.

A CUDA graph of the whole forward is timed, since kernels that follow each other share SMs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron_async.device import waiting_grids
from megatron_async.device.cuda_timeline import mean_us
from megatron_async.kernels.drafting.mtp_input import DraftInput
from megatron_async.kernels.gemm.tile_config import MAX_ROWS, TileConfig
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
ERROR_LIMIT, E4M3_ERROR_LIMIT = 2e-2, 6e-2
"""Relative, of logits: a step whose error is larger computes something else. Where layers quantize
their inputs, a bfloat16 that is rounded otherwise may become the next number of e4m3."""

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
        """The GEMMs by name, see :class:`~.decoder.FusedDecoder`; the projection is "eh_proj"."""
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
        quantize: linear layers keep e4m3 with a scale for each row.
        quantize_activations: and quantize their inputs.

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
        quantize: bool = False,
        quantize_activations: bool = False,
    ) -> None:
        config = first_layers(config, min(layers, config.num_layers))
        layers = config.num_layers
        self.device = device
        self.rows, self.replays = rows, replays
        self.model = build_random_model(
            config, device=self.device, dtype=torch.bfloat16, quantize=quantize,
            quantize_activations=quantize_activations,
        )  # fmt: skip
        self.error_limit = E4M3_ERROR_LIMIT if quantize_activations else ERROR_LIMIT
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
            scales=None,
            has_gaps=False,
            num_speculative_tokens=0,
            batch_invariant=False,
            is_decode_only=lambda: True,
            device=self.device,
            position_ids=self.positions,
            states=self._states(),
            grids_may_wait=waiting_grids.claim(self.device, self) is None,
            gemm_autotune_seconds=0.0,
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
        """What a pool with a slot for each row has; None without recurrent layers."""
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
        if not step.error < self.error_limit:
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
            for weight in module.kept_weights:
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
