"""The engine of a rank other than 0, which answers its user's calls with what rank 0's brought."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

import torch

from megatron_async.build.rank_model import SPECS, RankModel
from megatron_async.build.runner import open_runner
from megatron_async.build.spec import EngineSpec, check_suits
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import open_device
from megatron_async.device.protocol import Device
from megatron_async.engine.lifecycle.sleep_mode import Memory
from megatron_async.engine.metrics import EngineCounters
from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.errors import RequestError
from megatron_async.megatron_api.context import DynamicInferenceContext, LoadedContext, Usage
from megatron_async.megatron_api.coordinator.headers import Headers
from megatron_async.megatron_api.coordinator.service import EngineService
from megatron_async.megatron_api.coordinator.states import FLAGS
from megatron_async.megatron_api.engine import DynamicInferenceEngine
from megatron_async.megatron_api.engine_config import fit_length
from megatron_async.megatron_api.inference_config import engine_settings
from megatron_async.megatron_api.metrics import CaptureStats
from megatron_async.megatron_api.spmd.calls import Calls
from megatron_async.megatron_api.spmd.messages import (
    BUILD,
    LISTEN,
    ONE_ENGINE,
    SIGNAL,
    SIZES,
)
from megatron_async.megatron_api.spmd.mirror import Applied
from megatron_async.models.served import ServedModel
from megatron_async.ranks.messages import ANSWERS, BuildEngine, Ready
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.model_runner import ModelRunner, Progress


class UsersModel(RankModel):
    """This rank's share of a model that the user has divided, where it is.

    Args:
        batch: the cache that the user has built; None makes one as rank 0 says.
        captures: steps are captured where the device can.
    """

    spec: EngineSpec
    opened: tuple[Device, ForwardBatch, ModelRunner]

    def __init__(
        self,
        model: ServedModel,
        device: torch.device,
        batch: ForwardBatch | None,
        *,
        captures: bool,
        progress: Progress | None,
    ) -> None:
        super().__init__(device, model)
        self._batch, self._captures, self._progress = batch, captures, progress

    def build(self, message: BuildEngine) -> tuple[Device, ModelRunner]:
        """See :class:`BuildEngine`."""
        self.spec = spec = SPECS.decode(message.spec)
        model, batch = self._model, self._batch
        if batch is not None:
            check_suits(batch.cache, model, spec)
            batch.limit_blocks(spec.sizes.block_count)
        given = None if self._captures else open_device(self._device, spec.config, graphs=False)
        self.opened = device, batch, runner = open_runner(
            spec, model, self._device, batch=batch, given=given, progress=self._progress
        )
        self._memory[message.engine] = Memory(batch.cache.regions, None)
        return device, runner


class FollowingEngine(DynamicInferenceEngine):
    """The engine of another rank than 0 over a model that its user has divided: it plans nothing.
    A call does what rank 0 launches until rank 0's call of the same name is over, and returns what
    that one has. For the arguments see :class:`DynamicInferenceEngine`; those about scheduling are
    rank 0's."""

    def __init__(
        self,
        controller: Any,
        context: Any,
        enable_cuda_graph: bool | None = None,
        random_seed: int | None = None,
        *,
        pg_collection: Any = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        model_name: str | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        controller.check_free()
        network = controller.served.network
        made_here = isinstance(context, DynamicInferenceContext)
        inference_config = context.inference_config if made_here else None
        if context is not None:
            fit_length(network, context)
        self._capture = CaptureStats(progress)
        device = network.device if context is None else context.device
        share = UsersModel(
            controller.served, device, context,
            captures=enable_cuda_graph is not False, progress=self._capture,
        )  # fmt: skip
        self._service = EngineService(self)
        hooks = {SIGNAL: self._signalled, "stop": self._stopped_by_rank_0}
        self._calls = Calls(network.parallel, device, share, hooks)
        sizes = b"" if context is None else SIZES.encode(context.cache.sizes)
        self._calls.say(ANSWERS.encode(Ready(sizes)))
        self._calls.make(BUILD)
        controller.take()
        self.controller = controller
        self.model = dataclasses.replace(
            controller.served,
            name=model_name or controller.served.name,
            eos_token_ids=eos_token_ids or controller.served.eos_token_ids,
        )
        self.device, self.batch, self.runner = share.opened
        self.cache, self.config, self.limits = (
            self.batch.cache, share.spec.config, share.spec.limits,
        )  # fmt: skip
        self.context = LoadedContext(self.batch) if context is None else context
        if made_here:
            context.serve(self._usage)
        self.settings = engine_settings(inference_config)
        chunked: bool | None = options.get("enable_chunked_prefill")
        self.enable_chunked_prefill = (
            self.settings.enable_chunked_prefill if chunked is None else chunked
        )
        self.pg_collection = pg_collection or getattr(inference_config, "pg_collection", None)
        self.random_seed = self.config.random_seed if random_seed is None else random_seed
        self.enable_cuda_graph = bool(enable_cuda_graph)
        self.cuda_graph_impl = "local" if enable_cuda_graph else "none"
        self.num_speculative_tokens = self.config.num_speculative_tokens
        self.track_paused_request_events = self.config.track_paused_request_events
        interval = self.config.inference_logging_step_interval
        self.inference_logging_step_interval = self.logging_step_interval = interval
        self.capture_stats = self._capture.stats
        self.materialize_only_last_token_logits = self.persist_cuda_graphs = True
        self.track_generated_token_events = self.local_metadata_ledger_enabled = False
        self.local_metadata_ledger: dict[str, Any] = {}
        self.metrics_writer = None
        self.unified_memory_level, self.rank = 0, network.parallel.rank
        self._state_events = self._service.states.events
        self.running, self.paused, self.stopped = (self._state_events[each] for each in FLAGS)
        self.engine_loop_task: asyncio.Future[None] | None = None
        self._stopped: list[Callable[[], object]] = []

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: Any = None,
        *,
        priority: int = 0,
        opened: Callable[[DynamicInferenceRequest], None] | None = None,
    ) -> RequestFuture:
        """A future of the request that rank 0 adds."""
        self._calls.make("add_request", request_id)
        future = self._calls.mirror.future_of(request_id)
        record = self._calls.mirror.request(request_id)
        if opened is not None and record is not None:
            opened(record)
        return future

    def _about(self, name: str, request_id: int) -> bool:
        return bool(self._calls.make(name, request_id).brought.value)

    def abort_request(self, request_id: int) -> bool:
        """What rank 0's call returns."""
        return self._about("abort_request", request_id)

    def pause_request(self, request_id: int) -> bool:
        """What rank 0's call returns."""
        return self._about("pause_request", request_id)

    def resume_request(self, request_id: int) -> bool:
        """What rank 0's call returns."""
        return self._about("resume_request", request_id)

    def evict_request(self, request_id: int) -> bool:
        """What rank 0's call returns."""
        return self._about("evict_request", request_id)

    def update_sampling_params(self, request_id: int, **changes: Any) -> bool:
        """What rank 0's call returns."""
        return self._about("update_sampling_params", request_id)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The record of a request that has not ended, as of rank 0's last call."""
        request = self._calls.mirror.request(request_id)
        if request is None:
            raise RequestError(f"request_id={request_id} is not known, or has ended")
        return request

    def has_unfinished_requests(self) -> bool:
        """What rank 0's call returns; while its own thread steps, what is known here."""
        if self._calls.has_thread:
            return self._calls.mirror.has_unfinished
        return bool(self._calls.make("has_unfinished_requests").brought.value)

    # --- calls of all ranks -------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """Follow rank 0's step; returns what it returns."""
        return self._calls.make("step_modern").step()

    def generate(
        self, prompts: Any = None, sampling_params: Any = None
    ) -> list[DynamicInferenceRequest]:
        """Follow rank 0's call, whose prompts count; returns what it returns."""
        return self._calls.make("generate").returned

    def suspend(self) -> None:
        """Follow rank 0's call."""
        self._calls.make("suspend")

    def resume(self) -> None:
        """Follow rank 0's call."""
        self._calls.make("resume")

    def go_on(self) -> None:
        """Follow rank 0's call."""
        self._calls.make("go_on")

    def forget_computed(self) -> None:
        """Follow rank 0's call."""
        self._calls.make("forget_computed")

    def reset(self) -> None:
        """Follow rank 0's call."""
        self._calls.make("reset")

    def reset_prefix_cache(self) -> None:
        """Follow rank 0's call."""
        self._calls.make("reset_prefix_cache")

    def update_weights(self, source: Any = None, **options: Any) -> int:
        """Follow rank 0's call, whose source counts: a directory is read here too."""
        value = self._calls.make("update_weights").brought.value
        assert isinstance(value, int)
        return value

    def sleep(self, level: int = 1) -> None:
        """Follow rank 0's call."""
        self._calls.make("sleep")

    def wake_up(self, tags: Any = None) -> None:
        """Follow rank 0's call."""
        self._calls.make("wake_up")

    def start(self) -> None:
        """Follow rank 0 in a thread from its call of that name until its :meth:`stop`."""
        if not self._calls.follows:
            self._calls.make("start")
            self._calls.begin()

    def stop(self) -> None:
        """Wait for rank 0's call of that name."""
        self._calls.end()
        while self._stopped:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._stopped.pop()()

    async def start_listening_to_data_parallel_coordinator(self, *args: Any, **options: Any) -> str:
        """Follow rank 0 in a thread; returns the address at which it listens."""
        address = str(self._calls.make(LISTEN).brought.value)
        self._service.states.begin()
        self._calls.begin()
        self.engine_loop_task = asyncio.ensure_future(self.stopped.wait())
        return address

    def _signalled(self, applied: Applied) -> None:
        self._service.states.reached(Headers[str(applied.brought.value)])

    def _stopped_by_rank_0(self, applied: Applied) -> None:
        if self._service.states.is_coordinated:
            self._service.states.reached(Headers.STOP)

    def close(self) -> None:
        """Follow rank 0, whatever it does, until it closes its engine."""
        self._calls.until_closed()

    def __exit__(self, *exc: object) -> None:
        error = exc[1]
        if isinstance(error, BaseException):  # nobody shall wait for this rank
            self._calls.abandon(error)
        else:
            self.close()

    # --- rank 0 alone -------------------------------------------------------------------------

    def with_config(self, config: EngineConfig, **options: Any) -> FollowingEngine:
        """Raises RequestError: all ranks build another engine."""
        raise RequestError(ONE_ENGINE)

    def stream(
        self, prompt: Any, sampling_params: Any = None, *, request_id: int | None = None
    ) -> AsyncGenerator[TokenOutput, None]:
        """Raises RequestError: tokens are streamed on rank 0."""
        raise RequestError("tokens are streamed on rank 0 alone; close() the engine on the others")

    def deliver_to(self, sink: Any) -> None:
        """Nothing: rank 0 delivers."""

    def observe(self, observer: Any) -> Callable[[], None]:
        """Nothing: rank 0's host is observed."""
        return lambda: None

    def record(self, recorder: Any) -> None:
        """Nothing: rank 0 records."""

    # --- what is known of rank 0's engine -----------------------------------------------------

    @property
    def suspended(self) -> bool:
        """As of rank 0's last call."""
        return self._calls.mirror.standing.suspended

    @property
    def is_sleeping(self) -> bool:
        """As of rank 0's last call."""
        return self._calls.mirror.standing.sleeping

    @property
    def weight_version(self) -> int:
        """As of rank 0's last call."""
        return self._calls.mirror.standing.weight_version

    @property
    def in_flight_count(self) -> int:
        """As of rank 0's last call."""
        return self._calls.mirror.standing.in_flight

    @property
    def counters(self) -> EngineCounters:
        """Rank 0's, as of its last call that was no step, or when all requests had ended."""
        return self._calls.mirror.counters

    @property
    def step_count(self) -> int:
        """As of rank 0's last call."""
        return self._calls.mirror.standing.steps

    @property
    def evicted_request_count(self) -> int:
        """As of rank 0's last call."""
        return self._calls.mirror.standing.evictions

    @property
    def depth(self) -> int:
        """Rank 0's."""
        return self.config.effective_depth

    @property
    def max_request_tokens(self) -> int:
        """Rank 0's."""
        return min(self.max_sequence_length, self.limits.most_tokens)

    def _usage(self) -> Usage:
        return self._calls.mirror.usage
