"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_async.cli.options.values import (
    asynchronous,
    graph_count,
    integer,
    mebibytes,
    number,
)
from megatron_async.config.engine_config import (
    DEFAULT_ASYNC_DEPTH,
    DEFAULT_RANK_TIMEOUT_SECONDS,
    GUIDED_ROWS,
    KV_CACHE_DTYPES,
    LEAST_DRAFT_COST,
    MAX_AUTOTUNE_SECONDS,
    MAX_COUNT,
    MAX_DEPTH,
    MAX_RANKS,
    QUANTIZATIONS,
    RECURRENT_STATE_DTYPES,
    SPECULATIVE_METHODS,
    EngineConfig,
)
from megatron_async.errors import ConfigError, legible
from megatron_async.models.description.shapes import SHAPES

if TYPE_CHECKING:
    from megatron_async.engine.engine import DynamicInferenceEngine

PROGRAM = "megatron-async"


class OneLineErrorParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes no abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{PROGRAM}: error: {legible(message)} (see {self.prog} --help)\n")


DTYPES = ("float32", "bfloat16", "float16")

_SAME = "inference_async_scheduling max_requests block_count prefill_chunk_tokens batch_invariant "
_SAME += "long_prefill_token_threshold max_long_partial_prefills "
_SAME += "enable_prefix_caching allow_non_finite_weights inference_logging_step_interval "
_SAME += "num_speculative_tokens speculative_method draft_model generation_config "
_SAME += "tokenizer_model state_snapshot_count recurrent_state_dtype quantization kv_cache_dtype "
_SAME += "quantize_activations gemm_autotune_seconds "
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_SAME += " ".join((*PARALLEL_SIZES, "pipeline_micro_batches", "rank_timeout_seconds"))
FLAGS = {name: f"--{name.replace('_', '-')}" for name in _SAME.split()} | {
    "max_tokens": "--inference-dynamic-batching-max-tokens",
    "paused_buffer_size_gb": "--inference-dynamic-batching-paused-buffer-size-gb",
    "max_sequence_length": "--inference-max-seq-length",
    "block_size_tokens": "--inference-dynamic-batching-block-size",
    "buffer_size_gb": "--inference-dynamic-batching-buffer-size-gb",
    "num_cuda_graphs": "--inference-dynamic-batching-num-cuda-graphs",
    "capture_mixed_steps": "--decode-only-cuda-graphs",
    "num_tokens_to_generate": "--max-new-tokens",
    "stop_words": "--stop",
}
"""What the fields that an error may name are called on the command line."""


def name_options(message: str) -> str:
    """``message`` on one line, with options where it names configuration fields."""
    # Not in paths, where such names may stand too.
    fields = re.compile(rf"(?<![\w/.-])({'|'.join(FLAGS)})(?![\w/-]|\.\w)")
    return fields.sub(lambda found: FLAGS[found[1]], " ".join(message.split()))


_QUANTIZATION = (
    "fp8 keeps linear layers as e4m3: as an FP8 checkpoint has them, or of another one quantized "
    "while it is read; mxfp4 keeps the experts of an MXFP4 checkpoint alone, as fp8 does beside "
    "(default: both are multiplied out)"
)
_QUANTIZE_ACTIVATIONS = (
    "with --quantization fp8: linear layers and experts multiply e4m3 by e4m3, but in fused decode "
    "steps of up to 8 rows (default: activations stay as --dtype)"
)
_KV_CACHE_DTYPE = (
    "fp8 keeps keys and values as e4m3, so that twice the tokens fit (default: as --dtype)"
)


def add_model_options(parser: argparse.ArgumentParser, default: str | None = "tiny") -> None:
    """Which model, and where it runs. Without a ``default`` it is the recorded one's."""
    add = parser.add_argument_group("model").add_argument
    said = "'tiny' is the embedded model, a byte-level GPT that writes Python-like code, and "
    said += "in a checkout 'tiny-moe' one with experts, 'tiny-hybrid' one with Mamba-2 layers; "
    said += "or a Hugging Face, native or megatron "
    said += "dist_checkpointing directory; random:SHAPE has "
    said += f"random weights in the shape of {', '.join(SHAPES)} "
    said += f"(default: {default or 'the recorded one'})"
    add("--model", "--load", default=default, metavar="tiny|PATH", help=said)
    said = "a tokenizer.json, or its directory (default: the model's, or the one that a checkpoint "
    said += "of Megatron-LM names)"
    add("--tokenizer-model", metavar="PATH", help=said)
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's on a GPU, float32 on a CPU")
    add("--quantization", choices=QUANTIZATIONS, help=_QUANTIZATION)
    switch: dict[str, Any] = {"action": "store_true", "default": None if default is None else False}
    add("--quantize-activations", help=_QUANTIZE_ACTIVATIONS, **switch)
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help=_KV_CACHE_DTYPE)
    for flag, name in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        add(flag, dest="dtype", action="store_const", const=name, help=f"as --dtype {name}")


