"""Checks the commands of a recorded run: the file may be anybody's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from megatron_async.engine.commands import (
    AddRequest,
    AskedOfRequest,
    Command,
    UpdateSamplingParams,
)
from megatron_async.errors import RequestError, shown
from megatron_async.sampling_params import SamplingParams

MAX_NUMBER = 2**63 - 1
"""Keys and ids travel as 64 bits."""


class Validator(Protocol):
    """What checks one recorded request, and changes of its parameters."""

    def recorded(self, command: AddRequest) -> SamplingParams:
        """Its parameters; raises :class:`RequestError`."""

    def changed(self, params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
        """The parameters after ``changes``; raises :class:`RequestError`."""


def check_recorded(commands: Iterable[Command], validator: Validator) -> None:
    """Raises :class:`RequestError` unless an engine could have got all of these commands."""
    added: dict[int, AddRequest] = {}
    params: dict[int, SamplingParams] = {}
    for number, command in enumerate(commands):
        try:
            _check_numbers(command)
            if isinstance(command, AddRequest):
                _check_keys(command, added)
                params[command.key] = validator.recorded(command)
                added[command.key] = command
            elif isinstance(command, UpdateSamplingParams):
                before = params.get(command.key, SamplingParams())
                after = params[command.key] = validator.changed(before, command.changes)
                _check_as_checked(command.changes, after)
        except (RequestError, TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"command {number} of the run, {type(command).__name__}, cannot be repeated: "
                f"{error}"
            ) from None


def _check_as_checked(changes: dict[str, Any], after: SamplingParams) -> None:
    """What users may leave out, such as a temperature of None, no engine has recorded so."""
    for name, value in changes.items():
        if getattr(after, name) != value:
            raise RequestError(f"{name}={shown(value)} is {shown(getattr(after, name))} in a run")


def _check_numbers(command: Command) -> None:
    key = command.key if isinstance(command, AskedOfRequest) else 0
    request_id = command.request_id if isinstance(command, AddRequest) else 0
    if not 0 <= key <= MAX_NUMBER:
        raise RequestError(f"key={shown(key)} must be between 0 and {MAX_NUMBER}")
    if abs(request_id) > MAX_NUMBER:
        raise RequestError(f"request_id={shown(request_id)} must fit into 64 bits")


def _check_keys(command: AddRequest, added: dict[int, AddRequest]) -> None:
    if command.key in added:
        raise RequestError(f"key={command.key} has been used")
    if command.fork_of is None:
        return
    first = added.get(command.fork_of)
    if first is None or first.tokens != command.tokens:
        raise RequestError(
            f"fork_of={shown(command.fork_of)} is no earlier request with the same prompt"
        )
