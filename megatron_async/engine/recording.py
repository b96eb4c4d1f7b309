"""A run as a file: the commands of an engine with the tickets at which they were applied, and what
each request got. ``megatron-async replay`` repeats it.

A file has one JSON object a line: a header, then commands and ended requests in the order in which
they happened. Since every decision depends on commands and ticket numbers, an engine at the
recorded depth that gets each command at the same point repeats the run exactly; at another depth
requests get the same tokens all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.codec import from_plain, to_plain
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.commands import (
    AddRequest,
    AskedOfRequest,
    Command,
    from_json,
    to_json,
)
from megatron_async.engine.recorded_config import config_of_run
from megatron_async.errors import ConfigError, shown
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan

logger = logging.getLogger(__name__)

FORMAT = "megatron-async run 1"

Entry = dict[str, Any]


class Recorder:
    """Gives a run to ``write`` as it happens; an observer of its engine."""

    def __init__(self, write: Callable[[Entry], None]) -> None:
        self._write = write
        self._plans = 0
        self._count = 0

    def applied(self, command: Command, step: int, scheduler: Scheduler) -> None:
        """A command was applied when the engine had run ``step`` steps."""
        point = Point(self._count, step, scheduler.next_ticket, scheduler.retired_ticket)
        self._write({**to_plain(point), **to_json(command)})
        self._count += 1

    def on_launch(self, plan: Plan) -> None:
        """Plans go into a checksum, which says where two runs part."""
        self._plans = zlib.crc32(repr(plan).encode(), self._plans)

    def finished(self, request: DynamicInferenceRequest) -> None:
        """A request has ended."""
        reason = request.finish_reason
        ending = Ending(
            request.request_id,
            None if reason is None else reason.value,
            list(request.generated_tokens),
        )
        self._write({"finished": to_plain(ending), "plans": self._plans})


class RunFile:
    """A file to record a run in. When it cannot be written any more, recording stops with one
    warning, and the run goes on.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        try:
            self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"record={str(path)!r} cannot be written: {error.strerror}") from None

    def begin(self, config: EngineConfig, model_name: str) -> None:
        """Write the header."""
        config_entry = {**dataclasses.asdict(config), "record": None, "kv_events_config": None}
        self.write({"format": FORMAT, "model": model_name, "config": config_entry})

    def write(self, entry: Entry) -> None:
        """One more entry; it is in the file if the process dies after this."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            said = "record=%r cannot be written any more: %s; the run goes on, and is not recorded"
            logger.warning(said, self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Write no more entries."""
        with contextlib.suppress(OSError):  # of what could not be written
            self._file.close()


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Point(msgspec.Struct, frozen=True):
    """Where in a run the command ``number`` was applied."""

    number: Count
    step: Count
    ticket: Count
    retired: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request got."""

    request_id: int
    reason: str | None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Applied:
    """A command, and the point in the run at which it was applied: ``endings`` requests had ended
    by then. A command to one of them had no effect."""

    step: int
    ticket: int
    command: Command
    endings: int
    has_effect: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run; ``entries`` are all lines behind the header."""

    model_name: str
    config: EngineConfig
    applied: tuple[Applied, ...]
    endings: tuple[Ending, ...]
    entries: tuple[Entry, ...]

    def sequences(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompt and generated tokens of each request that has ended, in the order of
        ``endings``: for an engine with other weights to :meth:`~.DynamicInferenceEngine.score`.

        Raises:
            ConfigError: a request ended that was not added.
        """
        prompts: dict[int, tuple[int, ...]] = {}
        found, commands = [], list(self.applied)[::-1]
        for number, ending in enumerate(self.endings):
            while commands and commands[-1].endings <= number:
                command = commands.pop().command
                if isinstance(command, AddRequest):
                    forced = len(command.params["forced_token_ids"] or ())
                    prompts[command.request_id] = command.tokens[: len(command.tokens) - forced]
            if ending.request_id not in prompts:
                raise ConfigError(f"request_id={ending.request_id} ended and was not added")
            found.append((prompts[ending.request_id], tuple(ending.tokens)))
        return found


def read_run(path: str | Path) -> Run:
    """A run from a file.

    Raises:
        ConfigError: the file is missing, or is no recorded run.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path={shown(path)} must be the path of a recorded run")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(str(path))}: cannot be read: {one_line(error)[:200]}") from None
    header, *entries = list(_entries(path, lines)) or [{}]
    if header.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a recorded run of this version ({FORMAT})")
    try:
        config = config_of_run(header["config"])
        if not isinstance(name := header["model"], str):
            raise ConfigError(f"model={shown(name)} must be a name")
        endings = tuple(from_plain(e["finished"], Ending) for e in entries if "finished" in e)
        applied = tuple(_applied(entries))
    except KeyError as error:
        raise ConfigError(f"{path}: not a recorded run: {error} is missing") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: not a recorded run: {error}") from None
    return Run(name, config, applied, endings, tuple(entries))


def _applied(entries: list[Entry]) -> Iterator[Applied]:
    """The commands of a run."""
    live: dict[int, int] = {}
    """Keys of the requests that have not ended, by their ids."""
    keys: set[int] = set()
    endings = 0
    for entry in entries:
        if "finished" in entry:
            endings += 1
            keys.discard(live.pop(entry["finished"]["request_id"], -1))
        if "command" not in entry:
            continue
        point: Point = from_plain(entry, Point)
        command = from_json({k: v for k, v in entry.items() if k not in Point.__struct_fields__})
        if isinstance(command, AddRequest):
            live[command.request_id] = command.key
            keys.add(command.key)
        has_effect = not isinstance(command, AskedOfRequest) or command.key in keys
        yield Applied(point.step, point.ticket, command, endings, has_effect)


def _entries(path: str | Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError):
            if number == len(lines):
                return  # the run ended in the midst of it
            raise ConfigError(f"{path}:{number}: not a line of JSON") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object")
        yield entry


def _refuse(constant: str) -> None:
    """NaN and infinities are no JSON, and no recorder writes any."""
    raise ValueError(constant)
