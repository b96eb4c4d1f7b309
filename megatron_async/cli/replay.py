"""``megatron-async replay``: a recorded run, once more."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from megatron_async.checkpoint.path import EMBEDDED, RANDOM
from megatron_async.cli.options.options import (
    PARALLEL_SIZES,
    add_model_options,
    add_parallel_options,
    load_engine,
)
from megatron_async.cli.options.values import integer
from megatron_async.errors import ConfigError

if TYPE_CHECKING:
    from megatron_async.engine.recording import Run

EXIT_DIFFERENT = 1

_DESCRIPTION = """\
Repeat a run that `generate --record FILE` or EngineConfig(record=FILE) has written: each command at
the step at which it was applied. At the recorded depth everything must be as it was, plan by plan;
at another depth all requests must get the same tokens that were not aborted, and got no new weights
or sampling parameters while they ran. In 16 bits on a GPU, and after evictions or prefix hits, that
holds at another depth only up to near ties of logits, unless the run was recorded with
--batch-invariant.

The exit status is 0 when it is so, and 1 when the runs differ.
"""


def add_command(commands: Any) -> None:
    """Add ``replay`` to the command line."""
    said = "repeat a recorded run"
    parser = commands.add_parser("replay", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("file", metavar="FILE", help="what --record wrote")
    said = "steps in flight; 0 is serial (default: the recorded one)"
    parser.add_argument("--depth", type=integer(0), metavar="N", help=said)
    said = "read draft models, tokenizers and weights from the paths that FILE names; those of a "
    said += "file from somebody else may be any of yours"
    parser.add_argument("--trust-paths", action="store_true", help=said)
    add_model_options(parser, default=None)
    add_parallel_options(parser, default=None)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 if the replay differs from the recorded run."""
    from megatron_async.engine.recorded_config import check_paths
    from megatron_async.engine.recording import read_run

    recorded = read_run(args.file)
    if not args.trust_paths:
        check_paths(recorded.config, [applied.command for applied in recorded.applied])
    given = (
        "device",
        "dtype",
        "quantization",
        "quantize_activations",
        "kv_cache_dtype",
        *PARALLEL_SIZES,
        "pipeline_micro_batches",
        "rank_timeout_seconds",
    )
    changes: dict[str, Any] = {k: v for k in given if (v := getattr(args, k)) is not None}
    if args.depth is not None:
        changes |= {"inference_async_scheduling": None, "depth": args.depth}
    from megatron_async.engine.replay import replay

    config = dataclasses.replace(recorded.config, **changes)
    with load_engine(_model(args, recorded), config) as engine:
        result = replay(recorded, engine)
        depth = engine.depth
    for difference in result.differences:
        print(f"differs: {difference}")
    what = f"{len(result.endings)} requests, {len(recorded.applied)} commands, depth {depth}"
    then = recorded.config.effective_depth
    how = "exactly" if result.exact else f"with equal tokens (recorded at depth {then})"
    print(f"not repeated: {what}" if result.differences else f"repeated {how}: {what}")
    sys.stdout.flush()
    return EXIT_DIFFERENT if result.differences else 0


def _model(args: argparse.Namespace, recorded: Run) -> str:
    """The one that is given, or the recorded one, whose directory a run does not say."""
    name = recorded.model_name
    if args.model is None and name not in EMBEDDED and not name.startswith(RANDOM):
        raise ConfigError(f"{args.file}: recorded with the model {name!r}; add --model PATH")
    return args.model or name
