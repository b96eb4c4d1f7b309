"""The console script ``megatron-async``: parses arguments, runs a command, reports errors.

Exit status: 0 success, 1 a comparison failed, 2 bad input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_async.errors import MegatronAsyncError
from megatron_async.version import __version__

from . import bench, demo, generate, info, trace, verify
from .options import PROGRAM, OneLineErrorParser, name_options

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
"""


def build_parser() -> OneLineErrorParser:
    """The parser of the whole command line; each command sets ``run``."""
    parser = OneLineErrorParser(prog=PROGRAM, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (generate, verify, demo, info, bench, trace):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except MegatronAsyncError as error:
        print(f"{PROGRAM}: error: {name_options(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
