"""How ``chat`` samples: by its options, the model's ``generation_config.json`` or its defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.cli.options.values import SEED, in_range, integer, number
from megatron_async.sampling_params import SamplingParams

DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}
"""In place of the model's own."""
DEFAULT_NEW_TOKENS = 512
OPTIONS = {
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "num_tokens_to_generate": "--max-new-tokens",
    "seed": "--seed",
}
OF_MODEL = "generation_config.json"


def add_chat_sampling_options(add: Callable[..., Any]) -> None:
    """Add the options; one that is left out is None."""
    longest = f"of an answer (default: {DEFAULT_NEW_TOKENS})"
    name = OPTIONS["num_tokens_to_generate"]
    add(name, dest="num_tokens_to_generate", type=integer(1), metavar="N", help=longest)
    said = "default: {}, or as --generation-config says"
    add("--temperature", type=number(0), metavar="T", help=said.format(DEFAULTS["temperature"]))
    add("--top-p", type=number(0, 1), metavar="P", help=said.format(DEFAULTS["top_p"]))
    add("--top-k", type=in_range("top_k"), metavar="K", help=said.format("all"))
    add("--seed", type=SEED, metavar="S", help="default: 0")


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """The settings of all answers.

    Attributes:
        values: fields of :class:`SamplingParams`, the seed apart.
        seed: of the engine.
        sources: where each of them comes from.
    """

    values: Mapping[str, Any]
    seed: int
    sources: Mapping[str, str]

    @classmethod
    def of(cls, args: argparse.Namespace, of_model: Mapping[str, Any] | None) -> ChatSampling:
        """By parsed options, then by what the model's file says; None is that nobody asks it."""
        values: dict[str, Any] = {"seed": 0, "num_tokens_to_generate": DEFAULT_NEW_TOKENS}
        values |= DEFAULTS if of_model is None else of_model
        sources = {name: OF_MODEL if name in (of_model or ()) else "default" for name in values}
        given = {name: value for name in OPTIONS if (value := vars(args)[name]) is not None}
        values |= given
        sources |= {name: OPTIONS[name] for name in given}
        return cls(values, values.pop("seed"), sources)

    def params(self, room: int) -> SamplingParams:
        """The parameters of an answer that has room for ``room`` tokens, and for one at least."""
        most = max(1, min(self.values["num_tokens_to_generate"], room))
        return SamplingParams(**{**self.values, "num_tokens_to_generate": most})

    def said(self) -> str:
        """The settings in one line, where they come from, and how to change them."""
        shown = {**self.values, "seed": self.seed}
        names = sorted(shown, key=[*OPTIONS, *shown].index)
        each = (f"{name}={shown[name]} ({self.sources[name]})" for name in names)
        said = f"sampling with {', '.join(each)}; change it with {', '.join(OPTIONS.values())}"
        if OF_MODEL in self.sources.values():
            return said
        return f"{said}, or take the model's own with --generation-config"
