"""What users ask of an engine, as frozen data that is applied in order before a plan.

Commands are numbered as they are applied, and can be written as JSON and read back: to record and
replay a run.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import msgspec

from megatron_async.codec import from_plain, to_plain
from megatron_async.engine.stepping.waiters import Waiters
from megatron_async.errors import RequestError
from megatron_async.sampling_params import CheckedParams
from megatron_async.step.extras import Extras
from megatron_async.step.slot_fields import Values


class Asked(msgspec.Struct, frozen=True, tag=True, tag_field="command", forbid_unknown_fields=True):
    """What a user asks."""


class AskedOfRequest(Asked, frozen=True):
    """What a user asks of one request. ``key`` is the scheduler's own number of it."""

    key: int


class AddRequest(AskedOfRequest, frozen=True):
    """Queue a request. ``values`` are those of the REQUEST slot fields, ``params`` the parameters
    that they are from. ``extras`` is None for none; ``prompt_log_probs``: the prompt's are wanted;
    ``fork_of``: the key of a request with the same prompt, whose prefill it shares; ``automaton``:
    a token automaton guides it, since its grammar had a table when it was added. None is of
    requests without a grammar, of engines without automata, and of runs that were recorded when
    each table was made with its request."""

    request_id: int
    prompt: str | None
    tokens: tuple[int, ...]
    max_new: int
    stop_ids: tuple[int, ...]
    values: Values
    priority: int
    params: CheckedParams
    extras: Extras | None = None
    prompt_log_probs: bool = False
    fork_of: int | None = None
    automaton: bool | None = None


class AbortRequest(AskedOfRequest, frozen=True):
    """End a request; its tokens in flight are discarded."""


class PauseRequest(AskedOfRequest, frozen=True):
    """Leave a request out of the steps to come."""


class ResumeRequest(AskedOfRequest, frozen=True):
    """Let a paused request go on."""


class EvictRequest(AskedOfRequest, frozen=True):
    """Free the memory of a request; it is computed again when there is room."""


class UpdateSamplingParams(AskedOfRequest, frozen=True):
    """Change sampling parameters of a request, from the next launch on."""

    changes: dict[str, Any]


class Suspend(Asked, frozen=True):
    """Commit what is in flight, and launch nothing until :class:`Resume`."""


class Resume(Asked, frozen=True):
    """Go on after :class:`Suspend`."""


class UpdateWeights(Asked, frozen=True):
    """Commit what is in flight and replace the weights. ``source`` is a path, or None for weights
    that were given in memory: such a run cannot be replayed beyond this point. ``restart``: running
    requests begin again behind their prompts."""

    source: str | None
    recompute_kv_cache: bool
    restart: bool = False


class ResetPrefixCache(Asked, frozen=True):
    """Forget all cached prefixes."""


class Reset(Asked, frozen=True):
    """Abort every request and commit what is in flight."""


Command = (
    AddRequest
    | AbortRequest
    | PauseRequest
    | ResumeRequest
    | EvictRequest
    | UpdateSamplingParams
    | Suspend
    | Resume
    | UpdateWeights
    | ResetPrefixCache
    | Reset
)


def to_json(command: Command) -> dict[str, Any]:
    """A command as plain JSON types; floats are exact."""
    data: dict[str, Any] = to_plain(command)
    if isinstance(command, AddRequest):
        data["params"] = command.params.serialize()
        if command.automaton is None:  # as it was recorded before there were any
            del data["automaton"]
    return data


def from_json(data: Any) -> Command:
    """The inverse of :func:`to_json`, after a way through JSON text.

    Raises:
        RequestError: it is not a command.
    """
    try:
        if isinstance(data, dict) and isinstance(params := data.get("params"), dict):
            nothing: dict[str, Any] = {"given": ()}
            command: Command = from_plain({**data, "params": nothing}, Command)
            checked = CheckedParams.deserialize(params)
            return msgspec.structs.replace(command, params=checked)  # type: ignore[no-any-return]
        command = from_plain(data, Command)
    except ValueError as error:
        raise RequestError(f"{json.dumps(data)[:80]} is not a command: {error}") from None
    return command


class CommandQueue:
    """Commands on their way to the loop, from any thread.

    Attributes:
        waiting: those that are still to be taken, for a look without a call.
        waiters: threads that wait until the loop may have something to do; each command wakes them.
    """

    def __init__(self) -> None:
        self.waiting: deque[Command] = deque()
        self.waiters = Waiters()

    def submit(self, *commands: Command) -> None:
        """Queue commands, one behind the other. Atomic: a signal's handler may call it in the midst
        of another call."""
        self.waiting.extend(commands)
        if self.waiters.waiting:
            self.waiters.wake()

    def take(self) -> Command | None:
        """The oldest command; None if there is none."""
        try:
            return self.waiting.popleft()
        except IndexError:
            return None
