"""``python -m megatron_async`` is the console script ``megatron-async``.

All that is imported before the handler of Ctrl-C is there are parts of the interpreter. The rest
takes seconds.
"""

from __future__ import annotations

import _signal  # `signal` without its enumerations, which take milliseconds
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

EXIT_INTERRUPTED = 130
_IMPORTING = "<frozen importlib._bootstrap>"


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End at once while modules are imported: their code may swallow an exception, or turn it into
    another one. Raise KeyboardInterrupt, as Python does, at any other time."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> NoReturn:
    try:
        sys.stdout.flush()
        os.write(2, b"\nmegatron-async: interrupted\n")
    except (OSError, ValueError, AttributeError):  # closed by our parent process
        pass
    os._exit(EXIT_INTERRUPTED)


def main() -> int:
    """Run the command line and return its exit status."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _interrupted)
    try:
        from megatron_async.processes.garbage import expect_imports

        expect_imports()
        from megatron_async.cli.main import main as run

        status: int = run()
    except KeyboardInterrupt:  # while the parser was built: the command itself has its own handler
        _end()
    return status


if __name__ == "__main__":
    sys.exit(main())
