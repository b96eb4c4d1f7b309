"""Which parts an engine has, and how they are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_async.config import EngineConfig
from megatron_async.device import open_device
from megatron_async.device.protocol import Device
from megatron_async.drafting.choose import choose_drafting
from megatron_async.engine.build import keep_states
from megatron_async.engine.driver import Driver
from megatron_async.engine.engine_thread import StreamTable
from megatron_async.engine.guidance import Grammars, Guidance
from megatron_async.engine.loop import DecodeLoop
from megatron_async.engine.output_processor import OutputProcessor
from megatron_async.engine.output_sink import SinkQueue
from megatron_async.engine.recording import RunFile
from megatron_async.engine.request_queue import RequestQueue
from megatron_async.engine.request_validation import RequestValidator
from megatron_async.engine.sleep_mode import Memory, SleepMode
from megatron_async.engine.step_limits import (
    limits_for,
    runner_options,
    step_costs_of,
    with_step_costs,
)
from megatron_async.engine.step_lock import StepLock
from megatron_async.kv_events_config import kv_events_config
from megatron_async.ranks.layout import Layout
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.controller import TextGenerationController
from megatron_async.runner.model_runner import ModelRunner, Progress
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from megatron_async.engine.kv_events import KVEventPublisher
    from megatron_async.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of an engine.

    Args:
        config: with the costs of steps, if they were measured.
        group: the ranks that the model is spread over.
        run_file, kv_events: what is written and published, if the configuration asks for it.
    """

    config: EngineConfig
    limits: Limits
    group: RankGroup | None
    device: Device
    runner: ModelRunner
    scheduler: Scheduler
    outputs: OutputProcessor
    guidance: Guidance
    lock: StepLock
    loop: DecodeLoop
    requests: RequestQueue
    streams: StreamTable
    sinks: SinkQueue
    driver: Driver
    sleep_mode: SleepMode
    run_file: RunFile | None
    kv_events: KVEventPublisher | None


def assemble(
    controller: TextGenerationController,
    context: DynamicInferenceContext,
    config: EngineConfig,
    *,
    random_seed: int | None,
    enable_chunked_prefill: bool,
    as_megatron: bool,
    eos_token_ids: tuple[int, ...] | None,
    progress: Progress | None,
    device: Device | None,
) -> Assembly:
    """The parts of an engine with these arguments, see :class:`DynamicInferenceEngine`.

    Raises:
        ConfigError: two arguments contradict each other.
    """
    model = controller.inference_wrapped_model
    drafting = choose_drafting(model, context.num_speculative_tokens, config)
    keep_states(model, config, context)
    limits = limits_for(
        model, context, config, drafting, enable_chunked_prefill=enable_chunked_prefill
    )
    group = _group_of(model, config)
    grammars = Grammars(controller.tokenizer, model.vocab_size)
    validator = RequestValidator(
        controller,
        limits,
        vocab_size=model.vocab_size,
        max_sequence_length=context.max_sequence_length,
        random_seed=config.random_seed if random_seed is None else random_seed,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        extras_enabled=config.enable_sampling_extras,
        has_ranks=group is not None,
        filters_need_extras=_filters_need_extras(group, context.device),
    )
    run_file = None if config.record is None else RunFile(config.record)
    options = runner_options(config, limits, drafting) | {"progress": progress}
    device, runner = _open_runner(
        controller, context, config, group, options, device, chunked=enable_chunked_prefill
    )
    outputs = OutputProcessor(
        controller.tokenizer,
        track_pauses=config.track_paused_request_events,
        eos_token_ids=validator.eos_token_ids,
        top_by_text=as_megatron,
    )
    config = with_step_costs(config, runner, context, limits)
    costs = step_costs_of(config, limits)
    scheduler = Scheduler(limits, outputs.ends, costs=costs, debug=config.debug)
    kv_events = _publish_kv_events(config, scheduler, limits, device, context)
    guidance = Guidance(runner, grammars)
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
        logging_interval=config.inference_logging_step_interval,
        debug=config.debug,
    )
    requests = RequestQueue(
        loop.commands, outputs, guidance, validator, lock, fails_long_requests=as_megatron
    )
    driver = Driver(
        loop, lock, runner, scheduler, outputs, requests, streams, sinks,
        raises_suspended=as_megatron,
    )  # fmt: skip
    return Assembly(
        config=config,
        limits=limits,
        group=group,
        device=device,
        runner=runner,
        scheduler=scheduler,
        outputs=outputs,
        guidance=guidance,
        lock=lock,
        loop=loop,
        requests=requests,
        streams=streams,
        sinks=sinks,
        driver=driver,
        sleep_mode=SleepMode(loop, device, _memory_of(model, context, runner, group), lock.recover),
        run_file=run_file,
        kv_events=kv_events,
    )


# Modules of ranks are imported where a model or a configuration has several alone.


def _group_of(model: Any, config: EngineConfig) -> RankGroup | None:
    if getattr(model, "rank_group", None) is None and Layout.of(config) == Layout():
        return None
    from megatron_async.engine.ranked_build import group_of

    return group_of(model, config)


def _filters_need_extras(group: RankGroup | None, device: torch.device) -> bool:
    if group is None:
        return False
    from megatron_async.engine.ranked_build import filters_need_extras

    return filters_need_extras(group, device)


def _memory_of(
    model: Any, context: DynamicInferenceContext, runner: ModelRunner, group: RankGroup | None
) -> Memory:
    if group is None:
        return Memory(context.regions, getattr(model, "weights_region", None))
    from megatron_async.engine.ranked_build import memory_of

    return memory_of(model, context, runner, group)


def _open_runner(
    controller: TextGenerationController,
    context: DynamicInferenceContext,
    config: EngineConfig,
    group: RankGroup | None,
    options: dict[str, Any],
    given: Device | None,
    *,
    chunked: bool,
) -> tuple[Device, ModelRunner]:
    """The device that was ``given``, or one that is opened, and what launches steps on it."""
    device = given or open_device(context.device, config)
    try:
        if group is None:
            return device, controller.attach(device, context, **options)
        from megatron_async.engine.ranked_build import lead_engine

        return device, lead_engine(
            group, controller, device, context, config, options, enable_chunked_prefill=chunked
        )
    except BaseException:
        if given is None:
            device.close()
        raise


def _publish_kv_events(
    config: EngineConfig,
    scheduler: Scheduler,
    limits: Limits,
    device: Device,
    context: DynamicInferenceContext,
) -> KVEventPublisher | None:
    if config.kv_events_config is None:
        return None
    from megatron_async.engine.kv_events import publish_kv_events

    try:
        return publish_kv_events(
            kv_events_config(config.kv_events_config),
            scheduler.table.prefixes,
            limits.block_size,
            "CPU" if context.device.type == "cpu" else "GPU",
        )
    except BaseException:
        device.close()
        raise
