"""The requests of all front ends while the engine decodes them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.requests.output_processor import Taken
from megatron_async.errors import EngineStoppedError, QueueFullError, RequestError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason, RequestFuture
from megatron_async.serving.engine_side.output_socket import OutputSocket
from megatron_async.serving.messages import (
    Generate,
    LogProbs,
    Output,
    Outputs,
    PromptLogProbs,
    Refused,
    WeightVersion,
    named,
)

logger = logging.getLogger(__name__)

TIMEOUT = "timeout"
IDLE_DEADLINES = 1024
"""Deadlines of requests that have ended, before the heap is cleared of them."""


class ConnectedFrontEnd:
    """A front end as the engine process sees it, and its requests, by its own numbers."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.requests: dict[int, LiveRequest] = {}
        self.is_gone = False


class LiveRequest:
    """A request of a front end.

    Attributes:
        names: the client's id of it, which several may have, and that of its answer.
        left: sequences that have not ended.
        has_text: the engine makes its text, for it has stop words.
        reason: why it is aborted, in place of the engine's reason.
        record: of the first sequence.
        sent_prompt: the log-probabilities of its prompt have been sent.
    """

    __slots__ = (
        "engine_id",
        "front_end",
        "has_text",
        "is_ranked",
        "left",
        "names",
        "reason",
        "record",
        "request_id",
        "sent_prompt",
    )

    def __init__(
        self,
        front_end: ConnectedFrontEnd,
        request_id: int,
        engine_id: int,
        has_text: bool,
        names: tuple[str, str],
    ) -> None:
        self.front_end = front_end
        self.names = names
        self.request_id = request_id
        self.engine_id = engine_id
        self.has_text = has_text
        self.is_ranked = False
        self.left = 1
        self.reason: str | None = None
        self.record: DynamicInferenceRequest | None = None
        self.sent_prompt = False


class Route(NamedTuple):
    """Where the tokens of one of the engine's sequences belong."""

    live: LiveRequest
    place: int
    """Among the request's sequences."""


