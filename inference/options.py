"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import argparse
import logging
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_async.config import DEFAULT_ASYNC_DEPTH, MAX_DEPTH, EngineConfig
from megatron_async.errors import ConfigError

from .shapes import SHAPES

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
        self.exit(2, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Converts an argument to an integer in a range."""

    def convert(text: str) -> int:
        bounds = f"of at least {low}" if high is None else f"between {low} and {high}"
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer {bounds}")
        return value

    return convert


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Converts an argument to a finite number in a range; ``above`` excludes ``low``."""

    def convert(text: str) -> float:
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        bounds += "" if math.isinf(high) else f" and at most {high:g}"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high) or math.isinf(value) or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {bounds}")
        return value

    return convert


def several(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Converts an argument to a list, from parts between commas; a value stands in it once."""
    return lambda text: list(dict.fromkeys(convert(part) for part in text.split(",")))


DTYPES = ("float32", "bfloat16", "float16")

FLAGS = {
    "inference_async_scheduling": "--inference-async-scheduling",
    "max_requests": "--max-requests",
    "max_tokens": "--inference-dynamic-batching-max-tokens",
    "max_sequence_length": "--inference-max-seq-length",
    "block_size_tokens": "--inference-dynamic-batching-block-size",
    "buffer_size_gb": "--inference-dynamic-batching-buffer-size-gb",
    "block_count": "--block-count",
    "prefill_chunk_tokens": "--prefill-chunk-tokens",
    "enable_prefix_caching": "--enable-prefix-caching",
    "batch_invariant": "--batch-invariant",
    "allow_non_finite_weights": "--allow-non-finite-weights",
    "inference_logging_step_interval": "--inference-logging-step-interval",
    "num_cuda_graphs": "--inference-dynamic-batching-num-cuda-graphs",
    "capture_mixed_steps": "--decode-only-cuda-graphs",
    "num_tokens_to_generate": "--max-new-tokens",
}
"""What the fields that an error may name are called on the command line."""


def name_options(message: str) -> str:
    """``message`` on one line, with options where it names configuration fields."""
    # Not in paths, where such names may stand too.
    fields = re.compile(rf"(?<![\w/.-])({'|'.join(FLAGS)})(?![\w/-]|\.\w)")
    return fields.sub(lambda found: FLAGS[found[1]], " ".join(message.split()))


SEED = integer(-(2**63), 2**63 - 1)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and where it runs."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="tiny",
        metavar="tiny|PATH",
        help="'tiny' is the embedded model, a byte-level GPT that writes Python-like code; or a "
        "Hugging Face, native or megatron dist_checkpointing directory (default: tiny)",
    )
    group.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU where there is one)"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: the checkpoint's on a GPU, float32 on a CPU",
    )


def add_subject_options(parser: argparse.ArgumentParser) -> None:
    """A model or a shape to look at, and where it runs; ``subject.load_subject`` takes it."""
    group = parser.add_argument_group("model")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="tiny|PATH", help="a model (default: tiny)")
    choice.add_argument(
        "--shape", choices=tuple(SHAPES), help="random weights in the shape of a known model"
    )
    group.add_argument("--device", metavar="NAME", help="default: a GPU where there is one")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: bfloat16 on a GPU for a shape, the checkpoint's for a model; float32 on a "
        "CPU",
    )


def add_scheduling_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Serial or asynchronous, and how deep."""
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--inference-async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="launch a step before the tokens of the last one are committed; the tokens stay the "
        f"same (default: {default})",
    )
    group.add_argument(
        "--depth",
        type=integer(0, MAX_DEPTH),
        metavar="D",
        help="steps that may be in flight uncommitted; 0 is serial, 1 or more turns asynchronous "
        f"scheduling on (default with it: {DEFAULT_ASYNC_DEPTH})",
    )


