"""megatron-core's ``InferenceClient``, for a coordinator of this package."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from megatron_async.codec import encode
from megatron_async.errors import RequestError, shown
from megatron_async.megatron_api.coordinator.headers import OUR_NAME, OURS, Headers
from megatron_async.megatron_api.coordinator.sockets import SocketThread, read_message
from megatron_async.megatron_api.coordinator.tables import CLIENT
from megatron_async.megatron_api.names import no_attribute
from megatron_async.megatron_api.sampling import own_params
from megatron_async.megatron_compat import installed
from megatron_async.request.parameter_checks import as_integer
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams

CONNECT_SECONDS = 60.0
"""How long :meth:`InferenceClient.start` waits for a coordinator where nothing is said."""
_HANDOFF = (
    "{} is not supported: keys and values stay in the engine; send the prompt with add_request()"
)

logger = logging.getLogger(__name__)


def _checked_prompt(prompt: Any) -> str | list[int]:
    """A text, or token ids of any integer type; raises :class:`RequestError`."""
    if isinstance(prompt, str):
        return prompt
    if hasattr(prompt, "tolist"):  # an array, or a tensor
        prompt = prompt.tolist()
    tokens = [as_integer(token) for token in prompt] if isinstance(prompt, list | tuple) else [None]
    if None in tokens:
        raise RequestError(f"prompt={shown(prompt)} must be a text or a list of token ids")
    return [token for token in tokens if token is not None]


class _Waiting:
    """A request that has not been answered: a future, or a stream of dicts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, streams: bool) -> None:
        self.submitted = time.perf_counter()
        self.future: asyncio.Future[Any] = loop.create_future()
        self.parts: asyncio.Queue[dict[str, Any] | None] | None = None
        if streams:
            self.parts = asyncio.Queue()


