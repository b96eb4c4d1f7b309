"""What another rank than 0 knows of rank 0's engine, from what it is told."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from concurrent.futures import InvalidStateError
from typing import Any, NamedTuple

from megatron_async.engine.metrics import EngineCounters
from megatron_async.errors import MegatronAsyncError, RankDiedError, error_named
from megatron_async.megatron_api.context import Usage
from megatron_async.megatron_api.spmd.messages import Brought, Standing
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture

MOST_ENDED = 1024
"""Requests that have ended and that nobody here has asked for."""


class Applied(NamedTuple):
    """A call of rank 0's, with its requests."""

    name: str
    brought: Brought
    requests: list[DynamicInferenceRequest]

    @property
    def returned(self) -> list[DynamicInferenceRequest]:
        """The requests that it returned."""
        return [self.requests[place] for place in self.brought.returned]

    def step(self) -> dict[str, Any]:
        """What ``step_modern`` returned."""
        step = self.brought.step
        assert step is not None
        return {
            "active_request_ids": step.active,
            "finished_request_records": [self.requests[place] for place in step.finished],
            "tokens": step.tokens,
            "steps": step.reports,
            "step_time": step.seconds,
            "cuda_graph_request_count": step.graph_rows,
        }

    def without_requests(self) -> Applied:
        """What the caller of a call about one request gets."""
        said, nothing = self.brought, Standing.before_it_is_built()
        return Applied(
            self.name,
            Brought(standing=nothing, value=said.value, error=said.error, key=said.key),
            [],
        )

    def check(self) -> None:
        """Raises the error that the call met."""
        if self.brought.error is not None:
            raise error_of(*self.brought.error)


def error_of(name: str, message: str) -> MegatronAsyncError:
    """An error of rank 0's."""
    return error_named(name, message) or RankDiedError(message)


class Mirror:
    """Requests and state of rank 0's engine, as of its last call.

    Attributes:
        standing: how it stands.
        counters, usage: as of the last call that brought them.
    """

    def __init__(self) -> None:
        self.standing = Standing.before_it_is_built()
        self.counters, self.usage = EngineCounters(), Usage()
        self._active: dict[int, DynamicInferenceRequest] = {}
        self._futures: dict[int, RequestFuture] = {}
        self._ended: OrderedDict[int, DynamicInferenceRequest | Exception] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def has_unfinished(self) -> bool:
        """A request has not ended, as far as it is known here."""
        return bool(self.standing.active or self._futures or self.standing.in_flight)

    def request(self, request_id: int) -> DynamicInferenceRequest | None:
        """The record of a request that has not ended."""
        return self._active.get(request_id)

    def future_of(self, request_id: int) -> RequestFuture:
        """A future of a request that rank 0 has added."""
        future = RequestFuture()
        with self._lock:
            ended = self._ended.pop(request_id, None)
            if ended is None:
                self._futures[request_id] = future
        if ended is not None:
            _resolve(future, ended)
        return future

    def fail(self, error: Exception) -> None:
        """No request goes on."""
        with self._lock:
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            _resolve(future, error)

    def apply(self, name: str, brought: Brought) -> Applied:
        """Take what a call of rank 0's brought."""
        if brought.step is not None:
            for token in brought.step.tokens:
                request = self._active.get(token.request_id)
                if request is not None and token.token_id is not None:
                    request.generated_tokens.append(token.token_id)
        requests = [self._known(data) for data in brought.records]
        ends: list[tuple[int, DynamicInferenceRequest | Exception]] = [
            (request_id, requests[place]) for request_id, place in brought.done
        ]
        ends += [(request_id, error_of(kind, said)) for request_id, kind, said in brought.failed]
        self._active |= {requests[place].request_id: requests[place] for place in brought.opened}
        active = set(brought.standing.active)
        self._active = {key: value for key, value in self._active.items() if key in active}
        self.standing = brought.standing
        if brought.standing.totals is not None:
            self.counters = brought.standing.totals.as_counters()
            self.usage = brought.standing.totals.usage
        with self._lock:
            if name == "add_request" and brought.key is not None:
                self._ended.pop(brought.key, None)
            found = [(self._futures.pop(request_id, None), request_id, e) for request_id, e in ends]
            for future, request_id, end in found:
                if future is None:
                    self._ended[request_id] = end
            while len(self._ended) > MOST_ENDED:
                self._ended.popitem(last=False)
        for future, _, end in found:
            if future is not None:
                _resolve(future, end)
        return Applied(name, brought, requests)

    def _known(self, data: dict[str, Any]) -> DynamicInferenceRequest:
        """The record that is here already, with what came."""
        request = DynamicInferenceRequest.deserialize(data)
        known = self._active.get(request.request_id)
        if known is None:
            return request
        if request.choices:
            request.choices[0] = known
        vars(known).update(vars(request))
        return known


def _resolve(future: RequestFuture, end: DynamicInferenceRequest | Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        if isinstance(end, Exception):
            future.set_exception(end)
        else:
            future.set_result(end)