def add_benchmark_model_options(parser: argparse.ArgumentParser) -> None:
    """A model or a shape, and where it runs; ``load_benchmark_model`` takes it."""
    group = parser.add_argument_group("model")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="tiny|PATH", help="a model (default: tiny)")
    of_shape = "random weights in the shape of a known model"
    choice.add_argument("--shape", choices=tuple(SHAPES), help=of_shape)
    group.add_argument("--device", metavar="NAME", help="default: a GPU where there is one")
    which = "default: bfloat16 on a GPU for a shape, the checkpoint's for a model; float32 on a CPU"
    group.add_argument("--dtype", choices=DTYPES, help=which)
    group.add_argument("--quantization", choices=QUANTIZATIONS, help=_QUANTIZATION)
    group.add_argument("--quantize-activations", action="store_true", help=_QUANTIZE_ACTIVATIONS)
    group.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help=_KV_CACHE_DTYPE)
    _add_autotune_option(group.add_argument, default=None)


def _add_autotune_option(add: Callable[..., Any], default: float | None) -> None:
    said = "of the start, for timing GEMMs whose shapes nobody has measured; what is fastest is "
    said += "kept for later starts, as by 'tune'; 0 times none (default: 0)"
    kind = number(0, MAX_AUTOTUNE_SECONDS)
    add(FLAGS["gemm_autotune_seconds"], type=kind, default=default, metavar="S", help=said)


