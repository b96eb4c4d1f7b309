"""Which drafter an engine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_async.config import EngineConfig
from megatron_async.errors import ConfigError
from megatron_async.runner.context import DynamicInferenceContext
from megatron_async.runner.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an engine drafts.

    Args:
        make: the drafter, from a context and the most rows of a step.
        lookahead: positions behind the window of a row to which it writes.
        wants_tokens: admissions must bring the tokens of their requests.
    """

    make: Callable[[DynamicInferenceContext, int], Drafter | None]
    lookahead: int = 0
    wants_tokens: bool = False


def choose_drafting(model: Any, drafts: int, config: EngineConfig) -> Drafting:
    """Choose how an engine over a wrapped model drafts ``drafts`` tokens.

    Raises:
        ConfigError: the model cannot.
    """
    if not drafts:
        return Drafting(lambda context, max_rows: None)
    if hasattr(model, "make_drafter"):
        return Drafting(model.make_drafter)
    draft_model = getattr(model, "draft_model", None)
    if draft_model is not None:
        from megatron_async.drafting.model import ModelDrafter

        # The window's last token and all drafts but the last are written behind the window.
        return Drafting(lambda context, max_rows: ModelDrafter(draft_model, context), drafts)
    if config.speculative_method == "ngram":
        from megatron_async.drafting.ngram import NgramDrafter

        return Drafting(lambda context, max_rows: NgramDrafter(context), wants_tokens=True)
    layers = mtp_layers(model)
    if not layers:
        raise ConfigError(
            f"num_speculative_tokens={drafts} but the model has no layers for multi-token "
            "prediction; leave it out, or add speculative_method='ngram' or draft_model"
        )
    from megatron_async.drafting.mtp import MtpDrafter

    needed: int = model.kv_cache_spec.num_layers

    def make(context: DynamicInferenceContext, max_rows: int) -> Drafter:
        if (has := context.kv_cache.shape[0]) < needed:
            raise ConfigError(
                f"the context has num_layers={has} and drafts by multi-token prediction need "
                f"{needed}; build it with those, or with num_speculative_tokens=0"
            )
        return MtpDrafter(model, context, max_rows)

    return Drafting(make, lookahead=max(0, drafts - layers))


def layers_draft(model: Any, config: EngineConfig) -> bool:
    """Whether a wrapped model's own MTP layers are to draft, so that the KV cache has theirs."""
    return (
        config.num_speculative_tokens > 0
        and config.speculative_method == "mtp"
        and getattr(model, "draft_model", None) is None
    )


def mtp_layers(model: Any) -> int:
    """How many MTP layers a wrapped model has."""
    gpt: Any = getattr(model, "model", None)
    return len(gpt.mtp.layers) if getattr(gpt, "mtp_process", False) else 0
