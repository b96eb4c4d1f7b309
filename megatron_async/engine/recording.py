"""A run as a file: the commands of an engine with the tickets at which they were applied, and what
each request got. ``megatron-async replay`` repeats it.

A file has one JSON object a line: a header, then commands and ended requests in the order in which
they happened. Since every decision depends on commands and ticket numbers, an engine at the
recorded depth that gets each command at the same point repeats the run exactly; at another depth
requests get the same tokens all the same.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_async.config import EngineConfig
from megatron_async.engine.commands import Command, from_json, to_json
from megatron_async.errors import ConfigError
from megatron_async.request import DynamicInferenceRequest
from megatron_async.step.plan import Plan

FORMAT = "megatron-async run 1"


class Recorder:
    """Writes a run as it happens; an observer of its engine.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path, config: EngineConfig, model_name: str) -> None:
        try:
            self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"record={str(path)!r} cannot be written: {error.strerror}") from None
        self._plans = 0
        self._count = 0
        header = {"format": FORMAT, "model": model_name, "config": dataclasses.asdict(config)}
        self._write(header)

    def applied(self, command: Command, next_ticket: int, retired_ticket: int) -> None:
        """A command was applied before ticket ``next_ticket`` was planned, with all up to
        ``retired_ticket`` committed."""
        self._write(
            {
                "number": self._count,
                "ticket": next_ticket,
                "retired": retired_ticket,
                **to_json(command),
            }
        )
        self._count += 1

    def on_launch(self, plan: Plan) -> None:
        """Plans go into a checksum."""
        self._plans = zlib.crc32(repr(plan).encode(), self._plans)

    def finished(self, request: DynamicInferenceRequest) -> None:
        """A request has ended."""
        self._write({"finished": Ending.of(request)._asdict(), "plans": self._plans})

    def close(self) -> None:
        """All that happened is in the file."""
        if not self._file.closed:
            self._write({"plans": self._plans})
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


class Ending(NamedTuple):
    """What a request got."""

    request_id: int
    reason: str | None
    tokens: list[int]

    @classmethod
    def of(cls, request: DynamicInferenceRequest) -> Ending:
        """Of a request that has ended."""
        reason = request.finish_reason
        return cls(
            request.request_id, None if reason is None else reason.value, request.generated_tokens
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """A command, and the point in the run at which it was applied."""

    ticket: int
    retired: int
    command: Command


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run. ``plans`` is the checksum of its plans; None if the run was cut short."""

    model_name: str
    config: EngineConfig
    applied: tuple[Applied, ...]
    endings: tuple[Ending, ...]
    plans: int | None


def read_run(path: str | Path) -> Run:
    """A run from a file.

    Raises:
        ConfigError: the file is missing, or is no recorded run.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    entries = list(_entries(path, lines))
    if not entries or entries[0].get("format") != FORMAT:
        raise ConfigError(f"{path}: not a recorded run of this version ({FORMAT})")
    applied, endings, plans = [], [], None
    try:
        header = entries[0]
        config = EngineConfig(**{**header["config"], "record": None})
        for entry in entries[1:]:
            plans = None
            if "finished" in entry:
                endings.append(Ending(**entry["finished"]))
            elif "command" in entry:
                ticket, retired = entry.pop("ticket"), entry.pop("retired")
                del entry["number"]
                applied.append(Applied(ticket, retired, from_json(entry)))
            else:
                plans = entry["plans"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a recorded run: {error}") from None
    return Run(header["model"], config, tuple(applied), tuple(endings), plans)


def _entries(path: str | Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):
                return  # the run ended in the midst of it
            raise ConfigError(f"{path}:{number}: not a line of JSON") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object")
        yield entry
