"""What ``bench`` has in common for all loads: progress, failures that leave the rest, rows."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from megatron_async.errors import CacheTooLargeError, ConfigError, MegatronAsyncError

from ..cli.options import PROGRAM
from ..cli.progress import progress_bar
from .engines import Started, close_engines
from .loads import Request
from .model import BenchmarkModel


class Terminated(KeyboardInterrupt):
    """The process was asked to end."""


class Progress:
    """A bar on a terminal; elsewhere a line for each measurement that has ended, so that a run
    which is cut off shows how far it came. ``keep`` is called with every new row."""

    def __init__(self, keep: Callable[[], None]) -> None:
        self._bar = progress_bar(total=0)
        self.keep = keep
        self.failures = 0

    def expect(self, measurements: int) -> None:
        """So many more are to come."""
        self._bar.total += measurements

    def describe(self, what: str) -> None:
        """What is being measured now."""
        self._bar.set_description(what)

    def done(self, what: str | None = None) -> None:
        """One measurement has ended; ``what`` is its line."""
        self._bar.update()
        if what is not None and self._bar.disable:
            print(f"bench: {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def failed(self, what: str, error: BaseException, *, lower: str) -> str:
        """Say on stderr that ``what`` failed, and return the reason in one line.

        Raises:
            ConfigError: that is what ``error`` is: bad input, not a failed measurement.
        """
        if isinstance(error, ConfigError) and not isinstance(error, CacheTooLargeError):
            raise error
        self.failures += 1
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        if _is_out_of_memory(error):
            reason = f"out of memory; lower {lower}"
        elif not isinstance(error, MegatronAsyncError):
            reason = f"{type(error).__name__}: {reason}"
            traceback.print_exception(error, file=sys.stderr)
        # The frames hold the engine, and with it the memory that the next one needs.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        with tqdm.external_write_mode(file=sys.stderr):
            print(f"{PROGRAM}: error: {what}: {reason}", file=sys.stderr, flush=True)
        return reason


def _is_out_of_memory(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | CacheTooLargeError) or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate" in said)
    )


class Benchmark(ABC):
    """Measures a load at several depths; ``results`` grows row by row.

    Attributes:
        advice: options to lower where memory runs out.
        case: what rows have in common that are compared with each other.
        figure: of a row, by which it is compared.
    """

    advice: ClassVar[str]
    case: ClassVar[str]
    figure: ClassVar[str]

    def __init__(self, model: BenchmarkModel, args: argparse.Namespace, progress: Progress) -> None:
        self.results: list[dict[str, Any]] = []
        self.model = model
        self.args = args
        self.progress = progress
        on_gpu = model.device.type == "cuda"
        self.marks = on_gpu if args.events is None else bool(args.events)
        self.profiles = bool(args.profile and on_gpu)

    @property
    @abstractmethod
    def measurements(self) -> int:
        """How many there will be."""

    @abstractmethod
    def run(self) -> None:
        """Measure all; what fails gets a row that says so."""

    @abstractmethod
    def batches(self) -> list[list[Request]]:
        """What was decoded, for the baselines: each with as many tokens as it generated."""

    @contextmanager
    def engines(self, what: str, *rows: dict[str, Any]) -> Iterator[list[Started]]:
        """A list for engines, which are closed at the end. What fails with them is said, and each
        of ``rows`` goes to the results with the reason."""
        made: list[Started] = []
        try:
            yield made
        except Exception as error:
            reason = self.progress.failed(what, error, lower=self.advice)
            self.results += [{**row, "error": reason} for row in rows]
        finally:
            close_engines(made)
            self.progress.keep()

    def good_rows(self) -> list[dict[str, Any]]:
        """Those that did not fail."""
        return [row for row in self.results if "error" not in row]

    def add_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take results up, and fill in how many times faster than depth 0 each row is, where depth
        0 was measured."""
        self.results += rows
        good = self.good_rows()
        serial = {row[self.case]: row[self.figure] for row in good if row["depth"] == 0}
        for row in good:
            if row[self.case] in serial:
                row["speedup_over_serial"] = serial[row[self.case]] / row[self.figure]
        self.progress.keep()


@contextmanager
def loud_ends() -> Iterator[None]:
    """A crash of native code prints where it happened, and SIGTERM ends with what was found."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(file=sys.__stderr__)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
