"""Where requests come in and are changed, from any thread, while others step the engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_async.engine.api_style import OUR_STYLE, ApiStyle
from megatron_async.engine.commands import AbortRequest, AddRequest, Command, CommandQueue
from megatron_async.engine.requests.guidance import Guidance
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.engine.requests.recorded_requests import MAX_NUMBER
from megatron_async.engine.requests.request_validation import RequestValidator
from megatron_async.engine.requests.siblings import Siblings, sibling_of
from megatron_async.engine.step_lock import StepLock
from megatron_async.errors import RequestError, RequestTooLongError, shown
from megatron_async.request.parameter_checks import as_integer
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture, TokenIds
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.step.slot_fields import seed_of

Prompt = str | list[int] | torch.Tensor


class RequestQueue:
    """Makes commands of what users ask about requests. Nothing here takes a lock, so a signal's
    handler may call it in the midst of anything.

    The first of several sequences has the request's id. The others have negative ids, which no
    user may choose; what is asked about the request is asked about all of its sequences.

    Args:
        style: what becomes of requests that are too long.
    """

    def __init__(
        self,
        commands: CommandQueue,
        outputs: OutputProcessor,
        guidance: Guidance,
        validator: RequestValidator,
        lock: StepLock,
        *,
        style: ApiStyle = OUR_STYLE,
    ) -> None:
        self._fails_long_requests = style.fails_long_requests
        self._guidance = guidance
        self._commands = commands
        self._outputs = outputs
        self._validator = validator
        self._lock = lock
        self._keys = itertools.count()
        self._request_ids = itertools.count()
        self._sibling_ids = itertools.count(-1, -1)
        self._siblings: dict[int, Siblings] = {}
        """By request id, until all have ended."""

    async def compile_grammar(self, sampling_params: SamplingParams | None) -> None:
        """Compile in another thread what :meth:`add` then finds compiled: the event loop goes on.

        Raises:
            RequestError: it cannot be compiled.
        """
        if getattr(sampling_params, "structured_outputs", None) is not None:
            await asyncio.to_thread(self._validator.compile_grammar, sampling_params)

    def compile_now(self, params: CheckedParams) -> None:
        """Compile in this thread what :meth:`add` then finds compiled, from any thread.

        Raises:
            RequestError: it cannot be compiled.
        """
        if params["structured_outputs"] is not None:
            self._validator.compile_grammar(params.params())

    def add(
        self,
        request_id: int | None,
        prompt: Prompt,
        sampling_params: SamplingParams | CheckedParams | None,
        priority: object = 0,
        opened: Callable[[int, DynamicInferenceRequest], None] | None = None,
    ) -> tuple[int, RequestFuture]:
        """Queue a request; without an id a free one is taken. ``opened`` gets its key and its
        record before any step can see it; what it raises takes the request back.

        Returns:
            The scheduler's key, and the future of the finished request.

        Raises:
            RequestError: the request cannot be served.
            EngineStoppedError: the engine has stopped.
        """
        while True:
            number = next(self._request_ids) if request_id is None else request_id
            if number < 0:
                raise RequestError(f"request_id={number} must be an integer of at least 0")
            if number in self._outputs.keys or number in self._siblings:
                if request_id is None:
                    continue
                raise RequestError(f"request_id={number} is in use; choose another")
            key = next(self._keys)
            try:
                command, params = self._validator.add(
                    key, number, prompt, sampling_params, priority
                )
            except RequestTooLongError as error:
                if opened is not None or not self._fails_long_requests:
                    raise
                return key, self._fail(number, prompt, sampling_params, error)
            if self._lock.stopped is not None:
                self._lock.check()
            sampled = params.for_ranking() if params.num_sequences > 1 else params
            seed = self._validator.seed(number, params.seed)
            request = _record(command, sampled, seed)
            if command.extras is not None:
                command = self._guidance.decided(command, params)
            future = self._open(command, request)
            if future is not None:
                break
        commands = [command]
        try:
            if params.num_sequences > 1:
                future = self._add_siblings(commands, request, future, params)
            if opened is not None:
                opened(key, request)
            self._commands.submit(*commands)
        except BaseException:  # of a signal
            for each in commands:
                self._outputs.drop(each.key, each.request_id)
            self._guidance.close(each.key for each in commands)
            self._siblings.pop(number, None)
            raise
        # A caller that keeps a future does not keep the engine.
        keys = (key,) if len(commands) == 1 else tuple(each.key for each in commands)
        abort = functools.partial(_abort_if_cancelled, weakref.ref(self._commands), keys)
        future.when_done(abort)
        if self._lock.stopped is not None:  # meanwhile
            self._outputs.fail(self._lock.stopped)
            self._outputs.resolve_futures()
        return key, future

    def _fail(
        self,
        number: int,
        prompt: Prompt,
        sampling_params: SamplingParams | CheckedParams | None,
        error: RequestTooLongError,
    ) -> RequestFuture:
        """Hand out a request that no step will see."""
        self._lock.check()
        _, params = self._validator.checked(sampling_params)
        text, tokens = self._validator.tokens(prompt, params)
        request = DynamicInferenceRequest(
            request_id=number, prompt=text, prompt_tokens=TokenIds(tokens), sampling_params=params
        )
        return self._outputs.refuse(request, error)

    def _open(self, command: AddRequest, request: DynamicInferenceRequest) -> RequestFuture | None:
        """Start the record of a request, and what guides it; None if its id is in use."""
        future = self._outputs.open(command.key, request, command.stop_ids)
        if future is not None and command.extras is not None:
            watcher = self._guidance.open(command, request)
            if watcher is not None:
                self._outputs.ends.watch(command.key, watcher)
        return future

    def _add_siblings(
        self,
        commands: list[AddRequest],
        first: DynamicInferenceRequest,
        future: RequestFuture,
        params: SamplingParams,
    ) -> RequestFuture:
        """Open the further sequences of a request and append their commands to that of the first
        one; returns the future of all."""
        requests, futures = [first], [future]
        seed = seed_of(commands[0].values)
        while len(requests) < params.num_sequences:
            key, number = next(self._keys), next(self._sibling_ids)
            command, own = sibling_of(
                commands[0],
                first.sampling_params,
                self._validator,
                len(requests),
                key,
                number,
                seed,
            )
            commands.append(command)
            assert own.seed is not None
            request = _record(command, own, own.seed)
            opened = self._open(command, request)
            if opened is None:  # of a replayed run
                commands.pop()
                continue
            requests.append(request)
            futures.append(opened)
        keys = tuple(command.key for command in commands)
        siblings = Siblings(params, requests, futures, keys)
        self._siblings[first.request_id] = siblings
        forget = functools.partial(_forget, self._siblings, first.request_id)
        siblings.future.when_done(forget)
        return siblings.future

    def check_replay(self, commands: Iterable[Command]) -> None:
        """Raises ConfigError where :meth:`replay` of all of these could not be trusted."""
        self._validator.check_replay(commands)

    def replay(self, command: Command) -> None:
        """Queue a recorded command."""
        if isinstance(command, AddRequest):
            params = command.params.params().checked()
            request = _record(command, params, seed_of(command.values))
            if self._open(command, request) is None:
                raise RequestError(f"request_id={command.request_id} is in use")
        self._commands.submit(command)

    def abort(self, key: int) -> None:
        """End the request with this key, if it has not ended."""
        if self._outputs.knows(key):
            self._commands.submit(AbortRequest(key))

    def change(self, request_id: int, command: Callable[[int], Command]) -> bool:
        """Queue the command that ``command`` makes of the request's key, for each of its sequences;
        False when the request is not known or has ended, as all have in a stopped engine."""
        return self._change(checked_id(request_id), lambda index, key: command(key))

    def _change(self, request_id: int, command: Callable[[int, int], Command]) -> bool:
        """Do as :meth:`change` does; ``command`` gets the sequence's index too."""
        if self._lock.stopped is not None:
            return False
        siblings = self._siblings.get(request_id)
        keys = (self._outputs.key_of(request_id),) if siblings is None else siblings.keys
        commands = [
            command(index, key)
            for index, key in enumerate(keys)
            if key is not None and self._outputs.is_live(key)
        ]
        self._commands.submit(*commands)
        return bool(commands)

    def update_sampling_params(self, request_id: int, changes: dict[str, Any]) -> bool:
        """Queue new sampling parameters; returns as :meth:`change`.

        Raises:
            RequestError: one of them cannot be changed, or has a wrong value.
        """
        number = checked_id(request_id)
        siblings = self._siblings.get(number)
        request = self._outputs.request(number) if siblings is None else siblings.first
        params = SamplingParams() if request is None else request.sampling_params
        checked = self._validator.update(0, params, changes).changes

        def command(index: int, key: int) -> Command:
            if index == 0 or siblings is None:
                return self._validator.update(key, params, changes)
            seed = self._validator.seed(number, checked.get("seed"))
            return self._validator.update(key, params, siblings.changes_of(index, changes, seed))

        return self._change(number, command)


def checked_id(request_id: object) -> int:
    """A request's id as an integer; raises :class:`RequestError`."""
    number = as_integer(request_id)
    if number is None:
        raise RequestError(f"request_id={shown(request_id)} must be an integer")
    if abs(number) > MAX_NUMBER:
        raise RequestError(f"request_id={shown(number)} must fit into 64 bits")
    return number


def _record(command: AddRequest, params: SamplingParams, seed: int) -> DynamicInferenceRequest:
    prompt = len(command.tokens) - len(params.forced_token_ids or ())
    return DynamicInferenceRequest(
        request_id=command.request_id,
        prompt=command.prompt,
        prompt_tokens=TokenIds(command.tokens[:prompt]),
        sampling_params=params,
        seed=seed,
    )


def _forget(siblings: dict[int, Siblings], request_id: int, future: RequestFuture) -> None:
    siblings.pop(request_id, None)


def _abort_if_cancelled(
    commands: weakref.ref[CommandQueue], keys: tuple[int, ...], future: RequestFuture
) -> None:
    queue = commands()
    if queue is not None and future.cancelled():
        queue.submit(*map(AbortRequest, keys))
