"""Answers inference clients for one engine: a thread at a ZMQ address, in the engine's process."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_async.codec import encode
from megatron_async.errors import ConfigError, EngineStoppedError, RequestError
from megatron_async.megatron_api.coordinator.epochs import Epochs, FinishedRequestRecord
from megatron_async.megatron_api.coordinator.headers import Dialect, Headers, dialect_of
from megatron_async.megatron_api.coordinator.replies import (
    failed_request,
    params_of,
    prompt_of,
    reply_of,
)
from megatron_async.megatron_api.coordinator.sockets import SocketThread, read_message
from megatron_async.megatron_api.coordinator.states import TRANSITIONS, EngineState, EngineStates
from megatron_async.megatron_api.coordinator.token_streams import TokenStreams
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.sampling_params import SamplingParams

LOOPBACK = "127.0.0.1"
_NO_HANDOFF = "keys and values stay in this engine; send the prompt with add_request()"

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What clients ask of an engine."""

    @property
    def ledger(self) -> dict[str, Any] | None: ...

    @property
    def log_probs_mode(self) -> str | None: ...

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        opened: Callable[[DynamicInferenceRequest], None],
    ) -> RequestFuture: ...

    def abort_request(self, request_id: int) -> None: ...

    def between_steps(self, action: Callable[[], None]) -> None: ...

    def holds_cache(self, request_id: int) -> bool: ...

    def suspend(self) -> None: ...

    def forget_computed(self) -> None: ...

    def go_on(self) -> None: ...

    def stop(self) -> None: ...

    def observe(self, observer: Any) -> Callable[[], None]: ...


@dataclass(slots=True)
class _Live:
    """A request of a client that has not been answered."""

    client: bytes
    dialect: Dialect
    number: int
    prompt: Any
    params: Any
    uid: str
    request: DynamicInferenceRequest | None = None


