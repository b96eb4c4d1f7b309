"""One engine over a model of several ranks: what all of them build alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_async.config import EngineConfig
from megatron_async.device import open_device
from megatron_async.device.protocol import Device
from megatron_async.drafting.choose import choose_drafting
from megatron_async.engine.build import build_context, keep_states
from megatron_async.engine.load import load_wrapper, shared_config
from megatron_async.engine.loop import DecodeLoop
from megatron_async.engine.output_processor import OutputProcessor
from megatron_async.engine.sleep_mode import Memory
from megatron_async.engine.step_limits import limits_for, runner_options
from megatron_async.engine.step_lock import StepLock
from megatron_async.errors import CacheTooLargeError, ConfigError, EngineStoppedError, RankDiedError
from megatron_async.models.config import ModelConfig
from megatron_async.models.wrapper import GPTInferenceWrapper
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.ranks.leader import LeadingRunner
from megatron_async.ranks.messages import (
    AwaitTensors,
    BuildEngine,
    BuildModel,
    LoadModel,
    Sleep,
    WakeUp,
)
from megatron_async.ranks.new_weights import await_tensors
from megatron_async.ranks.start import device_of_rank
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.controller import TextGenerationController
from megatron_async.runner.model_runner import ModelRunner


def group_of(model: Any, config: EngineConfig) -> RankGroup | None:
    """The ranks that a wrapped model is spread over; None for one rank.

    Raises:
        ConfigError: the configuration asks for other ones.
    """
    group: RankGroup | None = getattr(model, "rank_group", None)
    asked = Layout.of(config)
    found = Layout() if group is None else group.layout
    if asked not in (Layout(), found):
        raise ConfigError(
            f"the configuration asks for {asked} and the model is on {found}: load the model with "
            "those sizes"
        )
    if group is not None:
        check_supported(found, config)
    return group


def filters_need_extras(group: RankGroup | None, device: torch.device) -> bool:
    """Whether the plain S knows no top-k and top-p: the kernels of a GPU with some columns."""
    return group is not None and group.layout.tensor > 1 and device.type == "cuda"


def lead_engine(
    group: RankGroup,
    controller: TextGenerationController,
    device: Device,
    context: DynamicInferenceContext,
    config: EngineConfig,
    options: dict[str, Any],
    *,
    enable_chunked_prefill: bool,
) -> ModelRunner:
    """Have all ranks build a runner with the sizes of this one's context; returns this one's."""
    number = group.next_engine()
    fields = shared_config(
        config,
        max_requests=context.max_requests,
        max_tokens=config.max_tokens if context.max_tokens is None else context.max_tokens,
        max_sequence_length=context.max_sequence_length,
        block_size_tokens=context.block_size_tokens,
        block_count=context.block_count,
        buffer_size_gb=None,
        paused_buffer_size_gb=None,
        num_cuda_graphs=context.num_cuda_graphs,
        num_speculative_tokens=context.num_speculative_tokens,
        batch_invariant=context.batch_invariant,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        pipeline_micro_batches=options["micro_batches"],
    )
    group.tell(
        BuildEngine(
            number,
            fields,
            context.slot_count,
            enable_chunked_prefill,
            None if context.states is None else context.states.snapshot_count,
        )
    )
    make = partial(LeadingRunner, group=group, engine=number)
    runner = controller.attach(device, context, make=make, **options)
    group.await_answers()
    return runner


class MemoryOfRanks(Memory):
    """What engine ``engine`` can give back, on all ranks of ``group``; rank 0's is ``own``."""

    def __init__(self, own: Memory, group: RankGroup, engine: int) -> None:
        self._own, self._group, self._engine = own, group, engine

    @property
    def can_sleep(self) -> bool:
        return self._own.can_sleep

    def release(self, *, keep_weights: bool) -> None:
        self._group.tell(Sleep(self._engine, keep_weights))
        self._own.release(keep_weights=keep_weights)
        self._group.await_answers()

    def restore(self, tag: str) -> None:
        self._group.tell(WakeUp(self._engine, tag))
        failed: CacheTooLargeError | None = None
        try:
            self._own.restore(tag)
        except CacheTooLargeError as error:
            failed = error
        self._group.await_answers()
        if failed is not None:
            raise failed


