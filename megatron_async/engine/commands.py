"""What users ask of an engine, as frozen data that is applied in order before a plan.

Commands are numbered as they are applied, and can be written as JSON and read back: to record and
replay a run, and to send it to the other ranks of a parallel group.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from megatron_async.engine.waiters import Waiters
from megatron_async.errors import RequestError
from megatron_async.step.slot_fields import Values


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Queue a request. ``key`` is the scheduler's own number of it, ``values`` are those of the
    REQUEST slot fields, ``params`` the sampling parameters as they were given. ``extras`` has the
    fields of :class:`~megatron_async.step.extras.Extras`, None for none; ``prompt_log_probs``: the
    prompt's are wanted; ``fork_of``: the key of a request with the same prompt, whose prefill it
    shares."""

    key: int
    request_id: int
    prompt: str | None
    tokens: tuple[int, ...]
    max_new: int
    stop_ids: tuple[int, ...]
    values: Values
    priority: int
    params: dict[str, Any]
    extras: tuple[Any, ...] | None = None
    prompt_log_probs: bool = False
    fork_of: int | None = None


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request; its tokens in flight are discarded."""

    key: int


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """Leave a request out of the steps to come."""

    key: int


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Let a paused request go on."""

    key: int


@dataclass(frozen=True, slots=True)
class EvictRequest:
    """Free the memory of a request; it is computed again when there is room."""

    key: int


@dataclass(frozen=True, slots=True)
class UpdateSamplingParams:
    """Change sampling parameters of a request, from the next launch on."""

    key: int
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Suspend:
    """Commit what is in flight, and launch nothing until :class:`Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after :class:`Suspend`."""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Commit what is in flight and replace the weights. ``source`` is a path, or None for weights
    that were given in memory: such a run cannot be replayed beyond this point. ``restart``: running
    requests begin again behind their prompts."""

    source: str | None
    recompute_kv_cache: bool
    restart: bool = False


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prefixes."""


@dataclass(frozen=True, slots=True)
class Reset:
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

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        AddRequest,
        AbortRequest,
        PauseRequest,
        ResumeRequest,
        EvictRequest,
        UpdateSamplingParams,
        Suspend,
        Resume,
        UpdateWeights,
        ResetPrefixCache,
        Reset,
    )
}


def to_json(command: Command) -> dict[str, Any]:
    """A command as plain JSON types; floats are exact."""
    fields = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    return {"command": type(command).__name__, **fields}


def from_json(data: Any) -> Command:
    """The inverse of :func:`to_json`, after a way through JSON text.

    Raises:
        RequestError: it is not a command.
    """
    kind = _KINDS.get(str(data.get("command"))) if isinstance(data, dict) else None
    if kind is None:
        raise RequestError(f"{json.dumps(data)[:80]} is not a command")
    names = {f.name for f in dataclasses.fields(kind)}
    given = {name for name in data if name != "command"}
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    if not needed <= given <= names:
        raise RequestError(f"a command {data['command']} has the fields {sorted(names)}")
    command: Command = kind(**{name: _frozen(data[name]) for name in given})
    return command


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


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
        self.waiters.wake()

    def take(self) -> Command | None:
        """The oldest command; None if there is none."""
        try:
            return self.waiting.popleft()
        except IndexError:
            return None
