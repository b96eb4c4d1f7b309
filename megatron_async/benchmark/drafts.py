"""How the engines of ``bench`` and ``trace`` draft: their options, and what came of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from megatron_async.cli.options.values import integer, number, several
from megatron_async.config.engine_config import MAX_DRAFTS, SPECULATIVE_METHODS, EngineConfig
from megatron_async.config.testing_options import TestingOptions
from megatron_async.engine.metrics import EngineCounters, acceptance
from megatron_async.errors import ConfigError

DRAFT_OPTIONS = (
    "num_speculative_tokens", "speculative_method", "draft_model", "mtp_layers",
    "synthetic_acceptance",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drafts:
    """How one engine drafts: ``count`` tokens for each row and step; 0 is plain decoding."""

    count: int = 0
    method: str = "mtp"
    draft_model: str | None = None
    synthetic_acceptance: float | None = None

    @property
    def window(self) -> int:
        """Tokens that a row may bring in a step."""
        return 1 + self.count

    @property
    def said(self) -> str:
        """What is added to the name of a measurement; nothing about plain decoding."""
        return f", window {self.window}" if self.count else ""

    @property
    def config(self) -> dict[str, Any]:
        """Fields of ``EngineConfig``."""
        if not self.count:
            return {}
        return {
            "num_speculative_tokens": self.count,
            "speculative_method": self.method,
            "draft_model": self.draft_model,
            "testing": TestingOptions(synthetic_acceptance=self.synthetic_acceptance),
        }


PLAIN = Drafts()


def add_drafting_options(parser: argparse.ArgumentParser, *, bench: bool) -> None:
    """Add the options for what drafts, and how much; :func:`resolve_drafts` looks at what was
    given."""
    add = parser.add_argument_group("drafts").add_argument
    count: Callable[[str], Any] = integer(1, MAX_DRAFTS)
    said = "tokens that are drafted for each row and step (default: none)"
    if bench:
        said = "drafts of each row and step; plain decoding is measured too (default: none)"
        add("--num-speculative-tokens", type=several(count), metavar="K,...", help=said)
    else:
        add("--num-speculative-tokens", type=count, metavar="K", help=said)
    said = "who drafts: layers for multi-token prediction, what followed when the last tokens came "
    said += "before, or what structured outputs force (default: mtp)"
    add("--speculative-method", choices=SPECULATIVE_METHODS, help=said)
    said = "a model over the same vocabulary that drafts instead"
    add("--draft-model", metavar="tiny|PATH|random:SHAPE", help=said)
    said = "of --shape: random layers for multi-token prediction (default: as many as drafts)"
    add("--mtp-layers", type=integer(1, MAX_DRAFTS), metavar="N", help=said)
    if bench:
        said = "cost only: the device accepts drafts at this seeded rate, whatever the model "
        said += "samples. The tokens mean nothing then"
        add("--synthetic-acceptance", type=number(0, 1), metavar="P", help=said)


def resolve_drafts(args: argparse.Namespace) -> None:
    """Fill in what drafts, where something does.

    Raises:
        ConfigError: an option needs another one, or contradicts it.
    """
    if args.num_speculative_tokens is None:
        for name in DRAFT_OPTIONS:
            if getattr(args, name, None) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} belongs to drafts; add --num-speculative-tokens")
        return
    counts = args.num_speculative_tokens
    most = max(counts) if isinstance(counts, list) else counts
    method = args.speculative_method or "mtp"
    EngineConfig(**Drafts(most, method, args.draft_model).config)
    by_layers = method == "mtp" and args.draft_model is None
    if args.mtp_layers is not None and not (by_layers and args.shape):
        raise ConfigError(
            "--mtp-layers gives a --shape layers that draft; leave it out with --model, "
            "--draft-model or --speculative-method ngram"
        )
    if args.draft_model is None:
        args.speculative_method = method
    if by_layers and args.shape:
        args.mtp_layers = args.mtp_layers or most


def all_drafts(args: argparse.Namespace) -> list[Drafts]:
    """What ``bench`` measures: plain decoding, and each number of drafts that was asked for, the
    most last."""
    given = args.speculative_method or "mtp", args.draft_model, args.synthetic_acceptance
    return [PLAIN, *(Drafts(count, *given) for count in sorted(args.num_speculative_tokens or ()))]


def described(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the options about drafts for the report; None without drafts."""
    if args.num_speculative_tokens is None:
        return None
    return {name: getattr(args, name) for name in DRAFT_OPTIONS}


def draft_figures(counters: Iterable[EngineCounters], tokens_per_step: float) -> dict[str, Any]:
    """Return for a row of the report what rows brought in a step, and what came of the drafts of
    all its runs."""
    runs = list(counters)
    drafted, accepted = (
        [sum(places) for places in zip_longest(*(getattr(run, name) for run in runs), fillvalue=0)]
        for name in ("drafted_by_position", "accepted_by_position")
    )
    return {
        "tokens_per_step": tokens_per_step,
        "acceptance_by_position": acceptance(accepted, drafted),
        "tokens_drafted": sum(drafted),
        "tokens_accepted": sum(accepted),
    }
