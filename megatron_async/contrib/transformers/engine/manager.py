"""transformers' ``ContinuousBatchingManager`` over our engine."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from megatron_async.config.engine_config import EngineConfig
from megatron_async.contrib.transformers.engine.build import engine_of
from megatron_async.contrib.transformers.engine.requests import output_of, sampling_params
from megatron_async.engine.requests.output_processor import Taken
from megatron_async.errors import EngineStoppedError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason

LOOK_SECONDS = 0.1
"""How often an iteration looks whether the manager was stopped."""


@dataclass(slots=True)
class Known:
    """A request that has not ended. ``tokens``: handed out so far, when streaming."""

    name: str
    streaming: bool
    created: float
    record: DynamicInferenceRequest | None = None
    tokens: list[int] = field(default_factory=list)


class AsyncContinuousBatchingManager:
    """Requests in, results out, while a thread of the engine's own steps.

    Args:
        model: a transformers model of a supported type.
        generation_config: None takes the model's.
        engine_config: see :func:`engine_of`.
        weights: ``"copy"``, or ``"take"``, which uses ``model`` up.
        log_probs: results have log-probabilities.

    Raises:
        CheckpointError: the model is not supported.
        ValueError: the generation config asks for something that the engine cannot do.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        engine_config: EngineConfig | None = None,
        *,
        weights: str = "copy",
        log_probs: bool = False,
    ) -> None:
        config = model.generation_config if generation_config is None else generation_config
        sampling_params(config, 0)
        self.generation_config = config
        self.engine = engine_of(model, engine_config, weights=weights)
        self.engine.deliver_to(self)
        self._log_probs = log_probs
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._known: dict[int, Known] = {}
        self._by_name: dict[str, int] = {}
        self._results: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        self._running = False
        self._error: EngineStoppedError | None = None

    def __enter__(self) -> AsyncContinuousBatchingManager:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(block=True)
        self.engine.close()

    # --- the engine's thread ------------------------------------------------------------------

    def start(self) -> None:
        """Begin to step. Requests may be added before."""
        self._running = True
        self.engine.start()

    def stop(self, block: bool = True, timeout: float | None = None) -> None:
        """End the steps and every iteration; requests are kept for another :meth:`start`. The
        arguments are transformers': the step that runs now is always waited for."""
        self._running = False
        self.engine.stop()

    def is_running(self) -> bool:
        return self._running and self._error is None

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        seed: int | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
            streaming: there is a result after each commit of tokens, not only at the end.
            eos_token_id: in place of the generation config's.
            seed: of its randomness; None derives one.

        Raises:
            ValueError: ``request_id`` is in use.
            RequestError: the request cannot be served.
        """
        params = sampling_params(
            self.generation_config,
            len(input_ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            seed=seed,
            log_probs=self._log_probs,
        )
        with self._lock:
            number = next(self._numbers)
            name = f"req_{number}" if request_id is None else request_id
            if name in self._by_name:
                raise ValueError(f"request_id={name!r} is in use; choose another, or none")
            known = self._known[number] = Known(name, streaming, time.perf_counter())
            self._by_name[name] = number

        def opened(record: DynamicInferenceRequest) -> None:
            known.record = record

        try:
            self.engine.add_request(number, list(map(int, input_ids)), params, opened=opened)
        except BaseException:
            self._forget(number)
            raise
        return name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        **options: Any,
    ) -> list[str]:
        """:meth:`add_request` for each of ``inputs``."""
        return [
            self.add_request(ids, max_new_tokens=max_new_tokens, streaming=streaming, **options)
            for ids in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """End a request; it brings no further result. Unknown ids are ignored."""
        with self._lock:
            number = self._by_name.get(request_id)
        if number is not None:
            self.engine.abort_request(number)

    # --- results ------------------------------------------------------------------------------

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result, or None after ``timeout`` seconds (None waits). With ``request_id`` None
        also if the next one is another's, which stays for later.

        Raises:
            EngineStoppedError: an error has stopped the engine, and all results were taken.
        """
        try:
            result = self._results.get(timeout=0 if self._error is not None else timeout)
        except queue.Empty:
            if self._error is not None:
                raise self._error from None
            return None
        if request_id is not None and result.request_id != request_id:
            self._results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until :meth:`stop`."""
        while self.is_running() or not self._results.empty():
            result = self.get_result(timeout=LOOK_SECONDS)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Results of one request, to its last."""
        while self.is_running() or not self._results.empty():
            result = self.get_result(request_id, timeout=LOOK_SECONDS)
            if result is not None:
                yield result
                if result.status.name in ("FINISHED", "FAILED"):
                    return

    # --- what the engine calls ----------------------------------------------------------------

    def deliver(self, taken: Taken) -> None:
        """Results of a step (:class:`OutputSink`)."""
        streamed: dict[int, Known] = {}
        for output in taken.outputs:
            known = self._known.get(output.request_id)
            if known is not None and known.streaming and output.token_id is not None:
                known.tokens.append(output.token_id)
                streamed[output.request_id] = known
        ended = {request.request_id for request in taken.finished}
        for number, known in streamed.items():
            if number not in ended and known.record is not None:
                tokens = list(known.tokens)
                self._results.put(output_of(known.name, known.record, known.created, tokens))
        for request in taken.finished:
            ending = self._forget(request.request_id)
            if ending is not None and request.finish_reason is not FinishReason.ABORT:
                self._results.put(output_of(ending.name, request, ending.created))

    def fail(self, error: EngineStoppedError) -> None:
        """Nothing will come any more (:class:`OutputSink`)."""
        self._error = error

    def _forget(self, number: int) -> Known | None:
        with self._lock:
            known = self._known.pop(number, None)
            if known is not None:
                self._by_name.pop(known.name, None)
            return known
