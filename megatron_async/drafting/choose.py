"""What drafts in an engine."""

from __future__ import annotations

from typing import Literal, NamedTuple

from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import ConfigError
from megatron_async.models.served import ModelDescription, ServedModel
from megatron_async.runner.drafter import Drafter
from megatron_async.runner.memory.forward_batch import ForwardBatch

Source = Literal["nothing", "itself", "model", "ngram", "mtp", "grammar"]


class Drafting(NamedTuple):
    """How an engine drafts.

    Args:
        source: the network ``itself``, another ``model``, prompt look-up, MTP layers, or grammars
            alone.
        lookahead: positions behind the window of a row to which it writes.
        wants_tokens: admissions must bring the tokens of their requests.
        needs_guesses: rows have no drafts but those that the host has guessed.
    """

    source: Source = "nothing"
    lookahead: int = 0
    wants_tokens: bool = False
    needs_guesses: bool = False


def choose_drafting(
    model: ModelDescription, drafts: int, config: EngineConfig, *, has_draft_model: bool
) -> Drafting:
    """Choose how an engine over such a model drafts ``drafts`` tokens.

    Raises:
        ConfigError: the model cannot.
    """
    if not drafts:
        return Drafting()
    if model.drafts_itself:
        return Drafting("itself")
    if has_draft_model:
        # The window's last token and all drafts but the last are written behind the window.
        return Drafting("model", drafts)
    if config.speculative_method == "ngram":
        return Drafting("ngram", wants_tokens=True)
    if config.speculative_method == "grammar":
        if not config.enable_sampling_extras:
            raise ConfigError(
                "speculative_method='grammar' drafts nothing with enable_sampling_extras=False, "
                "which refuses structured outputs; turn it on, or leave the method out"
            )
        return Drafting("grammar", needs_guesses=True)
    if not model.mtp_layers:
        raise ConfigError(
            f"num_speculative_tokens={drafts} but the model has no layers for multi-token "
            "prediction; leave it out, or add speculative_method='ngram' or draft_model"
        )
    return Drafting("mtp", max(0, drafts - model.mtp_layers))


def layers_draft(config: EngineConfig, *, has_draft_model: bool) -> bool:
    """Whether a model's own MTP layers are to draft, so that the KV cache has theirs."""
    drafts = config.num_speculative_tokens > 0 and config.speculative_method == "mtp"
    return drafts and not has_draft_model


def make_drafter(
    source: Source, model: ServedModel, batch: ForwardBatch, max_rows: int
) -> Drafter | None:
    """What drafts in steps of up to ``max_rows`` rows."""
    match source:
        case "itself":
            made: Drafter = model.network.make_drafter(batch, max_rows)
            return made
        case "model":
            from megatron_async.drafting.model import ModelDrafter

            return ModelDrafter(model.draft, batch)
        case "ngram":
            from megatron_async.drafting.ngram import NgramDrafter

            return NgramDrafter(batch)
        case "grammar":
            from megatron_async.drafting.grammar import GrammarDrafter

            return GrammarDrafter()
        case "mtp":
            from megatron_async.drafting.mtp import MtpDrafter

            return MtpDrafter(model.network, batch, max_rows)
        case "nothing":
            return None
