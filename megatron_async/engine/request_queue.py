"""Where requests come in and are changed, from any thread, while others step the engine."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.config import as_integer
from megatron_async.engine.commands import AbortRequest, AddRequest, Command, CommandQueue
from megatron_async.engine.output_processor import OutputProcessor
from megatron_async.engine.request_validation import RequestValidator, seed_of
from megatron_async.engine.step_lock import StepLock
from megatron_async.errors import RequestError
from megatron_async.request import DynamicInferenceRequest, RequestFuture
from megatron_async.sampling_params import SamplingParams

Prompt = str | list[int] | torch.Tensor


class RequestQueue:
    """Makes commands of what users ask about requests. Nothing here takes a lock, so a signal's
    handler may call it in the midst of anything."""

    def __init__(
        self,
        commands: CommandQueue,
        outputs: OutputProcessor,
        validator: RequestValidator,
        lock: StepLock,
    ) -> None:
        self._commands = commands
        self._outputs = outputs
        self._validator = validator
        self._lock = lock
        self._keys = itertools.count()
        self._request_ids = itertools.count()

    def add(
        self,
        request_id: int | None,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: object = 0,
        opened: Callable[[int, int], None] | None = None,
    ) -> tuple[int, RequestFuture]:
        """Queue a request; without an id a free one is taken. ``opened`` gets its key and its id
        before any step can see it.

        Returns:
            The scheduler's key, and the future of the finished request.

        Raises:
            RequestError: the request cannot be served.
            EngineStoppedError: the engine has stopped.
        """
        while True:
            number = next(self._request_ids) if request_id is None else checked_id(request_id)
            if request_id is not None and self._outputs.key_of(number) is not None:
                raise RequestError(f"request_id={number} is in use; choose another")
            key = next(self._keys)
            command, params = self._validator.add(key, number, prompt, sampling_params, priority)
            self._lock.check()
            request = DynamicInferenceRequest(
                request_id=number,
                prompt=command.prompt,
                prompt_tokens=list(command.tokens),
                sampling_params=params,
                seed=seed_of(command.values),
            )
            future = self._outputs.open(key, request)
            if future is not None:
                break
        try:
            if opened is not None:
                opened(key, number)
            self._commands.submit(command)
        except BaseException:  # of a signal
            self._outputs.drop(key, number)
            raise
        # Whoever keeps a future does not keep the engine.
        abort = functools.partial(_abort_if_cancelled, weakref.ref(self._commands), key)
        future.add_done_callback(abort)
        if self._lock.stopped is not None:  # meanwhile
            self._outputs.fail(self._lock.stopped)
            self._outputs.resolve_futures()
        return key, future

    def replay(self, command: Command) -> None:
        """Queue a recorded command."""
        if isinstance(command, AddRequest):
            request = DynamicInferenceRequest(
                request_id=command.request_id,
                prompt=command.prompt,
                prompt_tokens=list(command.tokens),
                sampling_params=SamplingParams.deserialize(command.params).checked(),
                seed=seed_of(command.values),
            )
            if self._outputs.open(command.key, request) is None:
                raise RequestError(f"request_id={command.request_id} is in use")
        self._commands.submit(command)

    def abort(self, key: int) -> None:
        """End the request with this key, if it has not ended."""
        if self._outputs.knows(key):
            self._commands.submit(AbortRequest(key))

    def change(self, request_id: int, command: Callable[[int], Command]) -> bool:
        """Queue the command that ``command`` makes of the request's key; False when the request is
        not known or has ended, as all have in a stopped engine."""
        key = self._outputs.key_of(checked_id(request_id))
        if key is None or self._lock.stopped is not None:
            return False
        self._commands.submit(command(key))
        return True

    def update_sampling_params(self, request_id: int, changes: dict[str, Any]) -> bool:
        """Queue new sampling parameters; returns as :meth:`change`.

        Raises:
            RequestError: one of them cannot be changed, or has a wrong value.
        """
        number = checked_id(request_id)
        request = self._outputs.request(number)
        params = SamplingParams() if request is None else request.sampling_params
        self._validator.update(0, params, changes)
        return self.change(number, lambda key: self._validator.update(key, params, changes))


def checked_id(request_id: object) -> int:
    """A request's id as an integer; raises :class:`RequestError`."""
    number = as_integer(request_id)
    if number is None or number < 0:
        raise RequestError(f"request_id={request_id!r} must be an integer of at least 0")
    return number


def _abort_if_cancelled(
    commands: weakref.ref[CommandQueue], key: int, future: RequestFuture
) -> None:
    queue = commands()
    if queue is not None and future.cancelled():
        queue.submit(AbortRequest(key))