def add_engine_options(
    parser: argparse.ArgumentParser,
    *,
    max_requests: int | None = None,
    block_size: int | None = None,
    prefill_chunk_tokens: int | None = None,
) -> None:
    """Sizes of the engine, under megatron's names; the arguments are the command's defaults."""
    fields = EngineConfig()
    max_requests = max_requests or fields.max_requests
    block_size = block_size or fields.block_size_tokens
    prefill_chunk_tokens = prefill_chunk_tokens or fields.prefill_chunk_tokens
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--inference-dynamic-batching-max-requests",
        "--max-requests",
        dest="max_requests",
        type=integer(1),
        default=max_requests,
        metavar="N",
        help=f"requests that run at the same time; others wait (default: {max_requests})",
    )
    group.add_argument(
        "--inference-dynamic-batching-max-tokens",
        dest="max_tokens",
        type=integer(1),
        metavar="N",
        help="most tokens of one forward (default: room for four prefill chunks)",
    )
    group.add_argument(
        "--inference-max-seq-length",
        dest="max_sequence_length",
        type=integer(2),
        metavar="N",
        help="most tokens of a request, prompt and generation (default: the model's)",
    )
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--inference-dynamic-batching-buffer-size-gb",
        dest="buffer_size_gb",
        type=number(0, above=True),
        metavar="GIB",
        help="size of the KV cache (default: room for all requests at full length, at most 1 GiB "
        "on a CPU and 16 GiB on a GPU)",
    )
    cache.add_argument(
        "--block-count",
        type=integer(1),
        metavar="N",
        help="size of the KV cache in blocks, instead of GiB",
    )
    group.add_argument(
        "--inference-dynamic-batching-block-size",
        dest="block_size_tokens",
        type=integer(1),
        default=block_size,
        metavar="N",
        help=f"tokens of a KV-cache block (default: {block_size})",
    )
    group.add_argument(
        "--prefill-chunk-tokens",
        type=integer(1),
        default=prefill_chunk_tokens,
        metavar="N",
        help=f"longer prompts are prefilled in chunks of N (default: {prefill_chunk_tokens})",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=fields.enable_prefix_caching,
        help="requests with a common prefix share its KV blocks (default: on)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="results of a request do not depend on the others, to the last bit; slower",
    )
    group.add_argument(
        "--allow-non-finite-weights",
        action="store_true",
        help="serve a model whose weights have NaN or infinite elements",
    )
    group.add_argument(
        "--inference-logging-step-interval",
        type=integer(0),
        default=fields.inference_logging_step_interval,
        metavar="N",
        help="log the counters on stderr every N steps; 0 is never (default: "
        f"{fields.inference_logging_step_interval})",
    )
    group.add_argument(
        "--inference-dynamic-batching-num-cuda-graphs",
        dest="num_cuda_graphs",
        type=integer(1),
        metavar="N",
        help="most batch sizes captured as CUDA graphs (default: all)",
    )
    group.add_argument(
        "--decode-only-cuda-graphs",
        dest="capture_mixed_steps",
        action="store_false",
        help="capture no steps with prefill chunks: a faster start, slower prompts",
    )
    group.add_argument(
        "--debug",
        action="store_true",
        help="check invariants at every step and fill freed memory with garbage; slow",
    )


def resolve_scheduling(asynchronous: bool | None, depth: int | None, *, default: bool) -> int:
    """The depth that the two scheduling options ask for; 0 is serial.

    Raises:
        ConfigError: they contradict each other.
    """
    if asynchronous is False and depth:
        raise ConfigError(
            f"--no-inference-async-scheduling and --depth {depth} contradict each other; "
            "leave one of them out"
        )
    if asynchronous and depth == 0:
        raise ConfigError(
            "--inference-async-scheduling and --depth 0, which is serial, contradict each other; "
            "leave one of them out"
        )
    if depth is not None:
        return depth
    if asynchronous is None:
        asynchronous = default
    return DEFAULT_ASYNC_DEPTH if asynchronous else 0


def engine_config(args: argparse.Namespace, depth: int, *, random_seed: int = 0) -> EngineConfig:
    """The configuration that parsed engine options describe, at ``depth``.

    Raises:
        ConfigError: two options contradict each other.
    """
    return EngineConfig(
        inference_async_scheduling=depth > 0,
        depth=depth,
        max_requests=args.max_requests,
        max_tokens=args.max_tokens,
        max_sequence_length=args.max_sequence_length,
        block_size_tokens=args.block_size_tokens,
        buffer_size_gb=args.buffer_size_gb,
        block_count=args.block_count,
        prefill_chunk_tokens=args.prefill_chunk_tokens,
        enable_prefix_caching=args.enable_prefix_caching,
        batch_invariant=args.batch_invariant,
        allow_non_finite_weights=args.allow_non_finite_weights,
        inference_logging_step_interval=args.inference_logging_step_interval,
        random_seed=random_seed,
        num_cuda_graphs=args.num_cuda_graphs,
        capture_mixed_steps=args.capture_mixed_steps,
        device=args.device,
        dtype=args.dtype,
        debug=args.debug,
    )


def load_engine(model: str, config: EngineConfig) -> DynamicInferenceEngine:
    """The engine for ``--model``; shows the capture of graphs on a terminal, and logged steps."""
    from megatron_async.engine.engine import DynamicInferenceEngine

    from .progress import show_capture

    if config.inference_logging_step_interval:
        logger = logging.getLogger("megatron_async")
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
    return DynamicInferenceEngine.from_pretrained(model, config, progress=show_capture)
