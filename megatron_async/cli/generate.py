"""``megatron-async generate``: text for one prompt or many."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from megatron_async.cli.options import options
from megatron_async.cli.options.prompts import Job, read_jobs
from megatron_async.cli.options.sampling import SAMPLING, STRUCTURES, add_sampling_options
from megatron_async.cli.options.values import integer
from megatron_async.errors import RequestError
from megatron_async.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.cli.output.writers import Writer
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.engine.metrics import EngineCounters
    from megatron_async.request.request import RequestFuture

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
    parser.set_defaults(run=run, takes_megatron_flags=True)
    add = parser.add_argument_group("prompts and output").add_argument
    said = "one or more prompts; may be repeated. Write --prompt=TEXT if it begins with '-'"
    add("--prompt", "--prompts", action="extend", nargs="+", default=[], metavar="TEXT", help=said)
    said = (
        "one prompt a line, taken as it is (a \\n in it is no line break), blank lines skipped; in "
        'a .jsonl file each line is an object with "prompt" (text or a list of token ids; or '
        'megatron-core\'s "text", with any other fields) and, if '
        'need be, its own "priority" (an integer; lower goes first, default: 0), "temperature" and '
        "other options of sampling and of the text. - is the standard input. May be repeated"
    )
    add("--prompt-file", action="append", default=[], metavar="FILE", help=said)
    said = "the first N prompts of each file alone"
    add("--prompt-file-num-truncate", type=integer(1), metavar="N", help=said)
    said = "lines of megatron-core's files say how many tokens to generate, in a field of theirs"
    add("--num-tokens-from-file", action="store_true", help=said)
    said = (
        "one JSON object for each prompt on stdout, in their order: prompt, text, token_ids, "
        "finish_reason, stop_reason, seed, counters, steps; log-probabilities and choices where "
        "they were asked for; error as well for one that could not be served"
    )
    add("--json", action="store_true", help=said)
    said = "write prompts, texts, tokens and log-probabilities to FILE too, as megatron-core's JSON"
    add("--output-path", metavar="FILE", help=said)
    said = "write the run to FILE; `megatron-async replay FILE` repeats it"
    add("--record", metavar="FILE", help=said)
    options.add_model_options(parser)
    add_sampling_options(parser)
    options.add_scheduling_options(parser, default="off")
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 2 if a prompt could not be served."""
    depth = options.resolve_scheduling(args.inference_async_scheduling, args.depth, default=False)
    config = options.engine_config(args, depth, random_seed=args.seed)
    args.logit_bias = dict(args.logit_bias or ())
    most, lengths = args.prompt_file_num_truncate, args.num_tokens_from_file
    jobs = read_jobs(args.prompt, args.prompt_file, most=most, lengths=lengths)

    from megatron_async.cli.output.megatron_output import results_to_json
    from megatron_async.cli.output.output_file import OutputFile
    from megatron_async.cli.output.writers import make_writer, write_all

    results = None if args.output_path is None else OutputFile("--output-path", args.output_path)

    with options.load_engine(args.model, config) as engine:
        each = [vars(args) | job.sampling for job in jobs]
        several = any(of[name] not in (None, 1) for of in each for name in ("n", "best_of"))
        writer = make_writer(jobs, as_json=args.json, several=several, settle_steps=engine.depth)
        started = time.perf_counter()
        futures = _submit(engine, args, jobs, writer)
        write_all(engine, writer, futures)
        _report(engine, len(futures), time.perf_counter() - started)
        if results is not None:
            steps = engine.counters.steps_launched
            ended = [future.result() for future in futures]
            results.write(results_to_json(ended, steps, engine.model.tokenizer))
    return EXIT_BAD_INPUT if len(futures) < len(jobs) else 0


def _submit(
    engine: DynamicInferenceEngine, args: argparse.Namespace, jobs: list[Job], writer: Writer
) -> list[RequestFuture]:
    """Queue every job under its index; returns the futures of those that could be served.

    Raises:
        RequestError: the only one could not, and no line of JSON was asked for.
    """
    futures = []
    for index, job in enumerate(jobs):
        try:
            if job.error is not None:
                raise RequestError(job.error)
            params = _sampling_params(engine, args, job)
            futures.append(engine.add_request(index, job.prompt, params, priority=job.priority))
        except RequestError as error:
            if len(jobs) == 1 and not args.json:
                raise RequestError(f"{job.source}: {error}") from error
            message = f"{job.source}: {options.name_options(str(error))}"
            print(f"{options.PROGRAM}: error: {message}", file=sys.stderr)
            writer.refuse(index, message)
    return futures


def _sampling_params(
    engine: DynamicInferenceEngine, args: argparse.Namespace, job: Job
) -> SamplingParams:
    own = STRUCTURES if any(name in job.sampling for name in STRUCTURES) else ()
    values = {n: vars(args)[n] for n in SAMPLING if n not in ("seed", *own)} | job.sampling
    defaults = engine.model.sampling_defaults or {}
    if values["max_new_tokens"] is None:
        values["max_new_tokens"] = defaults.get("num_tokens_to_generate")
    if values["max_new_tokens"] is None:
        # What the model has room for; a prompt that is too long is the engine's to refuse.
        prompt = job.prompt
        tokens = engine.model.tokenize_prompt(prompt) if isinstance(prompt, str) else prompt
        room = engine.max_sequence_length - len(tokens)
        values["max_new_tokens"] = max(1, min(DEFAULT_MAX_NEW_TOKENS, room))
    given = {k: value for k, value in values.items() if value is not None and value is not False}
    given = {k: v for k, v in defaults.items() if k != "num_tokens_to_generate"} | given
    structure = {k.removesuffix("_schema"): given.pop(k) for k in STRUCTURES if k in given}
    several = [given.get(name, 1) for name in ("n", "best_of")] != [1, 1]
    sampled = several or any(map(given.get, ("top_k", "top_p", "min_p")))
    given.setdefault("temperature", 1.0 if sampled else 0.0)
    given["num_tokens_to_generate"] = given.pop("max_new_tokens")
    given["stop_words"] = given.pop("stop", None)
    return SamplingParams(**given, structured_outputs=structure or None)


def drafts_said(counters: EngineCounters) -> str:
    """What came of drafts, behind other figures; nothing without any."""
    if not counters.tokens_drafted:
        return ""
    shares = ", ".join(f"{share:.0%}" for share in counters.acceptance)
    said = (
        f"; {counters.tokens_accepted} of {counters.tokens_drafted} drafts accepted ({shares} by "
    )
    return said + f"position), {counters.tokens_per_row:.2f} tokens a row and step"


def _report(engine: DynamicInferenceEngine, served: int, seconds: float) -> None:
    counters, requests = engine.counters, "request" if served == 1 else "requests"
    tokens = counters.tokens_committed
    rate = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    steps = f"{counters.steps_overlapped} of {counters.steps_committed} steps overlapped"
    steps += f", {counters.tokens_discarded} tokens discarded"
    steps += drafts_said(counters)
    print(f"{served} {requests}, {rate}; depth {engine.depth}: {steps}", file=sys.stderr)