def memory_of(
    model: Any, context: DynamicInferenceContext, runner: ModelRunner, group: RankGroup | None
) -> Memory:
    """What an engine over a wrapped model can give back."""
    own = Memory(context.regions, getattr(model, "weights_region", None))
    if group is None or not isinstance(runner, LeadingRunner):
        return own
    return MemoryOfRanks(own, group, runner.engine)


class StopWhenARankDies:
    """Stops the engine that has these parts, if it does nothing then too; a thread that waits for
    its device gets the error. The engine holds it: the group forgets it with the engine."""

    def __init__(
        self,
        group: RankGroup,
        runner: ModelRunner,
        device: Device,
        lock: StepLock,
        outputs: OutputProcessor,
        loop: DecodeLoop,
    ) -> None:
        self._device, self._lock, self._outputs, self._loop = device, lock, outputs, loop
        if isinstance(runner, LeadingRunner):
            group.when_it_dies(runner.engine, self._died)

    def _died(self, error: RankDiedError) -> None:
        """In a thread of the group's."""
        self._device.fail(error)
        with self._lock.gate, self._lock.mutex:
            reason = f"the engine was stopped by an error, {type(error).__name__}: {error}"
            self._lock.stop(EngineStoppedError(f"{reason}; build a new one"))
        self._outputs.resolve_futures()
        self._loop.commands.waiters.wake()


class RankModel:
    """The model of a rank other than 0, and the engines over it.

    Args:
        device: "cpu" or "cuda".
        wrapper: the model, if it has been built already.
    """

    def __init__(self, device: str, wrapper: GPTInferenceWrapper | None = None) -> None:
        self._device: torch.device = device_of_rank(device)
        self._wrapper = wrapper
        self._memory: dict[int, Memory] = {}

    def load(self, message: LoadModel) -> None:
        """See :class:`LoadModel`."""
        self._wrapper, _ = load_wrapper(message.path, EngineConfig(**message.config), self._device)

    def make(self, message: BuildModel) -> None:
        """See :class:`BuildModel`."""
        from megatron_async.models.build import build_random_model

        config = ModelConfig.from_dict(message.model)
        dtype = getattr(torch, message.dtype)
        self._wrapper = GPTInferenceWrapper(
            build_random_model(config, device=self._device, dtype=dtype, seed=message.seed)
        )

    def build(self, message: BuildEngine) -> tuple[Device, ModelRunner]:
        """See :class:`BuildEngine`."""
        assert self._wrapper is not None
        config = EngineConfig(**message.config)
        wrapper = GPTInferenceWrapper(self._wrapper.model, batch_invariant=config.batch_invariant)
        if config.draft_model is not None and self._wrapper.draft_model is not None:
            wrapper.draft_model = GPTInferenceWrapper(
                self._wrapper.draft_model.model, batch_invariant=config.batch_invariant
            )
        context = build_context(wrapper, config, self._device, message.slot_count)
        drafting = choose_drafting(wrapper, context.num_speculative_tokens, config)
        keep_states(wrapper, config, context)
        limits = limits_for(
            wrapper, context, config, drafting,
            enable_chunked_prefill=message.enable_chunked_prefill,
        )  # fmt: skip
        controller = TextGenerationController(wrapper)
        device = open_device(self._device, config)
        options = runner_options(config, limits, drafting) | {"progress": None}
        self._memory[message.engine] = Memory(context.regions, self._wrapper.weights_region)
        return device, controller.attach(device, context, **options)

    def read_weights(self, source: str, allow_non_finite_weights: bool) -> Callable[[], None]:
        """See ``TextGenerationController.read_weights``."""
        assert self._wrapper is not None
        controller = TextGenerationController(self._wrapper)
        return controller.read_weights(source, allow_non_finite_weights=allow_non_finite_weights)

    def await_tensors(self, message: AwaitTensors) -> Callable[[], None]:
        """See :class:`AwaitTensors`."""
        assert self._wrapper is not None
        return await_tensors(
            self._wrapper.model, message.tensors, all_parameters=message.all_parameters
        )

    def sleep(self, message: Sleep) -> None:
        """See :class:`Sleep`."""
        self._memory[message.engine].release(keep_weights=message.keep_weights)

    def wake_up(self, message: WakeUp) -> None:
        """See :class:`WakeUp`."""
        self._memory[message.engine].restore(message.tag)
