"""Kernels of decode steps are compiled while weights are read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.build.sizes import BLOCK_SIZE_TOKENS
from megatron_async.config.engine_config import EngineConfig, draft_windows
from megatron_async.ranks.layout import Layout
from megatron_async.runner.cuda_graphs import row_buckets

if TYPE_CHECKING:
    from megatron_async.models.fused.blocks.gemms import Work

logger = logging.getLogger(__name__)

NEEDS_SIZES = "attention"
"""The kernel that is compiled for the sizes of a cache, which are chosen once weights are there."""


@contextlib.contextmanager
def compiling_meanwhile(
    config: EngineConfig, device: torch.device
) -> Iterator[Callable[[Any], None]]:
    """While a model is loaded inside, compilers are made ready. Call what this yields with the
    model once its modules are there: kernels of decode steps begin to compile, and the one that
    looks at weights. An error inside does not wait for those of steps that have not begun.

    Args:
        device: a CUDA device.
    """
    from megatron_async.kernels.compile_ahead import compilers_ahead

    begun: list[Callable[[], None]] = []
    try:
        with compilers_ahead(device) as behind:

            def built(model: Any) -> None:
                if not config.allow_non_finite_weights:
                    from megatron_async.kernels import finite

                    finite.compile_ahead(((p, p.dtype) for p in model.parameters()), behind)
                begun.append(compile_meanwhile(model, config))

            yield built
    except BaseException:
        for give_up in begun:
            give_up()
        raise


def compile_meanwhile(model: Any, config: EngineConfig) -> Callable[[], None]:
    """Begin to compile what decode steps over a model are going to need; returns at once.

    It may be called before the weights have values. What it leaves out, or foresees wrongly, is
    compiled when an engine is built.

    Args:
        model: with all modules, on a CUDA device.

    Returns:
        What leaves out all that has not begun.
    """
    if config.batch_invariant or Layout.of(config) != Layout():
        return _nothing
    from megatron_async.kernels.compile_ahead import compile_in_background

    device: torch.device = next(model.parameters()).device
    try:
        return compile_in_background(foreseen(model, config), device)
    except Exception as error:  # one of the engine's, which does the same with all it knows
        logger.info("not all kernels are compiled while weights are read: %s", error)
    return _nothing


def _nothing() -> None:
    return


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