class LiveRequests:
    """Gives requests to the engine, and what its steps bring to the front ends. The sink of the
    engine's outputs.

    One thread adds and ends requests. The engine's thread delivers, in one message for each front
    end and step. A front end that is not there or does not read is dropped.

    Args:
        max_sequences: that may run or wait at the same time; None for any number.
        on_failure: called when the engine has stopped for good.

    Attributes:
        refusal: why new requests are refused as if the queue were full; None when they are not.
        first_version: of the weights that the engine calls 0.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        outputs: OutputSocket,
        max_sequences: int | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.refusal: str | None = None
        self.first_version = 0
        self._engine = engine
        self._outputs = outputs
        self._max_sequences = max_sequences
        self._on_failure = on_failure
        self._routes: dict[int, Route] = {}
        """By the engine's id of the sequence."""
        self._engine_ids = itertools.count()
        self._deadlines: list[tuple[float, int, LiveRequest]] = []
        self._emptied = threading.Condition()
        self._failure: EngineStoppedError | None = None

    def __len__(self) -> int:
        return len(self._routes)

    # --- in the thread of the commands --------------------------------------------------------

    def add(self, front_end: ConnectedFrontEnd, asked: Generate) -> None:
        """Start a request, or refuse it: an error is its front end's alone."""
        self.or_refuse(front_end, asked, lambda: self._add(front_end, asked))

    def or_refuse(
        self, front_end: ConnectedFrontEnd, asked: Generate, work: Callable[[], None]
    ) -> None:
        """Do what a request needs; its front end learns of errors."""
        try:
            work()
        except QueueFullError as full:
            self._refuse(front_end, asked.request_id, "full", str(full))
        except RequestError as error:
            self._refuse(front_end, asked.request_id, "invalid", str(error))
        except EngineStoppedError as error:
            self._refuse(front_end, asked.request_id, "dead", str(error))
        except Exception as error:
            logger.exception("a request could not be added")
            self._refuse(front_end, asked.request_id, "internal", f"{type(error).__name__}")

    def refuse(self, front_end: ConnectedFrontEnd, asked: Generate, error: RequestError) -> None:
        """Tell a front end why a request cannot be served."""
        self._refuse(front_end, asked.request_id, "invalid", str(error))

    def abort(self, front_end: ConnectedFrontEnd, request_id: int) -> None:
        """End a request, if it has not ended."""
        live = front_end.requests.get(request_id)
        if live is not None:
            self._engine.abort_request(live.engine_id)

    def abort_all(self, front_end: ConnectedFrontEnd) -> None:
        """End all requests of a front end."""
        for request_id in list(front_end.requests):
            self.abort(front_end, request_id)

    def end_all(self, reason: str, ids: Iterable[str] | None = None) -> int:
        """End all requests, or those that ``ids`` mean; front ends see ``reason``. How many there
        were."""
        ended = {route.live for route in list(self._routes.values())}
        if ids is not None:
            ended = named(ids, {live: live.names for live in ended})
        for live in ended:
            self._end(live, reason)
        return len(ended)

    def expire(self, now: float) -> float | None:
        """End the requests whose time is over; returns when the next one's will be. Both are of
        ``time.monotonic``."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].left):
            live = heapq.heappop(deadlines)[2]
            if live.left:
                self._end(live, TIMEOUT)
        if len(deadlines) > 2 * len(self._routes) + IDLE_DEADLINES:
            self._deadlines = deadlines = [each for each in deadlines if each[2].left]
            heapq.heapify(deadlines)
        return deadlines[0][0] if deadlines else None

    def _add(self, front_end: ConnectedFrontEnd, asked: Generate) -> None:
        if self.refusal is not None:
            raise QueueFullError(self.refusal)
        request_id = asked.request_id
        if request_id in front_end.requests:
            raise RequestError(f"request_id={request_id} is in use; choose another")
        if asked.timeout is not None and not asked.timeout > 0:
            raise RequestError(f"timeout={asked.timeout} must be above 0 seconds")
        has_text = bool(asked.params["stop_words"])
        names = asked.name, asked.answer_id
        live = LiveRequest(front_end, request_id, next(self._engine_ids), has_text, names)
        future = self._engine.add_request(
            live.engine_id,
            asked.prompt,
            asked.params,
            priority=asked.priority,
            opened=partial(self._opened, live),
        )
        if asked.acknowledge:
            self._send(front_end, [Output(request_id, 0, [])])
        if live.is_ranked:
            future.when_done(partial(self._ranked, live))
        if asked.timeout is not None:
            deadline = time.monotonic() + asked.timeout
            heapq.heappush(self._deadlines, (deadline, live.engine_id, live))

    def _opened(self, live: LiveRequest, record: DynamicInferenceRequest) -> None:
        """Note a request, before any step can see it."""
        sequences = record.choices or [record]
        most = self._max_sequences
        if most is not None and len(self._routes) + len(sequences) > most:
            raise QueueFullError(f"{len(self._routes)} sequences run or wait, and {most} may")
        params = record.sampling_params
        live.record = record
        live.left = len(sequences)
        live.is_ranked = params.num_sequences > params.n
        live.front_end.requests[live.request_id] = live
        for index, sequence in enumerate(sequences):
            self._routes[sequence.request_id] = Route(live, index)

    def _end(self, live: LiveRequest, reason: str) -> None:
        live.reason = reason
        self._engine.abort_request(live.engine_id)

    # --- in the engine's thread ---------------------------------------------------------------

    def deliver(self, taken: Taken) -> None:
        """Send what a step brought."""
        try:
            self._deliver(taken)
        except Exception as error:
            logger.exception("what a step brought could not be sent")
            self._on_failure(error)

    def _deliver(self, taken: Taken) -> None:
        ended = {request.request_id: request for request in taken.finished}
        batches: dict[ConnectedFrontEnd, list[Output | Refused]] = {}
        routes = self._routes
        for request_id, token, text, reason, log_probs in taken.outputs:
            route = routes.get(request_id)
            if route is None:
                continue
            live, index = route
            if live.is_ranked:
                continue
            tokens = [] if token is None else [token]
            if not live.has_text:
                text = None
            own: LogProbs | None = None if log_probs is None else [log_probs]
            if live.sent_prompt or index:
                of_prompt = None
            else:
                live.sent_prompt = True
                of_prompt = _of_prompt(live.record)
            if reason is None:
                output = Output(live.request_id, index, tokens, text, own, of_prompt)
            else:
                output = self._last(live, index, tokens, text, own, of_prompt, ended[request_id])
            batch = batches.get(live.front_end)
            if batch is None:
                batches[live.front_end] = [output]
            else:
                batch.append(output)
        for request_id in ended:
            self._forget(request_id)
        for front_end, batch in batches.items():
            self._send(front_end, batch)

    def fail(self, error: EngineStoppedError) -> None:
        """The engine has stopped: nobody gets anything any more."""
        lives = {route.live for route in list(self._routes.values())}
        by_front_end: dict[ConnectedFrontEnd, list[Output | Refused]] = {}
        for live in lives:
            refused = Refused(live.request_id, "dead", str(error))
            by_front_end.setdefault(live.front_end, []).append(refused)
        for front_end, batch in by_front_end.items():
            self._send(front_end, batch)
        with self._emptied:  # nothing ends any more
            self._failure = error
            self._emptied.notify_all()
        self._on_failure(error)

    def _forget(self, engine_id: int) -> None:
        """A sequence has ended."""
        route = self._routes.pop(engine_id, None)
        if route is None:
            return
        live = route.live
        live.left -= 1
        if not live.left and not live.is_ranked:
            live.front_end.requests.pop(live.request_id, None)
        if not self._routes:
            with self._emptied:
                self._emptied.notify_all()

    def _ranked(self, live: LiveRequest, future: RequestFuture) -> None:
        """A request with ``best_of`` has ended: which sequences are kept is known only now."""
        live.front_end.requests.pop(live.request_id, None)
        if future.cancelled() or future.exception() is not None:
            return
        outputs: list[Output | Refused] = []
        for index, record in enumerate(future.result().choices):
            text = record.generated_text if live.has_text else None
            of_prompt = None if index else _of_prompt(record)
            tokens, own = list(record.generated_tokens), _of_tokens(record)
            outputs.append(self._last(live, index, tokens, text, own, of_prompt, record))
        self._send(live.front_end, outputs)

    def _last(
        self,
        live: LiveRequest,
        index: int,
        tokens: list[int],
        text: str | None,
        log_probs: LogProbs | None,
        of_prompt: PromptLogProbs | None,
        record: DynamicInferenceRequest,
    ) -> Output:
        """The last output of a sequence."""
        reason = record.finish_reason
        assert reason is not None
        said = reason.value
        if reason is FinishReason.ABORT and live.reason is not None:
            said = live.reason
        usage = {
            "prompt_tokens": len(record.prompt_tokens),
            "cached_tokens": min(record.counters.cached, len(record.prompt_tokens)),
            "generated_tokens": len(record.generated_tokens),
            "queue_time": 0.0 if record.queue_time is None else record.queue_time,
        }
        return Output(
            live.request_id, index, tokens, text, log_probs, of_prompt, said, record.stop_reason,
            usage, self._weight_versions(record), self._routed_experts(record),
        )  # fmt: skip

    def _routed_experts(self, record: DynamicInferenceRequest) -> bytes | None:
        """A numpy file of the experts of a sequence's tokens, if they were asked for. Layers
        without experts have zeros, as in vLLM's and SGLang's answers."""
        if record.routed_experts is None:
            return None
        import io

        import numpy as np

        from megatron_async.models.moe.routed import routed_layers

        found = routed_layers(self._engine.model.network)
        positions, _, chosen = record.routed_experts.shape
        whole = np.zeros((positions, found.num_layers, chosen), np.uint16)
        whole[:, found.numbers] = record.routed_experts
        file = io.BytesIO()
        np.save(file, whole, allow_pickle=False)
        return file.getvalue()

    def _weight_versions(self, record: DynamicInferenceRequest) -> list[WeightVersion]:
        spans, rows = record.weight_spans, record.drafted_rows
        ends = [*(span.start for span in spans[1:]), len(record.generated_tokens)]
        return [
            WeightVersion(
                self.first_version + span.version,
                span.start,
                end,
                *(() if rows is None else rows.counts(span.start, end)),
            )
            for span, end in zip(spans, ends, strict=False)
        ]

    # --- in both ------------------------------------------------------------------------------

    def wait_until_empty(
        self, timeout: float | None, given_up: Callable[[], bool] = lambda: False
    ) -> bool:
        """Block until no request is left; False when ``timeout`` seconds were not enough, or when
        it is given up, which :meth:`wake_waiters` has all waiters ask.

        Raises:
            EngineStoppedError: the engine has stopped before.
        """
        with self._emptied:
            self._emptied.wait_for(lambda: not self._routes or self._failure or given_up(), timeout)
            if self._routes and self._failure is not None:
                raise EngineStoppedError(*self._failure.args)
            return not self._routes

    def wake_waiters(self) -> None:
        """Something that they look at has changed."""
        with self._emptied:
            self._emptied.notify_all()

    def _refuse(
        self, front_end: ConnectedFrontEnd, request_id: int, kind: str, message: str
    ) -> None:
        self._send(front_end, [Refused(request_id, kind, message)])

    def _send(self, front_end: ConnectedFrontEnd, batch: list[Output | Refused]) -> None:
        if front_end.is_gone or self._outputs.send(front_end.identity, Outputs(batch)):
            return
        front_end.is_gone = True
        self.abort_all(front_end)


def _of_prompt(record: DynamicInferenceRequest | None) -> PromptLogProbs | None:
    if record is None or record.prompt_log_probs is None or record.prompt_token_ranks is None:
        return None
    pairs = _pairs(record.prompt_log_probs, record.prompt_top_n_logprobs)
    ranked = zip(pairs, record.prompt_token_ranks, strict=True)
    return [(own, top, rank) for (own, top), rank in ranked]


def _of_tokens(record: DynamicInferenceRequest) -> LogProbs | None:
    if record.generated_log_probs is None:
        return None
    return _pairs(record.generated_log_probs, record.generated_top_n_logprobs)


def _pairs(own: Iterable[float], top: Any) -> LogProbs:
    each = list(own)
    return list(zip(each, [{}] * len(each) if top is None else top, strict=True))
