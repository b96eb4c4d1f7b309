"""The engine: what it is built from, and what is done to it as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_async.config import EngineConfig, check_config
from megatron_async.device import open_device
from megatron_async.device.protocol import Device
from megatron_async.engine.build import EngineParts, load_parts, parts_over_same_weights
from megatron_async.engine.limits import limits_of
from megatron_async.engine.metrics import EngineCounters, NotOverlapped
from megatron_async.engine.output_processor import OutputBook
from megatron_async.engine.request_validation import Intake
from megatron_async.engine.stepper import Stepper
from megatron_async.engine.weight_update import shared_weights
from megatron_async.errors import CheckpointError, ConfigError, EngineStoppedError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.controller import Progress, TextGenerationController
from megatron_async.scheduler.scheduler import Scheduler


class DynamicInferenceEngine(Stepper):
    """Decodes many requests at once. Names and arguments are megatron-core's where it has them.

    Args:
        controller: model and tokenizer. A controller serves one engine.
        context: cache and per-slot state; its sizes win over those of ``config``.
        enable_cuda_graph: decode steps are always captured on a GPU; False is refused.
        random_seed: of the requests that bring no seed of their own; None takes ``config``'s.
        enable_chunked_prefill: without it a prompt is prefilled in one forward.
        config: scheduling and debugging.
        eos_token_ids: tokens that end a request which names no ``termination_id``; None takes the
            tokenizer's ``eod``.
        progress: shows the capture of graphs.
        device: where steps run; None opens the context's.

    Raises:
        ConfigError: two arguments contradict each other.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        enable_cuda_graph: bool | None = None,
        random_seed: int | None = None,
        *,
        enable_chunked_prefill: bool = True,
        config: EngineConfig | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
        model_name: str = "model",
        progress: Progress | None = None,
        device: Device | None = None,
    ) -> None:
        config = EngineConfig(max_requests=context.max_requests) if config is None else config
        check_config(config)
        self.context = context
        self.model_name = model_name
        self.eos_token_ids = eos_token_ids
        if enable_cuda_graph is False:
            raise ConfigError("enable_cuda_graph=False is not supported; leave it out")
        limits = limits_of(context, config, enable_chunked_prefill=enable_chunked_prefill)
        super().__init__(
            controller,
            Scheduler(limits, debug=config.debug),
            OutputBook(controller.tokenizer, track_pauses=config.track_paused_request_events),
            config,
            Intake(
                controller,
                limits,
                vocab_size=controller.inference_wrapped_model.vocab_size,
                max_sequence_length=context.max_sequence_length,
                random_seed=config.random_seed if random_seed is None else random_seed,
                eos_token_ids=eos_token_ids,
            ),
        )
        self.device = device or open_device(context.device, config)
        try:
            controller.attach(
                self.device,
                context,
                max_tokens=limits.max_tokens,
                max_grants=limits.max_grants,
                depth=self.depth,
                poison=config.debug,
                capture_mixed=config.capture_mixed_steps,
                progress=progress,
            )
        except BaseException:
            if device is None:
                self.device.close()
            raise
        self._weights = shared_weights(controller.weights_owner)
        with self._weights.lock:
            self._weights.join(self)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> DynamicInferenceEngine:
        """An engine for a model directory: ours, Hugging Face's, or a megatron checkpoint.

        ``path`` ``"tiny"`` is the embedded model.

        Raises:
            CheckpointError: the directory is missing, corrupt or not supported.
            ConfigError: the configuration does not suit the model or the machine.
        """
        config = EngineConfig() if config is None else config
        return cls._over(load_parts(path, config), config, progress)

    def with_config(
        self, config: EngineConfig, *, progress: Progress | None = None
    ) -> DynamicInferenceEngine:
        """Another engine over the same weights."""
        parts = parts_over_same_weights(
            self.controller.inference_wrapped_model,
            self.controller.tokenizer,
            config,
            self.context.device,
            self.eos_token_ids,
            self.model_name,
        )
        return self._over(parts, config, progress)

    @classmethod
    def _over(
        cls, parts: EngineParts, config: EngineConfig, progress: Progress | None
    ) -> DynamicInferenceEngine:
        return cls(
            parts.controller,
            parts.context,
            config=config,
            eos_token_ids=parts.eos_token_ids,
            model_name=parts.model_name,
            progress=progress,
        )

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a request, prompt and generation together."""
        return self.context.max_sequence_length

    # --- whole engine -------------------------------------------------------------------------

    def suspend(self) -> None:
        """Take what is in flight and launch nothing until :meth:`resume`. Requests are kept."""
        with self._told, self._turn.lock, self._turn:
            self._drain(NotOverlapped.SUSPENDED)
            self.suspended = True

    def resume(self) -> None:
        """Go on after :meth:`suspend`."""
        self._turn.check()
        self.suspended = False

    @property
    def weight_version(self) -> int:
        """How many times the weights have been updated since this engine was built."""
        return self._book.weight_version

    def update_weights(
        self, source: str | Path | Mapping[str, Any], *, recompute_kv_cache: bool = True
    ) -> int:
        """Replace the weights between two steps. Requests go on; each says in ``weight_spans``
        which version sampled which of its tokens.

        What is in flight is committed first, so no token of the old weights comes after this.
        Engines over the same weights (:meth:`with_config`) do the same, all at once.

        Args:
            source: a model directory, a ``.safetensors`` file with megatron-core's parameter
                names, or a state dict with these.
            recompute_kv_cache: evict the running requests, so that what they have so far is
                computed again with the new weights. Otherwise they go on over the old keys and
                values. Cached prefixes are forgotten in either case.

        Returns:
            The new weight version.

        Raises:
            CheckpointError: the weights do not fit; the old ones stay.
        """
        self._turn.check()
        sharing: list[DynamicInferenceEngine] = []
        try:
            with self._weights.lock, ExitStack() as stack:
                replace = self.controller.read_weights(source)
                sharing = self._weights.engines
                engines = [engine for engine in sharing if engine._drained(stack, wanted=self)]
                for engine in engines:
                    stack.enter_context(engine._turn)
                try:
                    with self._weights.replacing():
                        replace()
                except CheckpointError as error:
                    self._weights.refused()
                    for engine in engines:
                        engine._turn.harmless = error
                    raise
                for engine in engines:
                    engine._adopt_weights(recompute_kv_cache)
        finally:
            for engine in sharing:  # outside of all locks
                engine._book.tell()
        return self._book.weight_version

    def _drained(self, stack: ExitStack, wanted: DynamicInferenceEngine) -> bool:
        """Take what is in flight, in a turn of its own, and keep the lock in ``stack``. An engine
        that has stopped, or does so now, is left out unless it is the one that is ``wanted``."""
        stack.enter_context(self._turn.lock)
        try:
            with self._turn:
                self._drain(NotOverlapped.WEIGHTS)
                self.device.synchronize()
        except Exception:
            if self is wanted or self._turn.stopped is None:
                raise
            return False
        return True

    def _adopt_weights(self, recompute_kv_cache: bool) -> None:
        self.device.synchronize()
        if recompute_kv_cache:
            self.scheduler.evict_all()
        self.scheduler.forget_prefixes()
        self._settle()
        self._book.weight_version += 1

    def reset(self) -> None:
        """Abort every request, take what is in flight, and start the counters anew."""
        with self._told, self._turn.lock, self._turn:
            self.suspended = False
            self._obey()
            for key in self._book.active_keys:
                self._abort(key)
            self._drain(NotOverlapped.SUSPENDED)
            self._outputs, self._finished = [], []
            self.scheduler.check_idle()
            self.scheduler.forget_prefixes()
            self.counters = EngineCounters()
            self._logged_at = 0
            self.controller.wait_ns = 0

    def close(self) -> None:
        """End the device's threads; requests that have not ended fail, and the engine cannot be
        used afterwards. Its memory is free when nothing refers to it any more."""
        with self._door:  # whoever steps now stops after this step
            if self._turn.stopped is None:
                self._turn.stopped = EngineStoppedError("the engine is closed; build a new one")
        if self._turn.is_mine:
            return  # the end of this turn does the rest, and the device goes with the engine
        with self._told, self._turn.lock:
            self._fail(self._turn.stopped)
            self.device.close()

    def __enter__(self) -> DynamicInferenceEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
