"""What ``generate`` hands out besides the ids, one entry per token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from megatron_async.contrib.transformers.stopping.cache_rollback import find_cache

Entries = tuple[Any, ...]


class Recorded:
    """Scores, logits, attentions and hidden states, as far as the generation config asks."""

    def __init__(self, config: Any, is_encoder_decoder: bool) -> None:
        self.returned = bool(config.return_dict_in_generate)
        self.is_encoder_decoder = is_encoder_decoder
        asked = {
            "scores": config.output_scores,
            "logits": config.output_logits,
            "attentions": config.output_attentions,
            "hidden_states": config.output_hidden_states,
        }
        if is_encoder_decoder:
            asked["decoder_attentions"] = asked["cross_attentions"] = asked.pop("attentions")
            asked["decoder_hidden_states"] = asked.pop("hidden_states")
        self._entries: dict[str, Entries | None] = {
            name: () if self.returned and wanted else None for name, wanted in asked.items()
        }

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        return self._entries["scores"]

    def add(self, outputs: Any, logits: Tensor, scores: Tensor) -> None:
        """Take the entries of one token."""
        for name, entries in self._entries.items():
            if entries is None:
                continue
            new = {"scores": scores, "logits": logits}.get(name)
            self._entries[name] = (*entries, getattr(outputs, name) if new is None else new)

    def cut(self, steps: int) -> None:
        """Keep the first ``steps`` tokens."""
        for name, entries in self._entries.items():
            self._entries[name] = None if entries is None else entries[:steps]

    def result(self, input_ids: Tensor, model_kwargs: dict[str, Any], config: Any) -> Any:
        """What stock ``generate`` returns."""
        if not self.returned:
            return input_ids
        cache = find_cache(model_kwargs)
        if not self.is_encoder_decoder:
            return GenerateDecoderOnlyOutput(
                sequences=input_ids, past_key_values=cache, **self._entries
            )
        encoder = model_kwargs["encoder_outputs"]
        return GenerateEncoderDecoderOutput(
            sequences=input_ids,
            past_key_values=cache,
            encoder_attentions=encoder.get("attentions") if config.output_attentions else None,
            encoder_hidden_states=(
                encoder.get("hidden_states") if config.output_hidden_states else None
            ),
            **self._entries,
        )
