"""``megatron-async generate``: text for one prompt or many."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from megatron_async.errors import RequestError

from .options import (
    PROGRAM,
    SEED,
    add_engine_options,
    add_model_options,
    add_scheduling_options,
    engine_config,
    integer,
    load_engine,
    name_options,
    number,
    resolve_scheduling,
)
from .prompts import Job, read_jobs

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.sampling_params import SamplingParams

    from .writers import Writer

DEFAULT_MAX_NEW_TOKENS = 128
EXIT_BAD_INPUT = 2

_DESCRIPTION = """\
Generate text. One prompt: its text is streamed to stdout as it comes. Several: each text follows
a header, in the order of the prompts. Everything else goes to stderr.

A prompt that cannot be served is reported on stderr; the others still run, and the exit status
is 2 at the end.
"""


def add_command(commands: Any) -> None:
    """Add ``generate`` to the command line."""
    said = "generate text for one prompt or many"
    parser = commands.add_parser("generate", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run)
    add = parser.add_argument_group("prompts and output").add_argument
    said = "one or more prompts; may be repeated. Write --prompt=TEXT if it begins with '-'"
    add("--prompt", action="extend", nargs="+", default=[], metavar="TEXT", help=said)
    said = (
        "one prompt a line, taken as it is (a \\n in it is no line break), blank lines skipped; in "
        'a .jsonl file each line is an object with "prompt" (text or a list of token ids) and, if '
        'need be, its own "max_new_tokens", "temperature", "top_k", "top_p", "seed" and "priority" '
        "(an integer; lower goes first, default: 0). - is the standard input. May be repeated"
    )
    add("--prompt-file", action="append", default=[], metavar="FILE", help=said)
    said = (
        "one JSON object for each prompt on stdout, in their order: prompt, text, token_ids, "
        "finish_reason, counters, steps; error as well for one that could not be served"
    )
    add("--json", action="store_true", help=said)
    said = "write the run to FILE; `megatron-async replay FILE` repeats it"
    add("--record", metavar="FILE", help=said)
    add_model_options(parser)
    add = parser.add_argument_group("sampling").add_argument
    said = f"tokens to generate at most (default: {DEFAULT_MAX_NEW_TOKENS}, or fewer where the "
    add("--max-new-tokens", type=integer(1), metavar="N", help=f"{said}model allows no more)")
    said = "0 is greedy (default: 0, but 1 where --top-k or --top-p is given)"
    add("--temperature", type=number(0), metavar="T", help=said)
    said = "sample from the K most likely tokens; 0 is off (default: 0)"
    add("--top-k", type=integer(0), default=0, metavar="K", help=said)
    said = "sample from the most likely tokens that have probability P together; 0 is off "
    add("--top-p", type=number(0, 1), default=0.0, metavar="P", help=f"{said}(default: 0)")
    said = "of the randomness; each prompt derives its own from it and its place (default: 0)"
    add("--seed", type=SEED, default=0, metavar="S", help=said)
    add_scheduling_options(parser, default="off")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 2 if a prompt could not be served."""
    depth = resolve_scheduling(args.inference_async_scheduling, args.depth, default=False)
    config = engine_config(args, depth, random_seed=args.seed)
    jobs = read_jobs(args.prompt, args.prompt_file)

    from .writers import make_writer, write_all

    with load_engine(args.model, config) as engine:
        writer = make_writer(jobs, as_json=args.json, settle_steps=engine.depth)
        started = time.perf_counter()
        refused = _submit(engine, args, jobs, writer)
        write_all(engine, writer)
        _report(engine, len(jobs) - refused, time.perf_counter() - started)
    return EXIT_BAD_INPUT if refused else 0


def _submit(
    engine: DynamicInferenceEngine, args: argparse.Namespace, jobs: list[Job], writer: Writer
) -> int:
    """Queue every job under its index; returns how many could not be served.

    Raises:
        RequestError: the only one could not, and no line of JSON was asked for.
    """
    refused = 0
    for index, job in enumerate(jobs):
        try:
            if job.error is not None:
                raise RequestError(job.error)
            params = _sampling_params(engine, args, job)
            engine.add_request(index, job.prompt, params, priority=job.priority)
        except RequestError as error:
            if len(jobs) == 1 and not args.json:
                raise RequestError(f"{job.source}: {error}") from error
            message = f"{job.source}: {name_options(str(error))}"
            print(f"{PROGRAM}: error: {message}", file=sys.stderr)
            writer.refuse(index, message)
            refused += 1
    return refused


def _sampling_params(
    engine: DynamicInferenceEngine, args: argparse.Namespace, job: Job
) -> SamplingParams:
    from megatron_async.sampling_params import SamplingParams

    values = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    values |= job.sampling
    if values["temperature"] is None:
        values["temperature"] = 1.0 if values["top_k"] or values["top_p"] else 0.0
    most = values.pop("max_new_tokens", args.max_new_tokens)
    if most is None:
        # What the model has room for; a prompt that is too long is the engine's to refuse.
        prompt = job.prompt
        tokens = engine.controller.tokenize_prompt(prompt) if isinstance(prompt, str) else prompt
        most = max(1, min(DEFAULT_MAX_NEW_TOKENS, engine.max_sequence_length - len(tokens)))
    return SamplingParams(num_tokens_to_generate=most, **values)


def _report(engine: DynamicInferenceEngine, served: int, seconds: float) -> None:
    counters, requests = engine.counters, "request" if served == 1 else "requests"
    tokens = counters.tokens_committed
    rate = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    steps = f"{counters.steps_overlapped} of {counters.steps_committed} steps overlapped"
    steps += f", {counters.tokens_discarded} tokens discarded"
    print(f"{served} {requests}, {rate}; depth {engine.depth}: {steps}", file=sys.stderr)
