"""Which drafter an engine has."""

from __future__ import annotations

from typing import Any

from megatron_async.drafting.mtp import MtpDrafter
from megatron_async.errors import ConfigError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.drafter import Drafter


def mtp_layers(model: Any) -> int:
    """How many MTP layers a wrapped model has."""
    gpt = getattr(model, "model", None)
    return len(gpt.mtp.layers) if getattr(gpt, "mtp_process", False) else 0


def check_drafts(model: Any, drafts: int) -> None:
    """Raises :class:`ConfigError` unless the wrapped ``model`` can draft so many tokens."""
    if drafts and not drafts_itself(model) and not mtp_layers(model):
        raise ConfigError(
            f"num_speculative_tokens={drafts} but the model has no layers "
            "for multi-token prediction; leave it out, or serve a model that has some"
        )


def lookahead(model: Any, drafts: int) -> int:
    """Positions behind the window of a row to which drafting writes."""
    layers = mtp_layers(model)
    return max(0, drafts - layers) if drafts and layers else 0


def drafts_itself(model: Any) -> bool:
    """Whether ``model`` brings a drafter of its own."""
    return hasattr(model, "make_drafter")


def make_drafter(model: Any, context: DynamicInferenceContext, max_rows: int) -> Drafter | None:
    """The drafter of an engine; None if it drafts nothing."""
    if not context.num_speculative_tokens:
        return None
    if drafts_itself(model):
        own: Drafter = model.make_drafter(context, max_rows)
        return own
    return MtpDrafter(model, context, max_rows)