def add_scheduling_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Serial or asynchronous, and how deep."""
    add = parser.add_argument_group("scheduling").add_argument
    said = "launch a step before the tokens of the last one are committed; the tokens stay the "
    said += f"same (default: {default})"
    add("--inference-async-scheduling", action=argparse.BooleanOptionalAction, help=said)
    said = "steps that may be in flight uncommitted; 0 is serial, 1 or more turns asynchronous "
    said += f"scheduling on (default with it: {DEFAULT_ASYNC_DEPTH})"
    add("--depth", type=integer(0, MAX_DEPTH), metavar="D", help=said)
    modes: dict[str, Any] = {"dest": "inference_async_scheduling", "type": asynchronous}
    said = "legacy or async: megatron-core's spelling of the first"
    add("--inference-dynamic-batching-async-sched-mode", metavar="MODE", help=said, **modes)


def add_parallel_options(parser: argparse.ArgumentParser, default: int | None = 1) -> None:
    """Processes that run one model together; without a ``default`` they are the recorded ones."""
    add = parser.add_argument_group("ranks of one model").add_argument
    said = {
        "tensor": "processes that share the model's layers, each with a GPU of its own",
        "pipeline": "stages of layers, of so many processes each",
        "expert": "processes of a stage that have a share of the experts each",
    }
    for name, what in zip(PARALLEL_SIZES, said.values(), strict=True):
        what += f" (default: {default or 'the recorded one'})"
        kind = integer(1, MAX_RANKS)
        add(FLAGS[name], dest=name, type=kind, default=default, metavar="N", help=what)
    said_batches = "parts of the running requests that are planned in turns, so that all stages "
    said_batches += "compute (default: one for each stage)"
    kind = integer(1, MAX_RANKS)
    add(FLAGS["pipeline_micro_batches"], type=kind, metavar="N", help=said_batches)
    what = "of silence after which a rank counts as dead; 0 is never (default: "
    what += f"{DEFAULT_RANK_TIMEOUT_SECONDS:g})"
    kept = None if default is None else DEFAULT_RANK_TIMEOUT_SECONDS
    name = "rank_timeout_seconds"
    add(FLAGS[name], type=number(0), default=kept, metavar="SECONDS", help=what)


def followed_rank(args: argparse.Namespace) -> bool:
    """Whether a launcher such as torchrun has started this process to follow another one's
    engine; then it has, until that one ended it."""
    has_ranks = all(hasattr(args, name) for name in PARALLEL_SIZES)
    if os.environ.get("RANK", "0") == "0" or not has_ranks:
        return False
    from megatron_async.build.rank_process import follow
    from megatron_async.device import resolve_device
    from megatron_async.ranks.layout import Layout

    layout = Layout(*(getattr(args, name) or 1 for name in PARALLEL_SIZES))
    follow(layout, resolve_device(args.device).type)
    return True


def add_engine_options(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """Sizes of the engine, under megatron's names; ``defaults`` are the command's own."""
    fields = EngineConfig(**defaults)  # type: ignore[arg-type]
    group = parser.add_argument_group("engine")
    add = group.add_argument
    cache = group.add_mutually_exclusive_group().add_argument
    counts: dict[str, Any] = {"type": integer(1), "metavar": "N"}

    def count(name: str, said: str, *more: str) -> None:
        default = getattr(fields, name)
        said += "" if default is None else f" (default: {default})"
        add(*more, FLAGS[name], dest=name, default=default, help=said, **counts)

    theirs = ("--inference-dynamic-batching-max-requests", "--inference-max-requests")
    count("max_requests", "that run at the same time", *theirs)
    count("max_tokens", "most tokens of one forward (default: room for four prefill chunks)")
    count("max_sequence_length", "most tokens of prompt and text (default: the model's)")
    said = "size of the KV cache (default: room for all requests at full length, at most 1 GiB on "
    said += "a CPU and 16 GiB on a GPU)"
    size: dict[str, Any] = {"dest": "buffer_size_gb", "type": number(0, above=True)}
    cache(FLAGS["buffer_size_gb"], metavar="GIB", help=said, **size)
    cache("--block-count", help="size of the KV cache in blocks, instead of GiB", **counts)
    said = "tokens of a KV-cache block"
    said += " (default: 16 on a CPU, 64 on a GPU)" if fields.block_size_tokens is None else ""
    count("block_size_tokens", said)
    said = "part of the cache that requests may keep which wait for a block (default: all)"
    size = {"dest": "paused_buffer_size_gb", "type": number(0), "metavar": "GIB"}
    add("--inference-dynamic-batching-paused-buffer-size-gb", help=said, **size)
    count("prefill_chunk_tokens", "longer prompts are prefilled in chunks of N")
    whole: dict[str, Any] = {"dest": "prefill_chunk_tokens", "const": MAX_COUNT}
    said = "prompts of which more tokens are left are long: shorter ones need not wait for them"
    count("long_prefill_token_threshold", said)
    count("max_long_partial_prefills", "long prompts that are prefilled at the same time")
    said = "prefill each prompt in one forward"
    add("--disable-chunked-prefill", action="store_const", help=said, **whole)
    said = "requests with a common prefix share its KV blocks (default: on)"
    switch = {"action": argparse.BooleanOptionalAction, "default": fields.enable_prefix_caching}
    names = ("--enable-prefix-caching", "--inference-dynamic-batching-prefix-caching")
    add(*names, dest="enable_prefix_caching", help=said, **switch)  # type: ignore[arg-type]
    said = "states of recurrent layers that are kept for common prefixes; 0 is none (default: four "
    said += "for each request, in at most 0.25 GiB on a CPU and 4 GiB on a GPU)"
    add("--state-snapshot-count", type=integer(0), metavar="N", help=said)
    said = "of the states of recurrent layers that sum over all tokens (default: the model's)"
    add("--recurrent-state-dtype", choices=RECURRENT_STATE_DTYPES, help=said)
    said = "record pauses in the requests' events"
    name = "--inference-dynamic-batching-track-paused-request-events"
    add(name, dest="track_paused_request_events", action="store_true", help=said)
    said = "results of a request do not depend on the others, to the last bit; slower"
    add("--batch-invariant", action="store_true", help=said)
    said = "requests may ask which experts their tokens went to, as trainers do"
    name = "--enable-return-routed-experts"
    add(name, dest="return_routed_experts", action="store_true", help=said)
    said = "such as NaN; they are refused else"
    add("--allow-non-finite-weights", action="store_true", help=said)
    said = "what a request leaves out is as the model's generation_config.json says"
    add("--generation-config", action="store_true", help=said)
    said = "log the counters on stderr every N steps; 0 is never (default: 0)"
    add("--inference-logging-step-interval", type=integer(0), default=0, metavar="N", help=said)
    _add_drafting_options(add)
    said = "rows of structured outputs: in each step, or left out where the next would wait for "
    said += "them, so that other rows keep their depth (default: wait)"
    add("--guided-rows", choices=GUIDED_ROWS, default="wait", help=said)
    said = "of the device, for automata of structured outputs that come again, with which no step "
    said += "waits for tokens on the host, such as 256; 0 is none (default: 256 on a GPU)"
    size = {"dest": "guided_automata_bytes", "type": mebibytes, "metavar": "MIB"}
    add("--guided-automata-mb", help=said, **size)
    said = "plan each step shortly before the one in flight ends: requests that come meanwhile are "
    said += "in it, so that they wait less for their first token"
    add("--late-planning", action="store_true", help=said)
    said = "most batch sizes captured as CUDA graphs; -1 captures all (default)"
    add(FLAGS["num_cuda_graphs"], dest="num_cuda_graphs", type=graph_count, metavar="N", help=said)
    said = "capture no steps with prefill chunks: a faster start, slower prompts"
    add(FLAGS["capture_mixed_steps"], dest="capture_mixed_steps", action="store_false", help=said)
    _add_autotune_option(add, default=0.0)
    said = "check behind new weights, sleep and reset that captured graphs fit the engine's memory"
    add("--audit-graphs", action="store_true", help=said)
    add("--debug", action="store_true", help="check every step and spoil freed memory; slow")
    add_parallel_options(parser)


def _add_drafting_options(add: Callable[..., Any]) -> None:
    said = "tokens that are drafted for each request and step (default: 0)"
    add(
        "--num-speculative-tokens",
        type=integer(0),
        default=0,
        metavar="K",
        help=said,
    )
    said = "who drafts: the model's layers for multi-token prediction, what followed when the last "
    said += "tokens came before, or what structured outputs force, which the others draft too "
    said += "(default: mtp)"
    add("--speculative-method", choices=SPECULATIVE_METHODS, default="mtp", help=said)
    said = "leave drafts out where they do not pay, by what steps cost at the start"
    add("--adaptive-speculation", action="store_true", help=said)
    said = "what a draft adds to a step, as a share of a step without drafts, 0.05 to 1: with it "
    said += "--adaptive-speculation measures nothing"
    add("--speculative-draft-cost", type=number(LEAST_DRAFT_COST, 1), metavar="SHARE", help=said)
    said = "a model over the same vocabulary that drafts instead"
    add("--draft-model", metavar="tiny|PATH", help=said)


def resolve_scheduling(asynchronous: bool | None, depth: int | None, *, default: bool) -> int:
    """The depth that the two scheduling options ask for; 0 is serial.

    Raises:
        ConfigError: they contradict each other.
    """
    if depth is not None:
        if asynchronous not in (None, depth > 0):
            option = f"--{'' if asynchronous else 'no-'}inference-async-scheduling"
            given = f"--depth {depth}" + ("" if depth else ", which is serial,")
            raise ConfigError(f"{option} and {given} contradict each other; leave one of them out")
        return depth
    return DEFAULT_ASYNC_DEPTH if (default if asynchronous is None else asynchronous) else 0


def sampling_defaults(args: argparse.Namespace) -> dict[str, Any] | None:
    """What ``--generation-config`` takes from the model's file; None without the option. Raises
    CheckpointError."""
    from megatron_async.checkpoint.huggingface.generation_config import sampling_defaults
    from megatron_async.checkpoint.path import model_directory

    return sampling_defaults(model_directory(args.model)) if args.generation_config else None


def engine_config(args: argparse.Namespace, depth: int, *, random_seed: int = 0) -> EngineConfig:
    """The configuration that parsed engine options describe, at ``depth``.

    Raises:
        ConfigError: two options contradict each other.
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)} & vars(args).keys()
    given = {name: getattr(args, name) for name in names}
    given |= {"inference_async_scheduling": None, "depth": depth, "random_seed": random_seed}
    if not given.get("num_speculative_tokens"):
        for name, unset in (
            ("adaptive_speculation", False), ("speculative_draft_cost", None),
            ("speculative_method", "mtp"),
        ):  # fmt: skip
            if given.get(name, unset) != unset:
                raise ConfigError(
                    f"--{name.replace('_', '-')} drafts nothing without "
                    f"{FLAGS['num_speculative_tokens']}; give that too"
                )
    return EngineConfig(**given)


def load_engine(model: str, config: EngineConfig) -> DynamicInferenceEngine:
    """The engine for ``--model``; shows the capture of graphs on a terminal, and logged steps."""
    from megatron_async.cli.output.progress import show_capture
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.processes.garbage import imports_are_over

    if config.inference_logging_step_interval:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("megatron_async").setLevel(logging.INFO)
    try:
        return DynamicInferenceEngine.from_pretrained(model, config, progress=show_capture)
    finally:
        imports_are_over()
