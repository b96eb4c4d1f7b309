"""The console script ``megatron-async``: parses arguments, runs a command, reports errors.

Exit status: 0 success, 1 a comparison failed, 2 bad input or output that cannot be written (one
line on stderr), 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from megatron_async.benchmark import command as bench
from megatron_async.cli import chat, demo, generate, info, replay, serve, tune
from megatron_async.cli.options.megatron_flags import warn_of_ignored
from megatron_async.cli.options.options import (
    PROGRAM,
    OneLineErrorParser,
    followed_rank,
    name_options,
)
from megatron_async.errors import ConfigError, MegatronAsyncError, legible
from megatron_async.trace import command as trace
from megatron_async.verify import command as verify
from megatron_async.version import __version__

COMMANDS = (generate, chat, serve, verify, replay, demo, info, bench, trace, tune)
"""Each module has ``add_command``, which adds a parser and sets ``run`` in it."""

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_DESCRIPTION = """\
Generate text with megatron-core models. With asynchronous scheduling the next step is already
queued on the device while the host still does the bookkeeping of the last one; the tokens are
the same as with serial decoding.
"""

_EXAMPLES = """\
examples:
  megatron-async demo
  megatron-async generate --prompt "def fibonacci(n):" --inference-async-scheduling
  megatron-async generate --model PATH --prompt-file prompts.txt --depth 2 --json > out.jsonl
  megatron-async verify --depths 0,1,2,4
  megatron-async serve --model PATH --inference-async-scheduling --port 5000
"""


def build_parser() -> OneLineErrorParser:
    """The parser of the whole command line."""
    parser = OneLineErrorParser(prog=PROGRAM, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if sys.stderr is None:  # closed by our parent: nobody wants to hear
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    parser = build_parser()
    args, further = parser.parse_known_args(argv)
    if further and not getattr(args, "takes_megatron_flags", False):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    try:
        if further:
            warn_of_ignored(parser, further)
        _prepare_stdout()
        if followed_rank(args):
            return 0
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except MegatronAsyncError as error:
        print(f"{PROGRAM}: error: {legible(name_options(str(error)))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has gone
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            said = "more files were to be opened than may be; raise the limit (ulimit -n)"
            print(f"{PROGRAM}: error: {said}", file=sys.stderr)
            return EXIT_BAD_INPUT
        # The error is of a file that was opened by name, or of a library: no stream, but a bug.
        if error.filename is not None or error.errno is None:
            raise
        _drop_stdout()
        said = f"the standard output cannot be written: {error.strerror}"
        print(f"{PROGRAM}: error: {said}; redirect it to another place", file=sys.stderr)
        return EXIT_BAD_INPUT


def _prepare_stdout() -> None:
    """Show what the terminal's encoding lacks as escapes, as stderr does.

    Raises:
        ConfigError: there is no standard output.
    """
    if sys.stdout is None:
        raise ConfigError("the standard output is closed; redirect it to a file or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
