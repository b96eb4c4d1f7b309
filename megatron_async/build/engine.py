"""A spec and a model become the parts of an engine, put together."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_async.build.runner import Opened
from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.kv_events import kv_events_config
from megatron_async.device.protocol import Device
from megatron_async.engine.api_style import ApiStyle
from megatron_async.engine.lifecycle.sleep_mode import Memory, SleepMode
from megatron_async.engine.metrics import HostMasks
from megatron_async.engine.requests.guidance import Grammars, Guidance
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.engine.requests.output_sink import SinkQueue
from megatron_async.engine.requests.request_queue import RequestQueue
from megatron_async.engine.requests.request_validation import RequestValidator
from megatron_async.engine.step_lock import StepLock
from megatron_async.engine.stepping.driver import Driver
from megatron_async.engine.stepping.engine_thread import StreamTable
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.models.served import ServedModel
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.scheduler.draft_control import StepCosts
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from megatron_async.engine.lifecycle.kv_events import KVEventPublisher
    from megatron_async.engine.stepping.late_planning import LatePlanning

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of an engine beside its runner.

    Args:
        config: with the costs of steps, if they were measured.
        kv_events: what is published, if the configuration asks for it.
    """

    config: EngineConfig
    limits: Limits
    scheduler: Scheduler
    outputs: OutputProcessor
    guidance: Guidance
    grammars: Grammars
    lock: StepLock
    loop: DecodeLoop
    requests: RequestQueue
    streams: StreamTable
    sinks: SinkQueue
    driver: Driver
    sleep_mode: SleepMode
    kv_events: KVEventPublisher | None


def assemble(
    spec: EngineSpec,
    model: ServedModel,
    opened: Opened,
    *,
    random_seed: int | None,
    style: ApiStyle,
) -> Assembly:
    """The parts of an engine around its runner; for the arguments see
    :class:`DynamicInferenceEngine`."""
    config, limits = spec.config, spec.limits
    device, batch, runner = opened
    vocab_size = spec.model.vocab_size
    automata_bytes = spec.automata_bytes if runner.takes_automata else 0
    # What there is, not what was asked for: replays compare it.
    config = dataclasses.replace(config, guided_automata_bytes=automata_bytes)
    grammars = Grammars(
        model.tokenizer, vocab_size, automata_bytes, at_once=config.testing.automata_at_once
    )
    validator = RequestValidator(
        model,
        limits,
        vocab_size=vocab_size,
        max_sequence_length=spec.sizes.max_sequence_length,
        random_seed=config.random_seed if random_seed is None else random_seed,
        eos_token_ids=model.eos_token_ids,
        grammars=grammars,
        extras_enabled=config.enable_sampling_extras,
        has_ranks=model.group is not None,
        filters_need_extras=spec.has_filters_in_extras,
        returns_routes=config.return_routed_experts,
        hidden_state_count=model.network.hidden_state_count,
    )
    outputs = OutputProcessor(
        model.tokenizer,
        track_pauses=config.track_paused_request_events,
        eos_token_ids=validator.eos_token_ids,
        style=style,
    )
    config = with_step_costs(config, runner, batch.null_slot, limits)
    costs = step_costs_of(config, limits)
    scheduler = Scheduler(limits, outputs.ends, costs=costs, debug=config.debug)
    kv_events = _publish_kv_events(config, scheduler, limits, device)
    # Drafts that count as right at a rate are not what a grammar has been followed along.
    drafts_are_real = config.testing.synthetic_acceptance is None
    guidance = Guidance(
        runner, grammars, scheduler.table.sequences, drafts=drafts_are_real,
        without=HostMasks.DEVICE if spec.automata_bytes else HostMasks.OFF,
    )  # fmt: skip
    streams, sinks = StreamTable(), SinkQueue()
    lock = StepLock((outputs.fail, streams.fail, sinks.fail))
    loop = DecodeLoop(
        runner,
        scheduler,
        outputs,
        guidance,
        validator,
        lock.recover,
        depth=config.effective_depth,
        late_planning=_late_planning() if config.late_planning else None,
        logging_interval=config.inference_logging_step_interval,
        debug=config.debug,
    )
    requests = RequestQueue(loop.commands, outputs, guidance, validator, lock, style=style)
    driver = Driver(
        loop, lock, runner, scheduler, outputs, requests, streams, sinks,
        style=style,
    )  # fmt: skip
    return Assembly(
        config=config,
        limits=limits,
        scheduler=scheduler,
        outputs=outputs,
        guidance=guidance,
        grammars=grammars,
        lock=lock,
        loop=loop,
        requests=requests,
        streams=streams,
        sinks=sinks,
        driver=driver,
        sleep_mode=SleepMode(
            loop, device, _memory_of(model, batch, runner), lock.recover, runner.audit
        ),
        kv_events=kv_events,
    )


def _late_planning() -> LatePlanning:
    from megatron_async.engine.stepping.late_planning import LatePlanning

    return LatePlanning()


# Modules of ranks are imported where a model or a configuration has several alone.


def _memory_of(model: ServedModel, batch: ForwardBatch, runner: ModelRunner) -> Memory:
    """What an engine can give back, on all ranks."""
    own = Memory(batch.cache.regions, model.weights_region)
    if model.group is None:
        return own
    from megatron_async.engine.rank_group import MemoryOfRanks
    from megatron_async.ranks.leader import LeadingRunner

    return (
        MemoryOfRanks(own, model.group, runner.engine) if isinstance(runner, LeadingRunner) else own
    )


def _publish_kv_events(
    config: EngineConfig,
    scheduler: Scheduler,
    limits: Limits,
    device: Device,
) -> KVEventPublisher | None:
    if config.kv_events_config is None:
        return None
    from megatron_async.engine.lifecycle.kv_events import publish_kv_events

    return publish_kv_events(
        kv_events_config(config.kv_events_config),
        scheduler.table.prefixes,
        limits.block_size,
        "CPU" if device.torch_device.type == "cpu" else "GPU",
    )


def with_step_costs(
    config: EngineConfig, runner: ModelRunner, null_slot: int, limits: Limits
) -> EngineConfig:
    """A configuration with what decides its plans: the micro-batches, and the costs of steps,
    measured if it needs and lacks them."""
    config = dataclasses.replace(config, pipeline_micro_batches=limits.micro_batches)
    given = config.speculative_draft_cost, config.testing.speculative_step_costs
    has_costs = any(each is not None for each in given)
    if not config.adaptive_speculation or limits.window == 1 or has_costs:
        return config
    from megatron_async.runner.step_costs import measure_step_costs

    costs = measure_step_costs(runner, runner.row_buckets, limits.windows, null_slot)
    for rows, window, seconds in costs:
        logger.info("a decode step of %d rows, window %d: %.3f ms", rows, window, 1e3 * seconds)
    return dataclasses.replace(
        config, testing=dataclasses.replace(config.testing, speculative_step_costs=costs)
    )


def step_costs_of(config: EngineConfig, limits: Limits) -> StepCosts | None:
    """What the scheduler is to know of the costs of steps; None to draft all."""
    if not config.adaptive_speculation:
        return None
    if config.speculative_draft_cost is not None:
        return StepCosts.constant(config.speculative_draft_cost, limits.windows)
    if not config.testing.speculative_step_costs:
        return None
    measured = config.testing.speculative_step_costs
    costs = {(rows, window): seconds for rows, window, seconds in measured}
    return StepCosts(costs, limits.windows)