class InferenceClient:
    """Asks an engine that listens (``start_listening_to_data_parallel_coordinator``) from any
    process of its host, with the methods of megatron-core's main branch. They are called in the
    event loop that :meth:`start` was called in.

    What sends a signal returns an awaitable besides: of the outcome, which raises
    :class:`RequestError` for a signal that the engine has not followed. It need not be awaited.

    Args:
        inference_coordinator_address: that the engine's call returned.
        deserialize: answers are :class:`DynamicInferenceRequest`; else they are what its
            ``serialize`` returns. None is what the installed megatron-core's client does: it gives
            plain data since 0.17.
    """

    def __init__(self, inference_coordinator_address: str, deserialize: bool | None = None) -> None:
        self._address = inference_coordinator_address
        self.deserialize = not installed().since(17) if deserialize is None else deserialize
        self.next_request_id = 0
        self._waiting: dict[int, _Waiting] = {}
        self._outcomes: dict[int, asyncio.Future[None]] = {}
        self._signals = itertools.count()
        self._acknowledged = threading.Event()
        self._thread: SocketThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        connect_timeout_seconds: float | None = CONNECT_SECONDS,
    ) -> asyncio.Future[None]:
        """Connect. The result is done: scripts for 0.16 await it.

        Raises:
            RuntimeError: it has started already.
            TimeoutError: nobody answers at the address.
        """
        if self._thread is not None:
            raise RuntimeError("InferenceClient is running already: stop() it before")
        self._loop = loop or asyncio.get_running_loop()
        self._acknowledged.clear()
        self._thread = SocketThread(
            "DEALER", self._take, lambda socket: socket.connect(self._address), "inference-client"
        )
        self._thread.start()
        self._post(Headers.CONNECT, OUR_NAME)
        if not self._acknowledged.wait(connect_timeout_seconds):
            self.stop()
            raise TimeoutError(f"no inference coordinator answers at {self._address}")
        done: asyncio.Future[None] = self._loop.create_future()
        done.set_result(None)
        return done

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | list[int],
        sampling_params: Any = None,
        *,
        multi_modal_data: Any = None,
    ) -> asyncio.Future[Any]:
        """Send a request; the future gives its answer, whose ``latency`` is measured here.
        ``cancel()`` aborts the request.

        Raises:
            RequestError: prompt or parameters are not valid, or there is ``multi_modal_data``.
            RuntimeError: the client has not started.
        """
        number, waiting = self._submit(prompt, sampling_params, multi_modal_data, streams=False)
        waiting.future.add_done_callback(
            lambda future: self.abort_request(number) if future.cancelled() else None
        )
        return waiting.future

    def add_request_streaming(
        self,
        prompt: str | list[int],
        sampling_params: Any = None,
        *,
        multi_modal_data: Any = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Send a request, and yield ``{"partial": {"request_id", "new_tokens"}}`` as its tokens
        come, and ``{"final": answer}`` last. Leaving early aborts it; raises as
        :meth:`add_request`."""
        number, waiting = self._submit(prompt, sampling_params, multi_modal_data, streams=True)
        return self._parts(number, waiting)

    async def _parts(self, number: int, waiting: _Waiting) -> AsyncIterator[dict[str, Any]]:
        assert waiting.parts is not None
        try:
            while (part := await waiting.parts.get()) is not None:
                yield part
                if "final" in part:
                    return
        finally:
            if number in self._waiting:
                self.abort_request(number)

    def _submit(
        self, prompt: Any, params: Any, multi_modal_data: Any, *, streams: bool
    ) -> tuple[int, _Waiting]:
        if self._thread is None or self._loop is None:
            raise RuntimeError("InferenceClient is not currently running: start() it")
        if multi_modal_data is not None:
            raise RequestError("multi_modal_data is not supported: models take text alone")
        interval = getattr(params, "streaming_interval", 1)
        own = own_params(SamplingParams() if params is None else params)
        if not isinstance(own, SamplingParams):
            raise RequestError(
                f"sampling_params is a {type(params).__name__}; give a SamplingParams"
            )
        sent = own.checked().serialize()
        if streams:
            sent |= {"streaming": True, "streaming_interval": interval}
        prompt = _checked_prompt(prompt)
        number, self.next_request_id = self.next_request_id, self.next_request_id + 1
        waiting = self._waiting[number] = _Waiting(self._loop, streams=streams)
        self._post(Headers.SUBMIT_REQUEST, number, prompt, sent, None)
        return number, waiting

    def abort_request(self, request_id: int) -> None:
        """End a request by the number that it has among this client's; nobody gets an answer."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        waiting.future.cancel()
        if waiting.parts is not None:
            waiting.parts.put_nowait(None)
        self._post(Headers.ABORT_REQUEST, request_id)

    def add_request_with_kv_handoff(self, *_: Any, **__: Any) -> Any:
        """Raises :class:`RequestError`: there is no handoff of keys and values."""
        raise RequestError(_HANDOFF.format("add_request_with_kv_handoff()"))

    def add_request_with_kv_handoff_streaming(self, *_: Any, **__: Any) -> Any:
        """Raises :class:`RequestError`: there is no handoff of keys and values."""
        raise RequestError(_HANDOFF.format("add_request_with_kv_handoff_streaming()"))

    def release_handoff(self, request_id: int) -> None:
        """Raises :class:`RequestError`: there is no handoff of keys and values."""
        raise RequestError(_HANDOFF.format("release_handoff()"))

    # --- signals ------------------------------------------------------------------------------

    def pause_engines(self) -> asyncio.Future[None]:
        """Commit what is in flight and launch nothing until :meth:`unpause_engines`."""
        return self._signal(Headers.PAUSE)

    def unpause_engines(self) -> asyncio.Future[None]:
        """Go on, where the engine is paused."""
        return self._signal(Headers.UNPAUSE)

    def suspend_engines(self) -> asyncio.Future[None]:
        """Suspend the engine: new weights may come. One that runs is paused, and runs again after
        :meth:`resume_engines`, as in 0.16."""
        return self._signal(Headers.SUSPEND)

    def resume_engines(self) -> asyncio.Future[None]:
        """Take :meth:`suspend_engines` back; an engine that was paused before is so then."""
        return self._signal(Headers.RESUME)

    def set_generation_epoch(self, generation_epoch: int) -> asyncio.Future[None]:
        """Tokens that are sampled from now on are of this epoch."""
        return self._signal(Headers.SET_GENERATION_EPOCH, generation_epoch)

    def stop_engines(self) -> asyncio.Future[None]:
        """End the thread of an engine that is paused or suspended; what has not ended fails."""
        return self._signal(Headers.STOP)

    def start_cuda_profiler(self) -> asyncio.Future[None]:
        """Begin a profiler's range in the engine's process."""
        return self._signal(Headers.START_CUDA_PROFILER)

    def stop_cuda_profiler(self) -> asyncio.Future[None]:
        """End it."""
        return self._signal(Headers.STOP_CUDA_PROFILER)

    def shutdown_coordinator(self) -> None:
        """Nobody is answered any more; the engine stays as it is."""
        self._post(Headers.SHUTDOWN)

    def stop(self) -> None:
        """Leave: what has not been answered is aborted, and its futures are cancelled."""
        if self._thread is None:
            return
        for waiting in self._waiting.values():
            waiting.future.cancel()
            if waiting.parts is not None:
                waiting.parts.put_nowait(None)
        self._waiting.clear()
        for outcome in self._outcomes.values():
            outcome.cancel()
        self._outcomes.clear()
        self._post(Headers.DISCONNECT)
        thread, self._thread = self._thread, None
        thread.close()

    def _signal(self, signal: Headers, *fields: Any) -> asyncio.Future[None]:
        if self._thread is None or self._loop is None:
            raise RuntimeError("InferenceClient is not currently running: start() it")
        number = next(self._signals)
        outcome: asyncio.Future[None] = self._loop.create_future()
        # One that nobody awaits is no error; the coordinator's log has its reason.
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._outcomes[number] = outcome
        self._post(signal, *fields, number)
        return outcome

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, CLIENT)

    # --- messages -----------------------------------------------------------------------------

    def _post(self, header: Headers, *fields: Any) -> None:
        if self._thread is None:
            return
        data = encode([OURS.numbers[header], *fields])
        self._thread.call(functools.partial(self._thread.send, data))

    def _take(self, frames: list[bytes]) -> None:
        """A message has come; in the socket's thread."""
        message = read_message(frames[-1])
        header = None if message is None else OURS.header(message[0])
        if message is None or header is None:
            logger.warning("something that is no message of a coordinator was left out")
        elif header is Headers.CONNECT_ACK:
            self._acknowledged.set()
        elif header is Headers.ENGINE_REPLY:
            self._in_loop(lambda: self._answered(*message[1:]))
        elif header is Headers.ENGINE_REPLY_PARTIAL:
            self._in_loop(lambda: self._partial(*message[1:]))
        elif header is Headers.OUTCOME:
            self._in_loop(lambda: self._followed(*message[1:]))

    def _in_loop(self, what: Callable[[], object]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it is closed, and nobody waits there
            self._loop.call_soon_threadsafe(what)

    def _answered(self, number: int, reply: dict[str, Any]) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        reply["latency"] = time.perf_counter() - waiting.submitted
        answer: Any = reply
        if self.deserialize:
            reply.pop("uid", None)
            answer = DynamicInferenceRequest.deserialize(reply)
        if waiting.parts is not None:
            waiting.parts.put_nowait({"final": answer})
        elif not waiting.future.done():
            waiting.future.set_result(answer)

    def _partial(self, number: int, partial: dict[str, Any]) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and waiting.parts is not None:
            waiting.parts.put_nowait({"partial": partial})

    def _followed(self, number: int, error: str | None) -> None:
        outcome = self._outcomes.pop(number, None)
        if outcome is None or outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(RequestError(error))
