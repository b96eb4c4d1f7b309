"""The other ranks of a model, as rank 0 builds with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_async.build.runner import Opened, open_runner
from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import resolve_device
from megatron_async.device.protocol import Device
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.parallel_sizes import check_divides
from megatron_async.models.served import ServedModel
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.model_runner import Progress

if TYPE_CHECKING:
    from megatron_async.ranks.group import RankGroup


def config_of_ranks(config: EngineConfig) -> EngineConfig:
    """The configuration of the other ranks: each has a device of its own, and records and publishes
    nothing."""
    device = None if config.device is None else torch.device(config.device).type
    return dataclasses.replace(config, device=device, record=None, kv_events_config=None)


def start_ranks(
    config: EngineConfig, describe: Callable[[], Iterable[ModelConfig]]
) -> RankGroup | None:
    """The group that a configuration asks for, of which this process is rank 0; None for one rank.

    Args:
        describe: the models that the ranks share, which are asked before any process is started.

    Raises:
        ConfigError: the configuration does not suit a group, the models, or the machine.
    """
    layout = Layout.of(config)
    check_supported(layout, config)
    if layout.world_size == 1:
        return None
    # Modules of ranks are imported where a configuration has several alone.
    from megatron_async.ranks.start import launched_rank, start_group

    if launched_rank() is None:  # else the others wait for what rank 0 tells them
        for model in describe():
            check_divides(
                model, tensor=layout.tensor, expert=layout.expert, pipeline=layout.pipeline
            )
    device = resolve_device(config.device).type
    return start_group(layout, device, config.rank_timeout_seconds)


def open_on_all_ranks(
    spec: EngineSpec,
    model: ServedModel,
    device: torch.device,
    *,
    batch: ForwardBatch | None,
    given: Device | None,
    progress: Progress | None,
) -> Opened:
    """:func:`open_runner` on this rank, and on all others at the same time."""
    open_here = partial(
        open_runner, spec, model, device, batch=batch, given=given, progress=progress
    )
    group = model.group
    if group is None:
        return open_here()
    from megatron_async.codec import encode
    from megatron_async.ranks.leader import LeadingRunner
    from megatron_async.ranks.messages import BuildEngine

    number = group.next_engine()
    told = dataclasses.replace(spec, config=config_of_ranks(spec.config))
    group.tell(BuildEngine(number, encode(told)))
    opened = open_here(make=partial(LeadingRunner, group=group, engine=number))
    group.await_answers()
    return opened
