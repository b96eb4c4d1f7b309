"""Kernels of decode steps are compiled while weights are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.build.sizes import BLOCK_SIZE_TOKENS
from megatron_async.config.engine_config import EngineConfig, draft_windows
from megatron_async.ranks.layout import Layout
from megatron_async.runner.cuda_graphs import row_buckets

if TYPE_CHECKING:
    from megatron_async.models.fused.blocks.gemms import Work

NEEDS_SIZES = "attention"
"""The kernel that is compiled for the sizes of a cache, which are chosen once weights are there."""


def compile_meanwhile(model: Any, config: EngineConfig) -> None:
    """Begin to compile what decode steps over a model are going to need; returns at once.

    It may be called before the weights have values. What it leaves out, or foresees wrongly, is
    compiled when an engine is built.

    Args:
        model: with all modules, on a CUDA device.
    """
    if config.batch_invariant or Layout.of(config) != Layout():
        return
    from megatron_async.kernels.ahead import compile_in_background

    device: torch.device = next(model.parameters()).device
    # An error is one of the engine's, which does the same with all it knows.
    with contextlib.suppress(Exception):
        compile_in_background(foreseen(model, config), device)


def foreseen(model: Any, config: EngineConfig) -> Iterator[Work]:
    """Kernels that decode steps are going to need, without those of :data:`NEEDS_SIZES`."""
    from megatron_async.models.fused.decoder import FusedDecoder

    drafts, block_size = config.num_speculative_tokens, config.block_size_tokens
    windows = draft_windows(drafts, adaptive=config.adaptive_speculation)
    buckets = row_buckets(
        config.max_requests, captures=True, count=config.num_cuda_graphs, window=windows[-1]
    )
    context = SimpleNamespace(
        num_speculative_tokens=drafts,
        block_size_tokens=block_size or BLOCK_SIZE_TOKENS["cuda"],
        block_table=torch.empty(1, 1, device="meta"),
        kv_cache=torch.empty(0, device="meta"),
        grids_may_wait=True,
    )
    rows = sorted({count * window for count in buckets for window in windows})
    for source, macros in FusedDecoder(model).kernels_of(rows, context):
        if source != NEEDS_SIZES:
            yield source, macros
