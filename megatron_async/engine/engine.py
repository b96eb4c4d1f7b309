"""The engine: what its users call. The work is done by its parts (``build/engine.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_async.build.engine import assemble
from megatron_async.build.model import load_model, over_same_weights
from megatron_async.build.ranks import open_on_all_ranks
from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import resolve_device
from megatron_async.device.memory import free_bytes, steps_must_fit
from megatron_async.device.protocol import Device
from megatron_async.engine.api_style import OUR_STYLE, ApiStyle
from megatron_async.engine.commands import (
    AbortRequest,
    EvictRequest,
    PauseRequest,
    ResumeRequest,
)
from megatron_async.engine.lifecycle.sleep_mode import checked_level, tags_of
from megatron_async.engine.metrics import EngineCounters, NotOverlapped
from megatron_async.engine.recording import Recorder, RunFile
from megatron_async.engine.requests.output_processor import TokenOutput
from megatron_async.engine.requests.output_sink import OutputSink
from megatron_async.engine.requests.request_queue import Prompt, checked_id
from megatron_async.engine.stepping.driver import prompts_with_params
from megatron_async.errors import ConfigError, EngineStoppedError, RequestError
from megatron_async.models.served import ServedModel
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache
from megatron_async.runner.model_runner import Progress
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.weights.swap import CONTINUE, replace_weights, shared_weights

if TYPE_CHECKING:
    from megatron_async.ranks.group import RankGroup
    from megatron_async.request.scores import Score
    from megatron_async.weights.source import AnySource


class DynamicInferenceEngine:
    """Decodes many requests at once. Names and arguments are megatron-core's where it has them.

    Either its callers step it (:meth:`step_modern`, :meth:`generate`), or a thread of its own does
    (:meth:`start`), which :meth:`stream` starts by itself. Requests come in and are changed from
    any thread.

    Args:
        model: network and tokenizer.
        batch: with a cache and per-slot state that are there already, whose sizes win over those
            of ``config``; None makes them.
        random_seed: from which requests that bring no seed derive theirs; None takes ``config``'s.
        enable_chunked_prefill: without it a prompt is prefilled in one forward.
        style: what it does where the ways of its users' APIs differ.
        config: scheduling and debugging.
        progress: shows the capture of graphs.
        device: where steps run; None opens the model's.
        owned_group: the ranks of the model, if they end when the engine is closed.

    Raises:
        ConfigError: two arguments contradict each other.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig | None = None,
        *,
        batch: ForwardBatch | None = None,
        random_seed: int | None = None,
        enable_chunked_prefill: bool = True,
        style: ApiStyle = OUR_STYLE,
        progress: Progress | None = None,
        device: Device | None = None,
        owned_group: RankGroup | None = None,
    ) -> None:
        given = None if batch is None else batch.cache
        if config is None:
            config = EngineConfig() if given is None else _config_over(given)
        on = _device_of(model, config, given)
        spec = EngineSpec.of(
            model,
            config,
            on.type,
            given=given,
            enable_chunked_prefill=enable_chunked_prefill,
            free=free_bytes(on),
        )
        # A file that cannot be written is an error before graphs are captured.
        run_file = None if config.record is None else RunFile(config.record)
        with steps_must_fit(on, spec.cache_bytes, "max_requests or the size of the cache"):
            opened = open_on_all_ranks(
                spec, model, on, batch=batch, given=device, progress=progress
            )
        self.model = model
        self.device, self.batch, self.runner = opened
        self.cache = self.batch.cache
        try:
            parts = assemble(spec, model, opened, random_seed=random_seed, style=style)
        except BaseException:
            self.device.close()
            raise
        self.config = parts.config
        self.limits = parts.limits
        self.scheduler = parts.scheduler
        self.outputs = parts.outputs
        self.guidance = parts.guidance
        self.lock = parts.lock
        self.loop = parts.loop
        self.requests = parts.requests
        self.streams = parts.streams
        self.sleep_mode = parts.sleep_mode
        self._sinks = parts.sinks
        self._driver = parts.driver
        self.grammars = parts.grammars
        self._closed_with_it = (owned_group, run_file, parts.kv_events, parts.grammars)
        if run_file is not None:
            run_file.begin(spec.repeatable(parts.config), model.name)
            self.record(Recorder(run_file.write))
        self._weights = shared_weights(model.weights_owner)
        with self._weights.lock:
            self._weights.join(self)
        if model.group is not None:
            from megatron_async.engine.rank_group import StopWhenARankDies

            self._stops_with_its_ranks = StopWhenARankDies(
                model.group, self.runner, self.device, parts.lock, parts.outputs, parts.loop
            )

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
        model = load_model(path, config)
        try:
            return cls._over(model, config, progress, owned_group=model.group)
        except BaseException:
            if model.group is not None:
                model.group.close()
            raise

    def with_config(
        self, config: EngineConfig, *, progress: Progress | None = None
    ) -> DynamicInferenceEngine:
        """Another engine over the same weights, which neither change nor sleep meanwhile."""
        with self._weights.lock:
            self.sleep_mode.check_awake()
            model = over_same_weights(self.model, config, self.cache.device, self.cache.spec.dtype)
            return self._over(model, config, progress)

    @classmethod
    def _over(
        cls,
        model: ServedModel,
        config: EngineConfig,
        progress: Progress | None,
        owned_group: RankGroup | None = None,
    ) -> DynamicInferenceEngine:
        return cls(model, config, progress=progress, owned_group=owned_group)

    @property
    def model_name(self) -> str:
        """The model's, as the server says it."""
        return self.model.name

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """Tokens that end a request which names no ``termination_id``; None takes the tokenizer's
        ``eod``."""
        return self.model.eos_token_ids

    # --- requests, from any thread ------------------------------------------------------------

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | CheckedParams | None = None,
        *,
        priority: int = 0,
        opened: Callable[[DynamicInferenceRequest], None] | None = None,
    ) -> RequestFuture:
        """Queue a request; it is taken up at the next step.

        Structured outputs are compiled here, in the caller's thread. With ``n`` or ``best_of`` the
        request is several sequences: what is asked about its id is asked about all of them.

        Args:
            prompt: text, or token ids.
            sampling_params: copied, so later changes of it do nothing; None for the defaults.
                ``CheckedParams`` are not checked again.
            priority: lower goes first; equal ones are served first come, first served. What
                overtakes a request is bounded: one step of priority is worth 1,000 tickets.
            opened: called with the request's record, or that of its first sequence with all in
                ``choices``, before any step can see it; what it raises takes the request back.

        Returns:
            A future of the finished request: step until it is done, or wait for it while somebody
            else steps. With ``n`` or ``best_of`` it is done when all sequences have ended, and the
            result's ``choices`` has those that are kept, the best of ``best_of`` first.

        Raises:
            RequestError: the request cannot be served; other requests are not affected.
            EngineStoppedError: the engine is closed, or was stopped by an error.
        """
        number, on_open = checked_id(request_id), None
        if opened is not None:

            def on_open(key: int, request: DynamicInferenceRequest) -> None:
                opened(request)

        return self.requests.add(number, prompt, sampling_params, priority, on_open)[1]

    def abort_request(self, request_id: int) -> bool:
        """End a request at the next step; its tokens in flight are discarded.

        Returns:
            False when the request is not known or has ended, as all have in a stopped engine.

        Raises:
            RequestError: the id is no integer.
        """
        return self.requests.change(request_id, AbortRequest)

    def pause_request(self, request_id: int) -> bool:
        """Leave a request out from the next step on; its tokens in flight are kept, and so are
        its slot and blocks unless others need them. Returns as :meth:`abort_request`."""
        return self.requests.change(request_id, PauseRequest)

    def resume_request(self, request_id: int) -> bool:
        """Let a paused request go on from the next step. Returns as :meth:`abort_request`."""
        return self.requests.change(request_id, ResumeRequest)

    def evict_request(self, request_id: int) -> bool:
        """Free the memory of a request at the next step; its tokens in flight are kept, and it
        is computed again when there is room. Returns as :meth:`abort_request`."""
        return self.requests.change(request_id, EvictRequest)

    def update_sampling_params(self, request_id: int, **changes: Any) -> bool:
        """Change how a request is sampled, without a break of the chain. The request's
        ``sampling_spans`` say from which step on it holds.

        Args:
            changes: ``temperature``, ``top_k``, ``top_p``, ``seed``, ``num_speculative_tokens``;
                everything else is fixed while the request runs. A new seed gives each further
                sequence one derived from it.

        Returns:
            False when the request is not known or has ended.

        Raises:
            RequestError: a parameter cannot be changed, or has a wrong value.
        """
        return self.requests.update_sampling_params(request_id, changes)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The record of a request that has not ended; ended ones belong to the caller that took
        them.

        Raises:
            RequestError: there is no such request.
        """
        request = self.outputs.request(checked_id(request_id))
        if request is None:
            raise RequestError(f"request_id={request_id} is not known, or has ended")
        return request

    def has_unfinished_requests(self) -> bool:
        """A request has not ended, a step in flight has not been committed, or the next
        :meth:`step_modern` has something to hand out."""
        return self.loop.has_work or bool(self.outputs.outputs or self.outputs.finished)

    # --- steps by the caller ------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """Run one step.

        Returns:
            ``active_request_ids``; ``finished_request_records``, the requests that ended;
            ``tokens``, a list of :class:`TokenOutput` in order of commit; ``steps``, a
            :class:`StepReport` of each step that was committed; ``step_time`` in seconds;
            ``cuda_graph_request_count``, the row bucket replayed, or None. Each sequence of ``n``
            or ``best_of`` comes by itself, all but the first under negative ids; which of
            ``best_of`` are kept is in the future's result. Text that may still become part of a
            stop word comes with a later token.

        Raises:
            EngineStoppedError: the engine is closed, or was stopped by an error in an earlier
                step, which was raised there. The futures of all requests get it too.
            EngineSuspendedError: the engine is suspended, and all has been handed out, where its
                ``style`` says so. Commands have been applied.
            EngineThreadError: the engine's own thread steps it.
            ReentrantCallError: called in the midst of a step, by a signal's handler.
        """
        return self._driver.step_modern()

    async def async_step(self) -> dict[str, Any]:
        """:meth:`step_modern` that lets other coroutines run afterwards."""
        result = self.step_modern()
        await asyncio.sleep(0)
        return result

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Decode all prompts and return their requests in the same order. What other requests
        generate meanwhile is in their records and futures.

        A request has its text, up to a stop word, log-probabilities as far as it asked for them,
        the ``seed`` that its randomness came from, and with ``n`` or ``best_of`` its ``choices``.

        While the engine sleeps it waits for another thread to wake it up, and logs a warning.

        Args:
            prompts: several; a single text is taken as one prompt.
            sampling_params: for all prompts, or one for each.

        Raises:
            RequestError: the prompts are no list, or one of them cannot be served; then none is
                started.
        """
        each = prompts_with_params(prompts, sampling_params)
        self.sleep_mode.warn_of_waiting("generate()")
        return self._driver.generate(each)

    def score(
        self,
        sequences: Iterable[Prompt],
        *,
        top_n: int = 0,
        hidden_states: Sequence[int] | None = None,
    ) -> list[Score]:
        """What the model says of given tokens: log-probability, rank and entropy at each position.
        They are prefilled in the steps of all other requests, and wait for nothing else.

        Args:
            sequences: texts, or token ids, each of fewer tokens than a request may have.
            top_n: the most likely tokens of each position too, at most 20.
            hidden_states: layers behind which the residual stream at each position is wanted too,
                as Hugging Face counts them: 0 is the embedding, the last, or -1, is behind the
                final norm.

        Raises:
            RequestError: a sequence cannot be scored; then none is.
            EngineStoppedError: the engine was stopped, or a request was aborted.
        """
        from megatron_async.request.scores import Score

        params = SamplingParams(
            temperature=0.0, num_tokens_to_generate=1, termination_id=-1, return_log_probs=True,
            top_n_logprobs=top_n, detokenize=False, num_speculative_tokens=0,
            prompt_hidden_states=hidden_states,
        )  # fmt: skip
        requests = self.generate(sequences, params)
        for request in requests:
            if request.failed():
                raise EngineStoppedError(f"request {request.request_id} ended unscored")
        return [Score.of(request) for request in requests]

    # --- steps by a thread of its own ---------------------------------------------------------

    def start(self) -> None:
        """Give the steps to a thread of the engine's own, which sleeps when there is nothing to do.
        Until :meth:`stop` nobody else may step the engine."""
        self._driver.start()

    def stop(self) -> None:
        """End the thread of :meth:`start` after the step that runs now. Requests are kept, and
        steps are the callers' again: open streams wait for these, or for another :meth:`start`."""
        self._driver.stop()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Decode one prompt and yield its tokens as they are committed.

        The engine's own thread runs the steps: :meth:`start`'s, else one that lives as long as
        there are streams. Leaving the iteration early aborts the request. What other requests
        generate meanwhile is in their streams, records and futures. Text that may still become part
        of a stop word is held back, and each token has its log-probabilities if they were asked
        for; those of the prompt are in the request's record alone.

        Raises:
            RequestError: the request cannot be served, or has several sequences (``n``,
                ``best_of``).
        """
        return self._driver.stream(prompt, sampling_params, request_id)

    def deliver_to(self, sink: OutputSink) -> None:
        """Hand ``sink`` all that the steps of the engine's own thread bring, whichever caller
        asked, in one call for each step; before :meth:`start`. Streams get theirs all the same."""
        self._sinks.sink = sink

    @property
    def delivers(self) -> bool:
        """Somebody gets the tokens of all requests as they come (:meth:`deliver_to`)."""
        return self._sinks.sink is not None

    # --- whole engine -------------------------------------------------------------------------

    @property
    def suspended(self) -> bool:
        """Nothing is launched until :meth:`resume`."""
        return self.loop.suspended

    def suspend(self) -> None:
        """Take what is in flight and launch nothing until :meth:`resume`. Requests are kept."""
        self._driver.exclusively(self.sleep_mode.suspend)

    def resume(self) -> None:
        """Go on after :meth:`suspend`. Raises RequestError while the engine sleeps."""

        def resume() -> None:
            self.sleep_mode.refuse_asleep()
            self.sleep_mode.audit("a suspension")  # its user may have written to parameters
            self.loop.resume()

        self._driver.exclusively(resume)

    @property
    def is_sleeping(self) -> bool:
        """Some of the engine's memory, or all values of its weights, are gone (:meth:`sleep`)."""
        return self.sleep_mode.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back until :meth:`wake_up`. What is in flight is
        committed first; requests wait, and what they have so far is computed again.

        Args:
            level: 1 keeps the weights in the host's memory, 2 discards them: after waking up the
                engine waits for :meth:`update_weights` with all parameters. On a CPU level 1
                leaves the weights where they are.

        Raises:
            ConfigError: the engine was not built with ``enable_sleep_mode``, or another engine is
                over the same weights.
            RequestError: there is no such level.
        """
        self.sleep_mode.check_possible()
        level = checked_level(level)
        with self._weights.lock:
            self._weights.check_one_engine()
            self._driver.exclusively(lambda: self.sleep_mode.sleep(level))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take the memory back, at the same addresses, and go on when all is there.

        Args:
            tags: of ``"weights"`` and ``"kv_cache"``, such as the first alone before
                :meth:`update_weights`; None for both.

        Raises:
            CacheTooLargeError: somebody else has the memory; it can be tried again.
        """
        wanted = tags_of(tags)
        self._driver.exclusively(lambda: self.sleep_mode.wake_up(wanted))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep the blocks that they have."""
        self._driver.exclusively(self.loop.reset_prefix_cache)

    def reset(self) -> None:
        """Abort every request, take what is in flight, and start the counters anew. Raises
        RequestError while the engine sleeps."""

        def reset() -> None:
            self.sleep_mode.refuse_asleep()
            self.loop.reset()
            self.sleep_mode.audit("a reset")

        self._driver.exclusively(reset)

    def audit_graphs(self) -> None:
        """Check that all addresses in captured graphs are those of tensors that the engine has now,
        as ``EngineConfig(audit_graphs=True)`` does after new weights, a sleep, a wake-up, a
        suspension and a reset; for users that change tensors in other ways. What is in flight is
        taken first.

        Raises:
            ConfigError: the engine was not built with ``audit_graphs`` or ``debug``.
            IntegrityError: an address or what is there is stale; the engine has stopped.
        """
        if self.runner.audit is None:
            raise ConfigError("graphs were not watched; build it with audit_graphs=True")

        def audit() -> None:
            self.drain_for_weights()
            self.sleep_mode.audit("a call of audit_graphs")

        self._driver.exclusively(audit)

    @property
    def weight_version(self) -> int:
        """How many times the weights have been updated since this engine was built."""
        return self.outputs.weight_version

    def update_weights(
        self,
        source: str | Path | Mapping[str, Any] | AnySource,
        *,
        recompute_kv_cache: bool = True,
        partial_rollouts: str = CONTINUE,
        partial_update: bool = False,
        allow_non_finite_weights: bool | None = None,
    ) -> int:
        """Replace the weights between two steps. Requests go on; each says in ``weight_spans``
        which version sampled which of its tokens.

        What is in flight is committed first, so no token of the old weights comes after this.
        Engines over the same weights (:meth:`with_config`) do the same, all at once.

        Args:
            source: a model directory, a ``.safetensors`` file with megatron-core's parameter
                names, a state dict with these, or another source of ``weights/source.py``.
            recompute_kv_cache: evict the running requests, so that what they have so far is
                computed again with the new weights. Otherwise they go on over the old keys and
                values. Cached prefixes are forgotten in either case.
            partial_rollouts: what becomes of requests that have generated tokens: ``"continue"``,
                or ``"restart"``: they begin again behind their prompts with the same seeds, so that
                each is of one version. Those that are streamed go on, since their tokens have been
                handed out. What :meth:`step_modern` has handed out comes again.
            partial_update: parameters that a state dict or a trainer lacks keep their values; else
                that is an error. A file may have some alone.
            allow_non_finite_weights: do not read them once more to see whether they are finite;
                None as the configuration says.

        Returns:
            The new weight version.

        Raises:
            CheckpointError: the weights do not fit; the old ones stay.
            RequestError: ``partial_rollouts`` is neither, or all requests are delivered
                (:meth:`deliver_to`) and none can be restarted.
        """
        self._driver.check_outside()
        self.lock.check()
        replace_weights(
            self,
            self._weights,
            source,
            recompute_kv_cache=recompute_kv_cache,
            partial_rollouts=partial_rollouts,
            partial_update=partial_update,
            allow_non_finite_weights=allow_non_finite_weights,
        )
        return self.outputs.weight_version

    def drain_for_weights(self) -> None:
        """Take what is in flight, before new weights, for the code that gives them to all engines.
        The caller is inside of a step."""
        self.loop.apply_commands()
        self.loop.drain(NotOverlapped.WEIGHTS)
        self.device.synchronize()

    def weights_changed(self) -> None:
        """Go on behind new weights, for the code that gives them to all engines: hand out what was
        in flight, and let the engine's thread run."""
        self._driver.changed()

    @property
    def counters(self) -> EngineCounters:
        """Totals since the engine was built or reset."""
        return self.loop.counters

    @property
    def depth(self) -> int:
        """Steps that may be in flight whose tokens the host has not taken; 0 is serial."""
        return self.loop.depth

    @property
    def in_flight_count(self) -> int:
        """Steps whose tokens the host has not taken now."""
        return self.loop.in_flight_count

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a request, prompt and generation together."""
        return self.cache.sizes.max_sequence_length

    @property
    def max_request_tokens(self) -> int:
        """The same, as far as a cache that is smaller than that has room for one request."""
        return min(self.max_sequence_length, self.scheduler.limits.most_tokens)

    def observe(self, observer: Any) -> Callable[[], None]:
        """Report what the host does to ``observer`` from the next step on; returns what ends it.

        It has some of: ``on_span(name, ticket, start_ns, end_ns)`` for "plan", "launch" with "pack"
        and "sample" in it, "wait", "commit" with "output" in it, ticket -1 where a plan found
        nothing to launch; ``on_launch(plan)``; ``on_commit(report)`` with a
        :class:`~megatron_async.request.request.StepReport`. Without observers a step pays nothing.
        """
        with self.lock.gate, self.lock.mutex:
            self.loop.observe(observer)

        def forget() -> None:
            with self.lock.gate, self.lock.mutex:
                self.loop.forget_observer(observer)

        return forget

    def record(self, recorder: Recorder) -> None:
        """Give all commands and ended requests to ``recorder`` from now on; before the first
        step. A run whose requests have Python logits processors cannot be replayed."""
        self.loop.recorder = recorder
        self.outputs.on_finish = recorder.finished
        self.observe(recorder)

    def close(self) -> None:
        """End the engine's and the device's threads and free its memory; requests that have not
        ended fail, and the engine cannot be used afterwards."""
        self._driver.check_outside()
        self.stop()
        with self.lock.gate, self.lock.mutex:
            self.lock.stop(EngineStoppedError("the engine is closed; build a new one"))
            self.runner.settle()
            self.device.close()
            self.runner.release()
            for part in self._closed_with_it:
                if part is not None:
                    part.close()
        self.outputs.resolve_futures()
        self.loop.commands.waiters.wake()

    def __enter__(self) -> DynamicInferenceEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _device_of(model: ServedModel, config: EngineConfig, given: KVCache | None) -> torch.device:
    """Where the weights, or a cache that is given, or the configuration say that steps run."""
    if given is not None:
        return given.device
    return model.network.device or resolve_device(config.device)


def _config_over(given: KVCache) -> EngineConfig:
    return EngineConfig(max_requests=given.sizes.max_requests)
