"""Where requests come in and are changed, from any thread, while others step the engine."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from megatron_async.config import EngineConfig, as_integer
from megatron_async.engine.loop import DecodeLoop
from megatron_async.engine.output_processor import OutputBook, TokenOutput
from megatron_async.engine.request_validation import Intake
from megatron_async.errors import EngineStoppedError, RequestError
from megatron_async.request import DynamicInferenceRequest, RequestFuture
from megatron_async.runner.controller import TextGenerationController
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.request_state import Sequence
from megatron_async.scheduler.scheduler import Scheduler

Prompt = str | list[int] | torch.Tensor


class RequestDesk(DecodeLoop):
    """Takes requests in and passes on what users want of them, by the loop's inbox."""

    def __init__(
        self,
        controller: TextGenerationController,
        scheduler: Scheduler,
        book: OutputBook,
        config: EngineConfig,
        intake: Intake,
    ) -> None:
        super().__init__(controller, scheduler, book, config)
        self._intake = intake
        self._keys = itertools.count()
        self._door = threading.RLock()
        """Around the way in: an id that is free, its record, its place in the inbox. A signal's
        handler may call the engine in the midst of it."""
        self._request_ids = itertools.count()

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> RequestFuture:
        """Queue a request; it is taken up at the next step. Callable from any thread.

        Args:
            priority: lower goes first; equal ones are served first come, first served. What
                overtakes a request is bounded: one step of priority is worth 1,000 tickets.

        Returns:
            A future of the finished request: step until it is done, or ``await`` it while somebody
            else steps.

        Raises:
            RequestError: the request cannot be served; other requests are not affected.
            EngineStoppedError: the engine is closed, or was stopped by an error.
        """
        return self._add(request_id, prompt, sampling_params, priority, None)[1]

    def _add(
        self,
        request_id: int | None,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: int,
        listener: deque[TokenOutput] | None,
    ) -> tuple[int, RequestFuture]:
        """:meth:`add_request`; also the scheduler's key. ``listener`` gets the outputs, and without
        an id a free one is taken."""
        rank = as_integer(priority)
        if rank is None or abs(rank) > 10**6:
            raise RequestError(f"priority={priority!r} must be an integer of at most a million")
        while True:
            number = next(self._request_ids) if request_id is None else _checked_id(request_id)
            if self._book.key_of(number) is None:
                added = self._try_to_add(number, prompt, sampling_params, rank, listener)
                if added is not None:
                    return added
            if request_id is not None:
                raise RequestError(f"request_id={number} is in use; choose another")

    def _try_to_add(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        rank: int,
        listener: deque[TokenOutput] | None,
    ) -> tuple[int, RequestFuture] | None:
        """None if somebody else has taken the id meanwhile."""
        key = next(self._keys)
        request, sequence = self._intake.accept(key, request_id, prompt, sampling_params)
        with self._door:
            self._turn.check()
            if self._book.key_of(request_id) is not None:
                return None
            try:
                future = self._book.open(key, request)
                if listener is not None:
                    self._listeners[request_id] = listener
                self._inbox.append(functools.partial(self._admit, key, sequence, rank))
            except BaseException:  # of a signal
                self._book.forget(key, request_id)
                if self._listeners.get(request_id) is listener:
                    self._listeners.pop(request_id, None)
                raise
        # Whoever keeps a future does not keep the engine.
        future.add_done_callback(functools.partial(_abort_if_cancelled, weakref.ref(self), key))
        if self._turn.stopped is not None:  # meanwhile, by a signal's handler
            self._fail(self._turn.stopped)
            self._book.tell()
        return key, future

    def abort_request(self, request_id: int) -> bool:
        """End a request at the next step; its tokens in flight are discarded.

        Returns:
            False when the request is not known or has ended, as all have in a stopped engine.

        Raises:
            RequestError: the id is no integer.
        """
        return self._apply(request_id, self._abort)

    def pause_request(self, request_id: int) -> bool:
        """Leave a request out from the next step on; its tokens in flight are kept, and so are
        its slot and blocks unless others need them.

        Returns:
            False when the request is not known or has ended.
        """
        return self._apply(request_id, self.scheduler.pause)

    def resume_request(self, request_id: int) -> bool:
        """Let a paused request go on from the next step. Returns as :meth:`pause_request`."""
        return self._apply(request_id, self.scheduler.resume)

    def evict_request(self, request_id: int) -> bool:
        """Free the memory of a request at the next step; its tokens in flight are kept, and it
        is computed again when there is room. Returns as :meth:`pause_request`."""
        return self._apply(request_id, self.scheduler.evict)

    def _apply(self, request_id: int, change: Callable[[int], object]) -> bool:
        number = _checked_id(request_id)
        with self._door:
            key = self._book.key_of(number)
            if key is None or self._turn.stopped is not None:
                return False
            self._inbox.append(lambda: change(key))
        return True

    def _admit(self, key: int, sequence: Sequence, rank: int) -> None:
        if self._book.knows(key):
            self.scheduler.add(sequence, rank)

    def _ask_to_abort(self, key: int) -> None:
        self._inbox.append(lambda: self._abort(key))

    def _abort(self, key: int) -> None:
        if self.scheduler.abort(key):
            self._emit(*self._book.abort(key))

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The record of a request that has not ended; ended ones belong to who took them.

        Raises:
            RequestError: there is no such request.
        """
        request = self._book.request(_checked_id(request_id))
        if request is None:
            raise RequestError(f"request_id={request_id} is not known, or has ended")
        return request

    def has_unfinished_requests(self) -> bool:
        """A request has not ended, a step in flight has not been committed, or the next
        :meth:`step_modern` has something to hand out."""
        return bool(
            self._inbox
            or self._in_flight
            or self.scheduler.has_unfinished
            or self._outputs
            or self._finished
        )

    def _fail(self, error: EngineStoppedError) -> None:
        with self._door:  # whoever was on the way in is in, and nobody else comes
            super()._fail(error)


def _checked_id(request_id: object) -> int:
    number = as_integer(request_id)
    if number is None or number < 0:
        raise RequestError(f"request_id={request_id!r} must be an integer of at least 0")
    return number


def _abort_if_cancelled(desk: weakref.ref[RequestDesk], key: int, future: RequestFuture) -> None:
    alive = desk()
    if alive is not None and future.cancelled():
        alive._ask_to_abort(key)
