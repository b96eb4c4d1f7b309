"""megatron-core's dynamic engine over ours."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import open_device
from megatron_async.engine import engine
from megatron_async.engine.api_style import ApiStyle
from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.engine.requests.request_queue import Prompt
from megatron_async.megatron_api.context import DynamicInferenceContext, LoadedContext, Usage
from megatron_async.megatron_api.coordinator.service import EngineService
from megatron_async.megatron_api.coordinator.states import FLAGS, EngineState
from megatron_async.megatron_api.engine_config import (
    changes_of,
    chunk_of,
    config_of,
    fit_parts,
)
from megatron_async.megatron_api.inference_config import engine_settings
from megatron_async.megatron_api.main_tables import MAIN_ENGINE_ATTRIBUTES
from megatron_async.megatron_api.metrics import (
    CaptureStats,
    DecodeOnly,
    MetricsLog,
    PrefilledTokens,
)
from megatron_async.megatron_api.model import TextGenerationController, outside_inference_mode
from megatron_async.megatron_api.names import no_attribute
from megatron_async.megatron_api.sampling import own_params, own_params_of_all
from megatron_async.megatron_api.spmd.place import engine_class
from megatron_async.megatron_api.tables import ENGINE_ATTRIBUTES
from megatron_async.models.served import ServedModel
from megatron_async.ranks.group import RankGroup
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.runner.model_runner import Progress
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.request_state import State

if TYPE_CHECKING:
    from megatron_async.weights.source import AnySource

MEGATRON_STYLE = ApiStyle(
    fails_long_requests=True, raises_suspended=True, top_by_text=True, shows_prompts=True
)


class DynamicInferenceEngine(engine.DynamicInferenceEngine):
    """The engine, called as megatron-core's; ``docs/megatron.md`` has all of its names.

    What differs from the class that this one is derived from, ``megatron_async``'s own: its
    :data:`MEGATRON_STYLE`, however it is built, and megatron-core's own ``SamplingParams`` are
    taken.

    Args:
        controller, context: the model and its cache; without a context it is made as ``config``
            says.
        enable_cuda_graph: False launches the kernels of a step one by one; else steps are captured
            on a GPU.
        random_seed: from which requests that bring no seed derive theirs; None takes the model
            config's ``inference_sampling_seed`` with an ``InferenceConfig``, else ``config``'s.
        track_paused_request_events, inference_logging_step_interval: as in :class:`EngineConfig`.
        enable_chunked_prefill: without it prompts are prefilled in one forward, as far as the
            context's ``max_tokens`` leaves room; None takes the ``InferenceConfig``'s, else True.
        pg_collection: the context's, where it is None. The ranks are those of the wrapped model.
        config: scheduling, with the depth; None takes what the context's ``InferenceConfig`` says,
            or the depth that the environment's MEGATRON_ASYNC_DEPTH says. What is given here by
            name goes first.
        model_name, eos_token_ids: see :class:`~megatron_async.models.served.ServedModel`.
        options: of the class that this one is derived from.

    Raises:
        ConfigError: two arguments contradict each other.
    """

    disable_ep_consensus, ep_consensus_interval = False, 20

    def __new__(cls, controller: TextGenerationController, *args: Any, **options: Any) -> Any:
        return object.__new__(engine_class(cls, controller))

    def __init__(
        self,
        controller: TextGenerationController,
        context: Any,
        enable_cuda_graph: bool | None = None,
        random_seed: int | None = None,
        *,
        track_paused_request_events: bool = False,
        enable_chunked_prefill: bool | None = None,
        inference_logging_step_interval: int = 0,
        pg_collection: Any = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        model_name: str | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        made_here = isinstance(context, DynamicInferenceContext)
        inference_config = context.inference_config if made_here else None
        settings = engine_settings(inference_config)
        if enable_chunked_prefill is None:
            enable_chunked_prefill = settings.enable_chunked_prefill
        if config is None:
            config = config_of(settings, context, controller)
        fit_parts(config, context, controller.served.network)
        changes = changes_of(context, track_paused_request_events, inference_logging_step_interval)
        if context is not None:
            chunk = chunk_of(context.cache.sizes, config, enable_chunked_prefill)
            if chunk is not None:
                enable_chunked_prefill = True
                changes["prefill_chunk_tokens"] = chunk
        config = dataclasses.replace(config, **changes)
        self.settings = settings
        self.enable_chunked_prefill = enable_chunked_prefill
        self.track_paused_request_events = config.track_paused_request_events
        self.inference_logging_step_interval = config.inference_logging_step_interval
        self.pg_collection = pg_collection or getattr(inference_config, "pg_collection", None)
        self.random_seed = config.random_seed if random_seed is None else random_seed
        self.enable_cuda_graph = bool(enable_cuda_graph)
        if enable_cuda_graph is False and options.get("device") is None:
            options["device"] = open_device(context.device, config, graphs=False)
        self.cuda_graph_impl = "local" if enable_cuda_graph else "none"
        self.logging_step_interval = config.inference_logging_step_interval
        self.num_speculative_tokens = config.num_speculative_tokens
        self.metrics_writer = context.metrics_writer if made_here else None
        self.materialize_only_last_token_logits = self.persist_cuda_graphs = True
        self.track_generated_token_events = self.local_metadata_ledger_enabled = False
        self.unified_memory_level = self.rank = 0
        self.local_metadata_ledger: dict[str, Any] = {}
        self._service = EngineService(self)
        self._state_events = self._service.states.events  # Megatron's trainers look at it
        self.running, self.paused, self.stopped = (self._state_events[each] for each in FLAGS)
        self.engine_loop_task: asyncio.Future[None] | None = None
        self._stopped: list[Callable[[], object]] = []
        self._capture = CaptureStats(progress)
        self._prefilled = PrefilledTokens()
        controller.check_free()
        model = controller.served
        if model_name is not None:
            model = dataclasses.replace(model, name=model_name)
        if eos_token_ids is not None:
            model = dataclasses.replace(model, eos_token_ids=eos_token_ids)
        with outside_inference_mode():
            super().__init__(
                model,
                config,
                batch=context,
                random_seed=random_seed,
                enable_chunked_prefill=enable_chunked_prefill,
                style=MEGATRON_STYLE,
                progress=self._capture,
                **options,
            )
        controller.take()
        self.controller = controller
        self.context: Any = LoadedContext(self.batch) if context is None else context
        self.capture_stats = self._capture.stats
        if made_here:
            context.serve(self._usage)
            self.observe(self._prefilled)
            writer = context.metrics_writer
            if writer is not None and config.inference_logging_step_interval:
                self.observe(MetricsLog(writer, context, config.inference_logging_step_interval))

    @classmethod
    def _over(
        cls,
        model: ServedModel,
        config: EngineConfig,
        progress: Progress | None,
        owned_group: RankGroup | None = None,
    ) -> DynamicInferenceEngine:
        return cls(
            TextGenerationController.over(model),
            None,
            config=config,
            progress=progress,
            owned_group=owned_group,
        )

    # --- requests and steps -------------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: Any = None,
        *,
        priority: int = 0,
        opened: Callable[[DynamicInferenceRequest], None] | None = None,
    ) -> RequestFuture:
        """Queue a request; one that is too long fails, and is handed out by the next step."""
        params = own_params(sampling_params, self.settings.log_probs_mode)
        return super().add_request(request_id, prompt, params, priority=priority, opened=opened)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Decode all prompts and return their records in the same order."""
        params = own_params_of_all(sampling_params, self.settings.log_probs_mode)
        with outside_inference_mode():
            return super().generate(prompts, params)

    def stream(
        self, prompt: Prompt, sampling_params: Any = None, *, request_id: int | None = None
    ) -> AsyncGenerator[TokenOutput, None]:
        """Decode one prompt and yield its tokens; see the class that this one is derived from."""
        params = own_params(sampling_params, self.settings.log_probs_mode)
        return super().stream(prompt, params, request_id=request_id)

    def step_legacy(
        self, sampling_params: Any = None
    ) -> tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]:
        """One step: the requests that are active, those that ended, and its seconds."""
        warnings.warn("step_legacy() is deprecated; use step_modern()", DeprecationWarning, 2)
        return self.step()

    def step(
        self, sampling_params: Any = None
    ) -> tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]:
        """The same as :meth:`step_legacy`, as in megatron-core."""
        result = self.step_modern()
        active = [self.get_request(request_id) for request_id in result["active_request_ids"]]
        return active, result["finished_request_records"], result["step_time"]

    async def run_engine(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Step, in a thread of the engine's own, until the task that runs this is cancelled or
        :meth:`stop` is called."""
        stopped, own = asyncio.Event(), asyncio.get_running_loop()
        self.start()
        self._stopped.append(lambda: own.call_soon_threadsafe(stopped.set))
        try:
            await stopped.wait()
        except asyncio.CancelledError:
            pass
        finally:
            self.stop()

    def stop(self) -> None:
        """End the engine's thread after the step that runs now, and :meth:`run_engine`."""
        super().stop()
        while self._stopped:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._stopped.pop()()

    # --- clients of a coordinator ---------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        hostname: str | None = None,
        coordinator_schedule_output_path: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> str:
        """Step in a thread of the engine's own, and answer :class:`InferenceClient`.

        Args:
            inference_coordinator_port: None takes a free one, and so does one that is in use.
            hostname: name or address to listen at; None is this host alone. There are no keys.

        Returns:
            The address for clients.

        Raises:
            ConfigError: it listens already, or an argument cannot be served.
        """
        given = {
            "launch_inference_coordinator": launch_inference_coordinator,
            "coordinator_schedule_output_path": coordinator_schedule_output_path,
        }
        address = self._service.listen(hostname, inference_coordinator_port, given)
        self.engine_loop_task = asyncio.ensure_future(self.stopped.wait())
        return address

    async def wait_until(self, state: EngineState) -> None:
        """Wait until clients have brought the engine to ``state``: RUNNING, PAUSED, SUSPENDED,
        RESUMED or STOPPED; raises :class:`RequestError` for another one."""
        await self._service.states.wait_until(state)

    @property
    def use_coordinator(self) -> bool:
        """Clients of a coordinator are answered."""
        return self._service.listens

    # --- whole engine -------------------------------------------------------------------------

    def suspend(self) -> None:
        """Commit what is in flight and launch nothing until :meth:`resume`."""
        if not self.suspended:
            with outside_inference_mode():
                super().suspend()

    def resume(self) -> None:
        """Go on after :meth:`suspend`; with ``kv_cache_management_mode="recompute"`` the running
        requests are computed again."""
        if not self.suspended:
            return
        if self.settings.recomputes:
            self.forget_computed()
        self.go_on()

    def go_on(self) -> None:
        """:meth:`resume` over the keys and values that are there."""
        with outside_inference_mode():
            super().resume()

    def forget_computed(self) -> None:
        """Forget all cached prefixes; with ``kv_cache_management_mode="recompute"`` the running
        requests are computed again too."""
        with outside_inference_mode():
            if self.settings.recomputes:
                for request_id in list(self.outputs.keys):
                    self.evict_request(request_id)
            self.reset_prefix_cache()

    def reset(self) -> None:
        """Abort every request, and start the counters anew."""
        with outside_inference_mode():
            super().reset()

    def update_weights(
        self, source: str | Path | Mapping[str, Any] | AnySource, **options: Any
    ) -> int:
        """See the class that this one is derived from."""
        with outside_inference_mode():
            return super().update_weights(source, **options)

    # --- what others may know -----------------------------------------------------------------

    @property
    def is_suspended(self) -> bool:
        """Nothing is launched until :meth:`resume`."""
        return self.suspended

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._service.state

    @property
    def step_count(self) -> int:
        """Steps launched since the engine was built or reset."""
        return self.counters.steps_launched

    @property
    def is_decode_only(self) -> bool:
        """The last step that was launched had no prefill."""
        return self.runner.last_graph_rows is not None

    @property
    def decode_only(self) -> DecodeOnly:
        """Whether the last step that was launched had no prefill."""
        return DecodeOnly(self.is_decode_only, self.is_decode_only)

    @property
    def evicted_request_count(self) -> int:
        """Evictions since the engine was built or reset."""
        return self.counters.evictions

    def _usage(self) -> Usage:
        sequences = list(self.scheduler.table.sequences.values())
        paused = [s for s in sequences if s.state in (State.STALLED, State.HELD)]
        running = [
            s for s in sequences if s.state in (State.PREFILLING, State.DECODING, State.ENDING)
        ]
        return Usage(
            blocks=self.cache.sizes.block_count - self.scheduler.allocator.free_count,
            paused_blocks=sum(len(s.blocks) for s in paused),
            running_requests=len(running),
            paused_requests=len(paused),
            waiting_requests=self.scheduler.waiting_count,
            steps=self.counters.steps_launched,
            overlapped_steps=self.counters.steps_overlapped,
            prefilled_tokens=self._prefilled.tokens,
            step_tokens=self._prefilled.step_tokens,
            caches_prefixes=self.limits.enable_prefix_caching,
        )

    def close(self) -> None:
        """See the class that this one is derived from; clients' requests fail."""
        super().close()
        self._service.close()

    async def shutdown(self) -> None:
        """Close the engine."""
        await asyncio.to_thread(self.close)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, ENGINE_ATTRIBUTES | MAIN_ENGINE_ATTRIBUTES)
