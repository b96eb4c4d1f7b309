"""What ``bench`` says while it runs, and how it goes on when one measurement fails."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from megatron_async.cli.options.options import PROGRAM
from megatron_async.cli.output.progress import progress_bar
from megatron_async.device.memory import is_out_of_memory
from megatron_async.errors import CacheTooLargeError, ConfigError, MegatronAsyncError


class Progress:
    """A bar on a terminal; elsewhere a line for each measurement that has ended, so that a run
    which is cut off shows how far it came. ``keep`` is called with every new row."""

    def __init__(self, keep: Callable[[], None]) -> None:
        self.bar = progress_bar(total=0)
        self.keep = keep
        self.failures = 0

    def done(self, what: str | None = None) -> None:
        """One measurement has ended; ``what`` is its line."""
        self.bar.update()
        if what is not None and self.bar.disable:
            print(f"bench: {what}", file=sys.stderr, flush=True)

    def failed(self, what: str, error: BaseException, *, lower: str) -> str:
        """Say on stderr that ``what`` failed, and return the reason in one line.

        Raises:
            ConfigError: that is what ``error`` is: bad input, not a failed measurement.
        """
        if isinstance(error, ConfigError) and not isinstance(error, CacheTooLargeError):
            raise error
        self.failures += 1
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        if isinstance(error, CacheTooLargeError) or is_out_of_memory(error):
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


@contextmanager
def loud_ends() -> Iterator[None]:
    """A crash of native code prints where it happened, and SIGTERM ends with what was found."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(file=sys.__stderr__)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