class Coordinator:
    """The server of :class:`~megatron_async.megatron_api.InferenceClient`, and of megatron-core's
    own clients of 0.16 to its main branch. It has no keys, and listens at this host alone unless
    another address is named.

    Args:
        engine, states: what clients control.
        host: name or address to listen at; None is this host alone.
        port: None takes a free one, and so does one that is in use, with a warning.

    Raises:
        ConfigError: nobody can listen there.
    """

    def __init__(
        self, engine: Engine, states: EngineStates, host: str | None, port: int | None
    ) -> None:
        self._engine = engine
        self._states = states
        self._epochs = Epochs()
        self._clients: dict[bytes, Dialect] = {}
        self._unpauses = False  # what SUSPEND has paused, RESUME unpauses
        self._live: dict[tuple[bytes, int], _Live] = {}
        self.address = ""

        def bind(socket: Any) -> None:
            self.address = _bound(socket, host or LOOPBACK, port)

        self._thread = SocketThread("ROUTER", self._take, bind, "inference-coordinator")
        self._streams = TokenStreams(engine, self._thread.call, self._send_tokens)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """It answers."""
        return self._thread.is_alive

    def close(self) -> None:
        """Answer what has ended, and no more."""
        self._thread.close()

    # --- messages -----------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> None:
        client, data = frames[0], frames[-1]
        message = read_message(data) if len(frames) == 2 else None
        if message is None:
            logger.warning("something that is no message of an inference client was left out")
            return
        connects = dialect_of(message)
        if connects is not None and (client not in self._clients or len(message) == 2):
            self._clients[client] = connects
            self._send(client, Headers.CONNECT_ACK)
            return
        dialect = self._clients.get(client)
        header = None if dialect is None else dialect.header(message[0])
        if dialect is None or header is None:
            logger.warning("a message of an inference client that has not connected was left out")
            return
        self._serve(client, dialect, header, message[1:])

    def _serve(self, client: bytes, dialect: Dialect, header: Headers, fields: list[Any]) -> None:
        if header in (Headers.SUBMIT_REQUEST, Headers.SUBMIT_REQUEST_WITH_KV):
            self._submit(client, dialect, header, *fields)
        elif header is Headers.ABORT_REQUEST:
            self._abort(client, int(fields[0]))
        elif header is Headers.DISCONNECT:
            self._disconnect(client)
        elif header is Headers.SHUTDOWN:
            self._fail_all(RequestError("the coordinator was shut down"))
            self._thread.end()
        elif header in _SIGNALS:
            self._signal(client, dialect, header, fields)
        elif header is not Headers.CONNECT:
            logger.warning("%s is left out: one engine has no use for it", header.name)

    def _send(self, client: bytes, header: Headers, *fields: Any) -> None:
        number = self._clients[client].numbers[header]
        self._thread.send(client, encode([number, *fields]))

    # --- requests -----------------------------------------------------------------------------

    def _submit(
        self, client: bytes, dialect: Dialect, header: Headers, number: int, prompt: Any,
        params: Any, *rest: Any,
    ) -> None:  # fmt: skip
        uid = f"chatcmpl-{uuid.uuid4().hex}"
        live = _Live(client, dialect, number, prompt, params, uid)

        def opened(request: DynamicInferenceRequest) -> None:
            live.request = request
            self._epochs.opened(request)

        try:
            if (client, number) in self._live:
                raise RequestError(f"request {number} of this client has not ended")
            if self._states.state is EngineState.STOPPED:
                raise RequestError("the engine was stopped; start_listening again")
            if header is Headers.SUBMIT_REQUEST_WITH_KV:
                raise RequestError(_NO_HANDOFF)
            if any(rest):
                raise RequestError("multi_modal_data is not supported: models take text alone")
            own = params_of(params, self._engine.log_probs_mode)
            future = self._engine.submit(prompt_of(prompt), own, opened)
        except Exception as error:
            self._close(live)
            self._answer(live, failed_request(number, prompt, error))
            return
        self._live[client, number] = live
        assert live.request is not None
        if Headers.ENGINE_REPLY_PARTIAL in dialect.numbers and params.get("streaming"):
            interval = params.get("streaming_interval") or 1
            self._streams.add((client, number), live.request, interval)
        future.when_done(lambda done: self._thread.call(functools.partial(self._end, live, done)))

    def _end(self, live: _Live, future: Any) -> None:
        """The engine has done what it can for a request."""
        if self._live.get((live.client, live.number)) is not live:
            return  # it was answered when the engine was stopped
        del self._live[live.client, live.number]
        self._streams.remove((live.client, live.number))
        error = None if future.cancelled() else future.exception()
        if error is None and not future.cancelled():
            request = future.result()
        else:
            error = error or RequestError("the request was cancelled")
            request = failed_request(live.number, live.prompt, error)
        self._close(live)
        ledger = self._engine.ledger
        if ledger is not None and not request.failed():
            ledger[live.uid] = FinishedRequestRecord(
                request.policy_epoch, request.kv_cache_epoch, request.counters.evictions
            )
        self._answer(live, request)

    def _close(self, live: _Live) -> None:
        if live.request is not None:
            self._epochs.ended(live.request)

    def _answer(self, live: _Live, request: DynamicInferenceRequest) -> None:
        if live.client not in self._clients:
            return
        reply = reply_of(request, live.params, live.dialect, live.uid)
        self._send(live.client, Headers.ENGINE_REPLY, live.number, reply)

    def _send_tokens(self, key: tuple[bytes, int], partial: dict[str, Any]) -> None:
        client, number = key
        if client in self._clients:
            self._send(client, Headers.ENGINE_REPLY_PARTIAL, number, partial)

    def _abort(self, client: bytes, number: int) -> None:
        live = self._live.get((client, number))
        if live is not None and live.request is not None:
            self._engine.abort_request(live.request.request_id)

    def _disconnect(self, client: bytes) -> None:
        """Nobody waits any more for what this client asked."""
        for key in [key for key in self._live if key[0] == client]:
            self._abort(*key)
        self._clients.pop(client, None)

    def _fail_all(self, error: RequestError) -> None:
        for key, live in list(self._live.items()):
            self._abort(*key)
            del self._live[key]
            self._streams.remove(key)
            self._close(live)
            self._answer(live, failed_request(live.number, live.prompt, error))

    # --- signals ------------------------------------------------------------------------------

    def _signal(self, client: bytes, dialect: Dialect, signal: Headers, fields: list[Any]) -> None:
        said = None
        try:
            if signal in TRANSITIONS:
                self._change(signal, dialect)
            else:
                _OTHER_SIGNALS[signal](self, *fields[:1])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, EngineStoppedError):
                self._states.end(error)
            logger.warning("%s was left out: %s", signal.name, said)
        if dialect.is_ours:
            self._send(client, Headers.OUTCOME, fields[-1], said)
        acknowledged = _ACKNOWLEDGED.get(signal)
        if acknowledged is not None and said is None:
            for waiting, other in self._clients.items():
                if acknowledged in other.numbers and not other.is_ours:
                    self._send(waiting, acknowledged, client)
        if signal is Headers.STOP and dialect.since == 16 and said is None:
            self._thread.end()  # as theirs

    def _change(self, signal: Headers, dialect: Dialect) -> None:
        state, transition = self._states.state, TRANSITIONS[signal]
        if state in transition.done:
            return
        if signal is Headers.SUSPEND and state is EngineState.RUNNING and dialect.is_ours:
            self._change(Headers.PAUSE, dialect)  # as 0.16's client asks
            state, self._unpauses = EngineState.PAUSED, True
        stops = signal is Headers.STOP and dialect.since == 16 and state is EngineState.RUNNING
        if state not in transition.allowed and not stops:
            names = " or ".join(sorted(each.name for each in transition.allowed))
            raise RequestError(f"{signal.name} is for an engine that is {names}, not {state.name}")
        if signal is Headers.PAUSE:
            self._engine.suspend()
        elif signal is Headers.RESUME:
            self._engine.forget_computed()
        elif signal is Headers.UNPAUSE:
            self._engine.go_on()
        elif signal is Headers.STOP:
            self._fail_all(RequestError("the engine was stopped"))
            self._engine.stop()
        self._states.reached(signal)
        if signal is Headers.RESUME and self._unpauses:
            self._unpauses = False
            self._change(Headers.UNPAUSE, dialect)

    def set_epoch(self, epoch: object) -> None:
        """Tokens that are sampled from now on are of ``epoch``."""
        if type(epoch) is not int:
            raise RequestError(f"generation_epoch={epoch!r} must be an integer")
        self._engine.between_steps(lambda: self._epochs.set(epoch, self._engine.holds_cache))


def _profile(name: str) -> Callable[..., None]:
    def call(coordinator: Coordinator, *_: Any) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RequestError("there is no GPU to profile")
        getattr(torch.cuda.profiler, name)()

    return call


_OTHER_SIGNALS: dict[Headers, Callable[..., None]] = {
    Headers.SET_GENERATION_EPOCH: Coordinator.set_epoch,
    Headers.START_CUDA_PROFILER: _profile("start"),
    Headers.STOP_CUDA_PROFILER: _profile("stop"),
}
_SIGNALS = TRANSITIONS.keys() | _OTHER_SIGNALS.keys()
_ACKNOWLEDGED = {Headers.PAUSE: Headers.PAUSE_ACK, Headers.STOP: Headers.STOP_ACK}
"""What clients of 0.16 wait for."""


def _bound(socket: Any, host: str, port: int | None) -> str:
    """Let a socket listen; the address."""
    import zmq

    at = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    if port is not None:
        try:
            socket.bind(f"{at}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise ConfigError(f"cannot listen at {at}:{port}: {error}") from error
            logger.warning("port %d is in use; a free one is taken", port)
        else:
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    try:
        socket.bind(f"{at}:*")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {at}: {error}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
