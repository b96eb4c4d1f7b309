"""A spec and a model on a device become what launches steps: the same on rank 0 and all others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_async.build.spec import EngineSpec, has_automata
from megatron_async.device import open_device
from megatron_async.device.memory import GIB
from megatron_async.device.protocol import Device
from megatron_async.drafting.choose import make_drafter
from megatron_async.errors import ConfigError
from megatron_async.models.network import Network
from megatron_async.models.served import ServedModel
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache
from megatron_async.runner.model_runner import ModelRunner, Progress

if TYPE_CHECKING:
    from megatron_async.graph_audit.audit import GraphAudit
    from megatron_async.graph_audit.graph_memory import GraphMemory

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """What runs steps, and where. ``batch`` has the cache."""

    device: Device
    batch: ForwardBatch
    runner: ModelRunner


def allocate(spec: EngineSpec, model: ServedModel, device: torch.device) -> ForwardBatch:
    """The KV cache and the slots of this rank.

    Raises:
        CacheTooLargeError: they do not fit into the device's memory.
    """
    cached = model.network.kv_cache_spec
    assert cached is not None
    if not spec.cache.num_mtp_layers:
        cached = cached.decoder
    further = spec.further_token_bytes
    batch = ForwardBatch(KVCache(spec.sizes, cached, device, further_token_bytes=further))
    sizes = spec.sizes
    slots = (sizes.block_count + 1) * sizes.block_size_tokens
    logger.info(
        "the KV cache takes %.3f GiB: %d blocks of %d tokens in %d layers, %d of them of "
        "multi-token prediction%s",
        (cached.token_bytes + further) * slots / GIB,
        sizes.block_count,
        sizes.block_size_tokens,
        cached.num_layers,
        cached.num_mtp_layers,
        f"; {further * slots / GIB:.3f} GiB are the draft model's" if further else "",
    )
    return batch


def keep_states(spec: EngineSpec, network: Network, batch: ForwardBatch) -> None:
    """Have room for the state of recurrent layers, if there are any.

    Raises:
        CacheTooLargeError: the states do not fit into the device's memory.
    """
    kept = network.recurrent_state_spec
    if kept is None:
        return
    kept = kept.with_dtype(spec.config.recurrent_state_dtype)
    states = batch.keep_states(kept, spec.snapshot_count)
    logger.info(
        "recurrent state takes %.3f GiB: %d slots, %.3f MiB each in %d layers; %.3f GiB more are "
        "for %d snapshots of it, from which common prefixes go on",
        states.state_bytes / GIB,
        spec.sizes.slot_count,
        states.state_bytes / (spec.sizes.slot_count + 1) / 2**20,
        kept.num_layers,
        states.snapshot_bytes / GIB,
        states.snapshot_count,
    )


def open_runner(
    spec: EngineSpec,
    model: ServedModel,
    device: torch.device,
    *,
    batch: ForwardBatch | None = None,
    given: Device | None = None,
    progress: Progress | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> Opened:
    """Have all memory of an engine, and capture its steps.

    Args:
        batch: with the cache, if there is one already.
        given: the device that runs steps; None opens one.
        make: of the arguments of :class:`ModelRunner`.

    Raises:
        ConfigError: the cache serves an engine already.
        CacheTooLargeError: the device's memory does not suffice.
    """
    network, config = model.network, spec.config
    if batch is None:
        batch = allocate(spec, model, device)
    if batch.cache.attached:
        raise ConfigError(
            "the context serves another engine already; build a new DynamicInferenceContext"
        )
    keep_states(spec, network, batch)
    runs_on = given or open_device(device, config)
    memory = None
    if config.audits:
        from megatron_async.graph_audit.graph_memory import GraphMemory

        runs_on.watch = memory = GraphMemory()
    try:
        batch.cache.attached = True
        batch.gemm_autotune_seconds = config.gemm_autotune_seconds
        for each in (network, model.draft):
            if each is not None:
                each.reserve_positions(spec.sizes.max_sequence_length)
        # Behind that: ranks agree on the tile configs that they are going to capture.
        batch.grids_may_wait = network.claim_waiting_grids(runs_on)
        if batch.scales is not None:
            from megatron_async.runner.memory.cache_scales import choose_scales

            choose_scales(network, batch)
        routed = None
        if config.return_routed_experts:
            from megatron_async.models.moe.routed import routed_layers

            routed = routed_layers(network)
        runner = make(
            runs_on,
            batch,
            network,
            max_tokens=spec.limits.max_tokens,
            max_assignments=spec.limits.max_assignments,
            depth=config.effective_depth,
            poison=config.debug,
            extras=config.enable_sampling_extras,
            capture_mixed=config.capture_mixed_steps,
            progress=progress,
            make_drafter=partial(make_drafter, spec.drafting.source, model),
            windows=spec.limits.windows,
            micro_batches=spec.limits.micro_batches,
            synthetic_acceptance=config.testing.synthetic_acceptance,
            routed=routed,
            keeps_prefixes=config.enable_prefix_caching,
            has_automata=has_automata(spec.automata_bytes, config, network),
        )
    except BaseException:
        if given is None:
            runs_on.close()
        raise
    if memory is not None:
        runner.audit = _audit(memory, model, batch, runner)
    return Opened(runs_on, batch, runner)


def _audit(
    memory: GraphMemory, model: ServedModel, batch: ForwardBatch, runner: ModelRunner
) -> GraphAudit:
    from megatron_async.graph_audit.audit import WEIGHTS, GraphAudit

    draft = model.draft
    roots = {
        "model": model.weights_owner,
        "draft_model": None if draft is None else draft.weights_owner,
        "batch": batch,
        "network": model.network,
        "draft_network": draft,
        "runner": runner,
        WEIGHTS: model.weights_region,
    }
    return GraphAudit(memory, {name: root for name, root in roots.items() if root is not None})
