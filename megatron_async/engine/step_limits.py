"""How large an engine's steps may be, and what they cost."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from megatron_async.config import EngineConfig, draft_windows
from megatron_async.drafting.choose import Drafting
from megatron_async.errors import ConfigError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.scheduler.draft_control import StepCosts
from megatron_async.scheduler.limits import Limits

logger = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 4
"""Prefill chunks that fit into a forward next to full decode rows, unless its size is given."""


def limits_for(
    wrapper: Any,
    context: DynamicInferenceContext,
    config: EngineConfig,
    drafting: Drafting,
    *,
    enable_chunked_prefill: bool,
) -> Limits:
    """:func:`limits_of` a wrapped model that drafts so."""
    return limits_of(
        context,
        config,
        enable_chunked_prefill=enable_chunked_prefill,
        lookahead=drafting.lookahead,
        admit_tokens=drafting.wants_tokens,
        rotation_limit=getattr(wrapper, "rotation_limit", None),
        attention_window=getattr(wrapper, "attention_window", None),
        micro_batches=min(micro_batches_of(wrapper, config), context.max_requests),
    )


def micro_batches_of(wrapper: Any, config: EngineConfig) -> int:
    """Return what the configuration says, or one for each pipeline stage. On GPUs, where several
    have not run yet, return one."""
    parallel = getattr(wrapper, "parallel", None)
    if config.pipeline_micro_batches is not None:
        return config.pipeline_micro_batches
    if parallel is None or wrapper.device.type == "cuda":
        return 1
    return int(parallel.layout.pipeline)


def limits_of(
    context: DynamicInferenceContext,
    config: EngineConfig,
    *,
    enable_chunked_prefill: bool,
    lookahead: int = 0,
    admit_tokens: bool = False,
    rotation_limit: int | None = None,
    attention_window: int | None = None,
    micro_batches: int = 1,
) -> Limits:
    """The scheduler's limits; the context's sizes win over the configuration's.

    Args:
        lookahead: positions behind a window that get blocks with it.
        admit_tokens: admissions bring the tokens of their requests.
        rotation_limit: tokens up to which the model rotates a request in one way.
        attention_window: tokens that the layer with the largest window attends to; None where one
            has none.
        micro_batches: parts of the running requests that are planned in turns.

    Raises:
        ConfigError: a chunk would not fit into a forward next to the decoding rows; drafts would
            cross ``rotation_limit``.
    """
    window = 1 + context.num_speculative_tokens
    if rotation_limit is not None and rotation_limit >= context.max_sequence_length:
        rotation_limit = None
    if rotation_limit is not None and window > 1:
        raise ConfigError(
            f"num_speculative_tokens={window - 1} needs a max_sequence_length of at most "
            f"{rotation_limit} with this model, whose rotary embeddings change there"
        )
    # No prompt is longer, so a larger chunk would only ask for memory.
    chunk = min(config.prefill_chunk_tokens, context.max_sequence_length)
    if not enable_chunked_prefill:
        chunk = context.max_sequence_length
    least = context.max_requests * window + chunk
    max_tokens = config.max_tokens if context.max_tokens is None else context.max_tokens
    if max_tokens is None:
        max_tokens = context.max_requests * window + CHUNKS_AT_ONCE * chunk
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens={max_tokens} must be at least max_requests + the prefill chunk = {least}"
        )
    # Nor does a step hold more than a chunk, or a window of drafts, in each row.
    max_tokens = min(max_tokens, context.max_requests * max(chunk, window))
    per_row = 1 + -(-(window + lookahead) // context.block_size_tokens)
    return Limits(
        max_requests=context.max_requests,
        slot_count=context.slot_count,
        max_tokens=max_tokens,
        prefill_chunk_tokens=chunk,
        block_size=context.block_size_tokens,
        block_count=context.block_count,
        max_assignments=context.max_requests * per_row + 4 * context.max_blocks_per_request,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=draft_windows(window - 1, adaptive=config.adaptive_speculation),
        lookahead=lookahead,
        admit_tokens=admit_tokens,
        paused_block_count=context.paused_block_count,
        rotation_limit=rotation_limit,
        # Drafting writes behind the last token, and reads from there.
        attention_window=attention_window if window == 1 else None,
        state_snapshots=None if context.states is None else context.states.snapshot_count,
        micro_batches=micro_batches,
    )


def runner_options(config: EngineConfig, limits: Limits, drafting: Drafting) -> dict[str, Any]:
    """Arguments of the runner beside device, context and model: the same on all ranks."""
    return {
        "max_tokens": limits.max_tokens,
        "max_assignments": limits.max_assignments,
        "depth": config.effective_depth,
        "poison": config.debug,
        "extras": config.enable_sampling_extras,
        "capture_mixed": config.capture_mixed_steps,
        "make_drafter": drafting.make,
        "windows": limits.windows,
        "micro_batches": limits.micro_batches,
        "synthetic_acceptance": config.testing.synthetic_acceptance,
    }


def with_step_costs(
    config: EngineConfig, runner: ModelRunner, context: DynamicInferenceContext, limits: Limits
) -> EngineConfig:
    """A configuration with what decides its plans: the micro-batches, and the costs of steps,
    measured if it needs and lacks them."""
    config = dataclasses.replace(config, pipeline_micro_batches=limits.micro_batches)
    has_costs = config.testing.speculative_step_costs is not None
    if not config.adaptive_speculation or limits.window == 1 or has_costs:
        return config
    from megatron_async.runner.step_costs import measure_step_costs

    costs = measure_step_costs(runner, runner.row_buckets, limits.windows, context.null_slot)
    for rows, window, seconds in costs:
        logger.info("a decode step of %d rows, window %d: %.3f ms", rows, window, 1e3 * seconds)
    return dataclasses.replace(
        config, testing=dataclasses.replace(config.testing, speculative_step_costs=costs)
    )


def step_costs_of(config: EngineConfig, limits: Limits) -> StepCosts | None:
    """What the scheduler is to know of the costs of steps; None to draft all."""
    if not config.adaptive_speculation or not config.testing.speculative_step_costs:
        return None
    measured = config.testing.speculative_step_costs
    costs = {(rows, window): seconds for rows, window, seconds in measured}
    return StepCosts(costs, limits.windows)
