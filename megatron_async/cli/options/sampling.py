"""How tokens are sampled, as options."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_async.cli.options.values import SEED, contents, id_and_bias, in_range, log_probs_mode

STRUCTURES = ("json_schema", "json_object", "regex", "choice", "grammar")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are sampled, and when a text ends. Most values are SamplingParams' to check."""
    group = parser.add_argument_group("sampling; most is off by default")
    add, one_of = group.add_argument, group.add_mutually_exclusive_group().add_argument
    on: dict[str, Any] = {"action": "store_true"}
    real: dict[str, Any] = {"type": float, "metavar": "X"}
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    texts: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "TEXT"}
    ids: dict[str, Any] = {**texts, "type": int, "metavar": "ID"}
    said = "most tokens to generate (default: 128, or fewer where the model allows no more)"
    add(
        "--max-new-tokens",
        "--num-tokens-to-generate",
        type=in_range("num_tokens_to_generate"),
        metavar="N",
        help=said,
    )
    add(
        "--temperature",
        type=in_range("temperature"),
        metavar="T",
        help="default: 0, or 1 with --top-k and such",
    )
    said = "sample from the K most likely"
    add("--top-k", "--top_k", type=in_range("top_k"), default=0, metavar="K", help=said)
    said = "from P of the probability"
    add("--top-p", "--top_p", type=in_range("top_p"), default=0.0, metavar="P", help=said)
    add("--min-p", **real, help="sample from tokens at least X times as likely as the likeliest")
    said = "of the randomness; each prompt derives its own from it and its place (default: 0)"
    add("--seed", type=SEED, default=0, metavar="S", help=said)
    add("--repetition-penalty", **real, help="of tokens of prompt and text; 1 is off (default: 1)")
    add("--presence-penalty", **real, help="of tokens of the text")
    add("--frequency-penalty", **real, help="of tokens of the text, each time that they came")
    add("--logit-bias", **{**ids, "type": id_and_bias, "metavar": "ID=X"}, help="such as 42=-1.5")
    add("--allowed-token-ids", **ids, help="the only tokens that may come")
    add("--bad-words", **texts, help="texts that may not come")
    add("--min-tokens", **count, help="tokens before the text may end")
    add("--ignore-eos", **on, help="go on after the model's own end tokens")
    add("--stop-token-ids", **ids, help="tokens that end the text")
    said = "in place of the model's own end tokens; -1 for none"
    add("--termination-id", type=in_range("termination_id"), metavar="ID", help=said)
    add("--stop", "--stop-words", **texts, help="texts before which it ends")
    add("--include-stop-str-in-output", **on, help="behind which it ends")
    add("--return-log-probs", **on, help="of the tokens of text and prompt, shown by --json")
    add("--skip-prompt-log-probs", **on, help="not of the prompt's")
    add("--top-n-logprobs", **count, help="of the N most likely tokens too, at most 20")
    said = "the model's (default), or sampled"
    add("--log-probs-mode", choices=("raw", "processed"), help=said)
    modes: dict[str, Any] = {"dest": "log_probs_mode", "type": log_probs_mode, "metavar": "MODE"}
    said = "raw_logprobs or processed_logprobs, as --log-probs-mode"
    add("--inference-dynamic-batching-logprobs-mode", help=said, **modes)
    add("--n", **count, help="texts of each prompt (default: 1)")
    add("--best-of", **count, help="generate N texts and keep the --n likeliest")
    one_of("--json-schema", type=contents, metavar="FILE|TEXT", help="the text is such JSON")
    one_of("--json-object", **on, help="it is a JSON object")
    one_of("--regex", metavar="TEXT", help="it matches this regular expression")
    one_of("--choice", **texts, help="it is one of these")
    one_of("--grammar", type=contents, metavar="FILE", help="it is of this EBNF grammar")


add_sampling_options(_parser := argparse.ArgumentParser())
SAMPLING = tuple(vars(_parser.parse_args([])))
"""What a line of a .jsonl file may set for itself, named as the options are."""
