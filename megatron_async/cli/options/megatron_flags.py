"""Megatron's command-line flags: those with a meaning here, and those that are read and ignored.

``megatron_flags.json`` has all flags of its inference examples and of its training arguments, of
core_v0.16.1 and of the main branch, by the number of their values ("*" is any number).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

from megatron_async.errors import ConfigError
from megatron_async.megatron_api.names import Table, accepted, refused, works

FLAGS: Table = {
    "--load": works("--model"),
    "--prompts": works("--prompt"),
    "--prompt-file": works('lines with "text" may have any other fields'),
    "--prompt-file-num-truncate": works(""),
    "--num-tokens-from-file": works("of lines in Megatron's format"),
    "--num-tokens-to-generate": works("--max-new-tokens"),
    "--temperature": works("0 is greedy"),
    "--top_k": works("--top-k; the default is off here, and greedy at temperature 0"),
    "--top_p": works("--top-p"),
    "--termination-id": works("-1 for none"),
    "--stop-words": works("--stop"),
    "--return-log-probs": works(""),
    "--skip-prompt-log-probs": works(""),
    "--top-n-logprobs": works("by text in the file of --output-path, by token id with --json"),
    "--output-path": works("of generate; prompts may be served beside --json"),
    "--tokenizer-model": works("a tokenizer.json, or the directory of one"),
    "--seed": works(""),
    "--bf16": works("--dtype bfloat16"),
    "--fp16": works("--dtype float16"),
    "--host": works("of serve"),
    "--port": works("of serve"),
    "--inference-max-seq-length": works(""),
    "--inference-max-requests": works("--max-requests"),
    "--inference-logging-step-interval": works(""),
    "--inference-dynamic-batching-async-sched-mode": works("--inference-async-scheduling"),
    "--inference-dynamic-batching-block-size": works(""),
    "--inference-dynamic-batching-buffer-size-gb": works(""),
    "--inference-dynamic-batching-paused-buffer-size-gb": works(""),
    "--inference-dynamic-batching-max-requests": works("--max-requests"),
    "--inference-dynamic-batching-max-tokens": works(""),
    "--inference-dynamic-batching-num-cuda-graphs": works(""),
    "--inference-dynamic-batching-track-paused-request-events": works(""),
    "--inference-dynamic-batching-prefix-caching": works("--enable-prefix-caching"),
    "--inference-dynamic-batching-logprobs-mode": works("--log-probs-mode"),
    "--decode-only-cuda-graphs": works(""),
    "--disable-chunked-prefill": works("prompts are prefilled in chunks without it"),
    "--num-speculative-tokens": works(""),
    "--tensor-model-parallel-size": works(""),
    "--pipeline-model-parallel-size": works("stages compute micro-batches in turns"),
    "--expert-model-parallel-size": works(""),
    "--context-parallel-size": accepted("a rank has whole sequences", "1"),
    "--inference-dynamic-batching-unified-memory-level": accepted(
        "the KV cache stays in the memory of its device", "0"
    ),
    "--model-provider": accepted("the checkpoint itself says which", "gpt", "mamba"),
    "--drain-between-batches": refused("run the command once for each batch"),
}
"""What becomes of a flag; those of the file that are not here are ignored, with one warning."""


@functools.cache
def value_counts() -> dict[str, str]:
    """How many values each of Megatron's flags takes: "0", "1", "2" or "*"."""
    groups = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {f"--{name}": count for count, names in groups.items() for name in names}


def warn_of_ignored(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Name Megatron's flags among ``arguments``, which the parser did not know, on one line of
    stderr. Anything else there ends the program as the parser's own errors do.

    Raises:
        ConfigError: a flag has a value that would have an effect that there is none of.
    """
    ignored: list[str] = []
    left = list(arguments)
    while left:
        name, has_value, value = left.pop(0).partition("=")
        count = value_counts().get(name)
        if count is None:
            parser.error(f"unrecognized arguments: {' '.join([*_joined(name, value), *left])}")
        values = [value] if has_value else []
        while left and not left[0].startswith("--") and (count == "*" or len(values) < int(count)):
            values.append(left.pop(0))
        _check(name, values)
        ignored.append(name)
    flags = ", ".join(dict.fromkeys(ignored))
    said = "ignored, without a meaning here"
    print(f"{parser.prog}: warning: {said}: {flags}", file=sys.stderr)


def _joined(name: str, value: str) -> list[str]:
    return [f"{name}={value}" if value else name]


def _check(name: str, values: list[str]) -> None:
    entry = FLAGS.get(name)
    if entry is None or (entry.outcome == "accepted" and set(values) <= set(entry.values)):
        return
    if entry.outcome == "works":
        raise ConfigError(f"{name} is no option of this command; see --help")
    said = " ".join([name, *values])
    instead = f"; use {' or '.join(map(str, entry.values))}" if entry.outcome == "accepted" else ""
    raise ConfigError(f"{said} is not supported: {entry.note}{instead}")
