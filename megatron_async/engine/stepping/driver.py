"""Steps an engine: its callers do, one step or a whole generation at a time, or its own thread."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from megatron_async.engine.api_style import ApiStyle
from megatron_async.engine.requests.output_processor import OutputProcessor, Taken, TokenOutput
from megatron_async.engine.requests.output_sink import SinkQueue
from megatron_async.engine.requests.request_queue import Prompt, RequestQueue, checked_id
from megatron_async.engine.step_lock import StepLock
from megatron_async.engine.stepping.engine_thread import EngineThread, StreamTable, TokenStream
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.errors import (
    EngineStoppedError,
    EngineSuspendedError,
    EngineThreadError,
    ReentrantCallError,
    RequestError,
)
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.scheduler import Scheduler


class Driver:
    """Runs the loop under the step lock, and resolves futures outside of it.

    Args:
        style: of the steps of a suspended engine.
    """

    def __init__(
        self,
        loop: DecodeLoop,
        lock: StepLock,
        runner: ModelRunner,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        requests: RequestQueue,
        streams: StreamTable,
        sinks: SinkQueue,
        *,
        style: ApiStyle,
    ) -> None:
        self._raises_suspended = style.raises_suspended
        self._loop = loop
        self._lock = lock
        self._runner = runner
        self._scheduler = scheduler
        self._outputs = outputs
        self._requests = requests
        self._streams = streams
        self._sinks = sinks
        self._thread: EngineThread | None = None
        self._thread_lock = threading.RLock()
        self._stops_with_streams = False

    # --- steps by the caller ------------------------------------------------------------------

    def step_modern(self) -> dict[str, Any]:
        """See the engine's."""
        if self._thread is not None:
            raise EngineThreadError(
                "the engine's own thread runs its steps; wait for futures or streams, or stop() it"
            )
        started = time.perf_counter_ns()
        self._step()
        outputs, finished, reports = self._outputs.take()
        if self._streams.streams:
            self._streams.deliver(outputs)
        if self._raises_suspended and self._loop.suspended and not (outputs or finished):
            raise EngineSuspendedError("the engine is suspended; resume() it first")
        return {
            "active_request_ids": list(self._outputs.keys),
            "finished_request_records": finished,
            "tokens": outputs,
            "steps": reports,
            "step_time": (time.perf_counter_ns() - started) * 1e-9,
            "cuda_graph_request_count": self._runner.last_graph_rows,
        }

    def _step(self, *, deliver: bool = False) -> None:
        """One step. ``deliver``: its outputs go to the streams and the sinks."""
        try:
            with self._lock.mutex, self._lock.entry(), self._lock:
                if self._loop.late_planning is not None:
                    self._loop.wait_for_requests()
                started = time.perf_counter_ns()
                self._loop.step()
                counters = self._loop.counters
                counters.wait_ns = self._runner.wait_ns
                counters.step_ns += time.perf_counter_ns() - started
                if self._outputs.finished and not self._loop.has_work:
                    self._scheduler.table.check_idle()
                if deliver:
                    self._deliver()
        finally:
            if self._outputs.ended:
                self._outputs.resolve_futures()
        if self._sinks.waiting:
            self._sinks.flush()

    def _take(self) -> Taken:
        """What has been committed since the last call. Streams that are open get their part."""
        taken = self._outputs.take()
        if taken.outputs and self._streams.streams:
            self._streams.deliver(taken.outputs)
        return taken

    def _deliver(self) -> None:
        self._sinks.put(self._take())

    def generate(
        self, each: list[tuple[Prompt, SamplingParams | None]]
    ) -> list[DynamicInferenceRequest]:
        """See the engine's."""
        self.check_outside()
        added: list[RequestFuture] = []
        try:
            for prompt, params in each:
                added.append(self._requests.add(None, prompt, params)[1])
            for future in added:
                self._wait_for(future)
        except BaseException:
            for future in added:
                future.cancel()
            raise
        while self._thread is None and self._loop.in_flight_count and not self._has_unfinished():
            self._step()
        if self._thread is None:
            self._take()
        return [future.result() for future in added]

    def _has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._loop.commands.waiting)

    def _wait_for(self, future: RequestFuture) -> None:
        """Wait until it is done: by steps of this thread, unless the engine has one of its own."""
        with self._loop.commands.waiters.waiter() as waiter:
            future.when_done(waiter.wake)
            while not future.done():
                if self._thread is not None or self._is_idle():
                    waiter.wait()
                    continue
                self._step()
                self._take()

    def _is_idle(self) -> bool:
        """Whether the loop is idle, between two steps: another thread may be in the midst of
        one."""
        with self._lock.gate, self._lock.mutex:
            return self._loop.is_idle()

    # --- steps by a thread of its own ---------------------------------------------------------

    def start(self) -> None:
        """See the engine's."""
        with self._thread_lock:
            self._lock.check()
            self._stops_with_streams = False
            self._start()

    def stop(self) -> None:
        """See the engine's."""
        with self._thread_lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(thread.stop)
            thread.stop()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = EngineThread(
                self._step_for_waiters, self._loop.is_idle, self._loop.commands.waiters
            )
            # A daemon thread must not live on while the interpreter ends.
            atexit.register(self._thread.stop)
            self._thread.start()

    def _step_for_waiters(self) -> None:
        with self._lock.gate:  # other threads get their turn between two steps
            pass
        try:
            self._step(deliver=True)
        except Exception as error:
            self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        """The engine's thread ends with an error. One that has not stopped the engine, such as a
        sink's, stops it here: nobody else steps for the callers that wait."""
        with self._lock.gate, self._lock.mutex:
            if self._lock.stopped is None:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                stopped = EngineStoppedError(
                    f"the engine's thread was ended by an error, {reason}; build a new one"
                )
                stopped.__cause__ = error
                self._lock.stop(stopped)
        self._outputs.resolve_futures()
        self._loop.commands.waiters.wake()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: int | None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """See the engine's."""
        opened: list[TokenStream] = []

        def open_stream(key: int, request: DynamicInferenceRequest) -> None:
            params = request.sampling_params
            if params.num_sequences > 1:
                raise RequestError(
                    f"n={params.n}, best_of={params.best_of}: a stream has one sequence; start one "
                    "with a seed of its own for each, or use add_request"
                )
            opened.append(TokenStream(request.request_id))
            self._streams.add(key, opened[0])
            self._outputs.stream(key)

        await self._requests.compile_grammar(sampling_params)
        number = None if request_id is None else checked_id(request_id)
        key, _ = self._requests.add(number, prompt, sampling_params, opened=open_stream)
        if self._lock.stopped is not None:  # before the stream was there to be told
            opened[0].fail(self._lock.stopped)
        try:
            with self._thread_lock:
                if self._thread is None:
                    self._stops_with_streams = True
                    self._start()
            while True:
                output = await opened[0].next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._streams.remove(key)
            self._requests.abort(key)
            with self._thread_lock:
                if self._stops_with_streams and not len(self._streams):
                    self._end_thread_of_streams()

    def _end_thread_of_streams(self) -> None:
        """End it without a wait for its step: the event loop must not stand still."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(thread.stop)
            thread.stop(wait=False)

    # --- whole engine -------------------------------------------------------------------------

    def exclusively(self, action: Callable[[], None]) -> None:
        """Change the engine between two steps, with what is in flight taken by ``action``."""
        try:
            with self._lock.gate, self._lock.mutex, self._lock.entry(), self._lock:
                action()
                if self._outputs.finished and not self._loop.has_work:
                    self._scheduler.table.check_idle()
                if self._thread is not None:
                    self._deliver()
        finally:
            self._changed()

    def changed(self) -> None:
        """Outside of the step lock, somebody else has changed the engine between two steps:
        futures, streams and sinks get what was in flight then."""
        with self._lock.gate, self._lock.mutex:
            if self._thread is not None:
                self._deliver()
        self._changed()

    def _changed(self) -> None:
        self._outputs.resolve_futures()
        self._sinks.flush()
        self._loop.commands.waiters.wake()

    def check_outside(self) -> None:
        """Raises :class:`ReentrantCallError` in the midst of a step of the same thread, and in a
        callback of the engine's own."""
        with self._lock.mutex:
            self._lock.check_outside()
        thread = self._thread
        if thread is not None and thread.is_current:
            raise ReentrantCallError(
                "a callback of the engine's own thread cannot wait for steps of that thread"
            )


def prompts_with_params(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt with its sampling parameters; raises :class:`RequestError`."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, (Mapping, Set)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a list of prompts, each a text or a "
            "list of token ids"
        )
    try:
        listed = list(prompts)
    except TypeError as error:  # a tensor or an array without dimensions
        raise RequestError(f"prompts cannot be listed: {error}; give a list of prompts") from None
    each = list(params) if isinstance(params, Sequence) else [params] * len(listed)
    if len(each) != len(listed):
        raise RequestError(
            f"{len(listed)} prompts and {len(each)} sampling_params; give one for all, or one for "
            "each"
        )
    return list(zip(listed, each, strict=True))
