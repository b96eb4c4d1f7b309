"""What options make of their texts: types of argparse, whose errors say what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_async.checkpoint.reading.json_file import json_fault
from megatron_async.request.parameter_ranges import INTEGERS, NUMBERS
from megatron_async.sampling_params import LOG_PROBS_MODES


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Converts an argument to an integer in a range."""
    bounds = f"of at least {low}" if high is None else f"between {low} and {high}"

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if low <= int(text) <= (math.inf if high is None else high):
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer {bounds}")

    return convert


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Converts an argument to a finite number in a range; ``above`` excludes ``low``."""
    bounds = f"above {low:g}" if above else f"of at least {low:g}"
    bounds += "" if math.isinf(high) else f" and at most {high:g}"

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            if low <= value <= high and math.isfinite(value) and not (above and value == low):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} must be a number {bounds}")

    return convert


def mebibytes(text: str) -> int:
    """Converts MiB to bytes."""
    return integer(0, 1 << 16)(text) << 20


def in_range(parameter: str) -> Callable[[str], Any]:
    """Converts an argument to a value of a sampling parameter's range."""
    if parameter in NUMBERS:
        return number(*NUMBERS[parameter])
    return integer(*INTEGERS[parameter])


def graph_count(text: str) -> int | None:
    """Converts megatron-core's number of graphs: -1 is all."""
    return None if text == "-1" else integer(1)(text)


def asynchronous(text: str) -> bool:
    """Converts megatron-core's scheduling mode."""
    if text not in ("legacy", "async"):
        raise argparse.ArgumentTypeError(f"{text!r} must be legacy or async")
    return text == "async"


def several(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Converts an argument to a list, from parts between commas; a value stands in it once."""
    return lambda text: list(dict.fromkeys(convert(part) for part in text.split(",")))


def id_and_bias(text: str) -> tuple[str, float]:
    """Converts an argument ID=X."""
    token, bias = text.split("=")
    return token, float(bias)


def log_probs_mode(text: str) -> str:
    """Converts megatron-core's word for it to ours."""
    if text not in LOG_PROBS_MODES:
        raise argparse.ArgumentTypeError(f"{text!r} must be {' or '.join(LOG_PROBS_MODES)}")
    return LOG_PROBS_MODES[text]


def contents(name: str) -> str:
    """Converts the name of a file to what is in it; a JSON object stands for itself."""
    try:
        return name if name.lstrip().startswith("{") else Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be read: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    """Converts an argument in JSON to an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


SEED = in_range("seed")
