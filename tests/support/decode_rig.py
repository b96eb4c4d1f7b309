"""Decode steps alone: rows of tokens one after the other from an empty cache, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.batches import new_batch
from tests.support.cuda_kernels import relative_error
from tests.unit.models.test_forward_accuracy import MODELS, Float64Model, draw_weights, tiny

ROWS, TOKENS, BLOCK_SIZE = 3, 5, 16
Forward = Callable[[Tensor, Tensor, Any, Tensor], None]
"""Token ids, positions, context, and where the logits go."""


def small(name: str) -> ModelConfig:
    """One of ``MODELS`` in the smallest size that the kernels take."""
    return replace(tiny(MODELS[name]), hidden_size=128, head_dim=32, ffn_hidden_size=256)


def bfloat16_model(config: ModelConfig, device: torch.device) -> Any:
    """With weights that all matter."""
    model = build_model(config, device=device, dtype=torch.bfloat16, initialize=False)
    draw_weights(model)
    return model.eval()


def state_of(model: Any) -> dict[str, Tensor]:
    """Its parameters as they are now."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class DecodeRig:
    """Sequences of random tokens, ``rows`` of them, decoded side by side.

    ``config`` describes the model whose KV cache it is.

    Attributes:
        grids_may_wait: as contexts have it.
    """

    def __init__(self, config: ModelConfig, device: torch.device, rows: int = ROWS) -> None:
        self.config, self.device, self.rows = config, device, rows
        self.grids_may_wait = False
        generator = torch.Generator().manual_seed(rows)
        tokens = torch.randint(0, config.vocab_size, (rows, TOKENS), generator=generator)
        self.tokens = tokens.to(device)

    def context(
        self, block_size: int = BLOCK_SIZE, window: int = 1, kept: torch.dtype | None = None
    ) -> ForwardBatch:
        """An empty cache for steps of ``window`` tokens a row; row r is in a slot of its own."""
        columns = -(-TOKENS // block_size)
        context = new_batch(
            params_dtype=torch.bfloat16,
            num_layers=self.config.num_layers,
            kv_channels=self.config.head_dim,
            num_attention_heads=self.config.num_kv_heads,
            max_sequence_length=columns * block_size,
            block_count=self.rows * columns,
            max_requests=self.rows,
            block_size_tokens=block_size,
            device=self.device,
            kept=kept,
            num_speculative_tokens=window - 1,
        )
        blocks = torch.arange(self.rows * columns, device=self.device).flip(0) + 1
        context.block_table[: self.rows] = blocks.view(self.rows, columns)
        context.grids_may_wait = self.grids_may_wait
        return context

    @torch.no_grad()
    def decode(self, forward: Forward, context: ForwardBatch | None = None) -> Tensor:
        """Logits ``[rows, TOKENS, vocab]`` of ``forward``, called once for each token of a row."""
        context = self.context() if context is None else context
        slots = torch.arange(self.rows, device=self.device)
        size = context.block_size_tokens
        steps = []
        for step in range(TOKENS):
            positions = torch.full_like(slots, step)
            mapping = context.block_table[slots, positions // size] * size + positions % size
            context.begin_decode(slots, positions, mapping, positions + 1)
            logits = torch.full(
                (self.rows, self.config.vocab_size), float("nan"), device=self.device
            ).bfloat16()
            forward(self.tokens[:, step].contiguous(), positions, context, logits)
            steps.append(logits)
        return torch.stack(steps, 1)

    @torch.no_grad()
    def decode_windows(self, forward: Forward, context: ForwardBatch) -> Tensor:
        """As :meth:`decode`, a window of each row in a call; behind a row's last token is
        padding."""
        window, slots = context.num_speculative_tokens + 1, torch.arange(self.rows)
        context.finished[: self.rows] = False
        steps = []
        for first in range(0, TOKENS, window):
            positions = first + torch.arange(window).expand(self.rows, -1)
            inside = positions < TOKENS
            ids = self.tokens[:, positions[0].clamp(max=TOKENS - 1)]
            positions = torch.where(inside, positions, 0).flatten().to(self.device)
            token_slots = torch.where(inside, slots[:, None], context.null_slot).flatten()
            context.begin_forward(
                token_slots.to(self.device), positions, decode_rows=ids.numel(), window=window
            )
            shape = (ids.numel(), self.config.vocab_size)
            logits = torch.full(shape, float("nan"), device=self.device).bfloat16()
            forward(ids.flatten(), positions, context, logits)
            steps.append(logits.view(self.rows, window, -1)[:, : TOKENS - first])
        return torch.cat(steps, 1)

    def error(
        self, logits: Tensor, state: dict[str, Tensor], model: Float64Model | None = None
    ) -> float:
        """The largest relative error of a row's logits against a float64 forward of ``state``, or
        of ``model``."""
        assert logits.isfinite().all()
        model = model or Float64Model(self.config, state)
        return max(
            relative_error(logits[row], model.logits(self.tokens[row])) for row in range(self.rows)
        )
