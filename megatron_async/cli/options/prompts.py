"""Where the prompts of ``generate`` come from: the command line, text files, JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TextIO

from megatron_async.checkpoint.reading.json_file import json_fault
from megatron_async.cli.options.sampling import SAMPLING
from megatron_async.errors import ConfigError

OF_LINES = (*SAMPLING, "num_speculative_tokens")
"""What a line of a .jsonl file may set; the last is the engine's option and the most of it."""
LENGTH_FIELD = "chatgpt_output_token_length"
"""The field of megatron-core's prompt files that says how many tokens to generate."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt: text or token ids, where it was given, and what it sets for itself.

    Of two that wait, the one of lower ``priority`` goes first. ``error`` says what is wrong with
    the line; such a job is reported and not run. A null sets nothing.
    """

    source: str
    prompt: str | list[int] = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    error: str | None = None
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of a line in megatron-core's format."""


def read_jobs(
    prompts: list[str], files: list[str], *, most: int | None = None, lengths: bool = False
) -> list[Job]:
    """The jobs in the order prompts, then files; ``-`` is the standard input.

    Args:
        most: of each file; None for all.
        lengths: megatron-core's lines say how many tokens to generate.

    Raises:
        ConfigError: a file cannot be read, or there is no prompt at all.
    """
    jobs = [Job(f"--prompt {n}", prompt) for n, prompt in enumerate(prompts, 1)]
    for name in files:
        jobs += [_with_length(job) if lengths else job for job in islice(_read_file(name), most)]
    if not jobs:
        where = f"{', '.join(files)}: no prompt in it" if files else "no prompt was given"
        raise ConfigError(f"{where}; use --prompt TEXT or --prompt-file FILE")
    return jobs


def _read_file(name: str) -> Iterator[Job]:
    try:
        with _open(name) as file:
            yield from _read_lines(name, file)
    except OSError as error:
        raise ConfigError(f"--prompt-file {name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {name}: not UTF-8 text: {error}") from error


def _open(name: str) -> TextIO:
    """Text is read alike from a file and from the standard input, whatever the locale."""
    if name != "-":
        return open(name, encoding="utf-8-sig")
    if sys.stdin is None:
        raise ConfigError("--prompt-file -: the standard input is closed; redirect a file to it")
    return open(sys.stdin.fileno(), encoding="utf-8-sig", closefd=False)


def _read_lines(name: str, file: TextIO) -> Iterator[Job]:
    parse = _parse_json if name.endswith(".jsonl") else Job
    for number, line in enumerate(file, 1):
        line = line.removesuffix("\n")
        if line.strip():
            yield parse(f"{name}:{number}", line)


def _with_length(job: Job) -> Job:
    if LENGTH_FIELD not in job.megatron:
        return job
    return replace(job, sampling={**job.sampling, "max_new_tokens": job.megatron[LENGTH_FIELD]})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is none of its numbers")


def _parse_json(source: str, line: str) -> Job:
    try:
        values = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Job(source, line, error=f"not valid JSON: {json_fault(error)}")
    if isinstance(values, dict) and "prompt" not in values and isinstance(values.get("text"), str):
        # megatron-core's format: its other fields may be anything.
        known = {n: v for n, v in values.items() if n in (*SAMPLING, "priority")}
        job = _job(source, line, known | {"prompt": values["text"]})
        return replace(job, megatron={n: v for n, v in values.items() if n not in known})
    return _job(source, line, values)


def _job(source: str, line: str, values: Any) -> Job:
    if not isinstance(values, dict) or "prompt" not in values:
        return Job(source, line, error='must be an object with "prompt", or with "text"')
    prompt = values.pop("prompt")
    if not isinstance(prompt, (str, list)):
        return Job(source, line, error=f'"prompt" is {prompt!r}; give text or a list of token ids')
    priority = values.pop("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        return Job(source, prompt, error=f'"priority" is {priority!r}; give an integer')
    unknown = sorted(set(values) - set(OF_LINES))
    if unknown:
        known = ", ".join(("prompt", *OF_LINES, "priority"))
        return Job(source, prompt, error=f"unknown field {unknown[0]!r}; known are {known}")
    sampling = {name: value for name, value in values.items() if value is not None}
    return Job(source, prompt, sampling, priority)
