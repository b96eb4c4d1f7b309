"""What an engine says of tokens that it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_async.errors import IntegrityError
from megatron_async.request.request import DynamicInferenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The model's distributions along a sequence. Entry i of each is about ``tokens[i + 1]``, which
    stands behind the first i + 1.

    Attributes:
        tokens: as they were given.
        log_probs: the model's, of each token but the first.
        ranks: places of these tokens among all, from 1 for the most likely one.
        entropies: of the distributions, in nats.
        top: the most likely tokens with their log-probabilities, by token id, the most likely
            first; empty without ``top_n``.
        hidden_states: of each token, the last one included, behind the layers that were asked for:
            a tensor ``[tokens, layers, hidden]`` on the CPU, in the model's dtype; None without.
        weight_version: of the weights that it is of; earlier positions may be of others where new
            ones came meanwhile with ``recompute_kv_cache=False``.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    ranks: tuple[int, ...]
    entropies: tuple[float, ...]
    top: tuple[dict[int, float], ...]
    weight_version: int
    hidden_states: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, request: DynamicInferenceRequest) -> Score:
        """The score of a finished request's prompt, whose log-probabilities were asked for.

        Raises:
            IntegrityError: some are missing.
        """
        log_probs, ranks = request.prompt_log_probs, request.prompt_token_ranks
        entropies, count = request.prompt_entropies, len(request.prompt_tokens) - 1
        if any(each is None or len(each) != count for each in (log_probs, ranks, entropies)):
            raise IntegrityError(f"request {request.request_id} lacks some of {count} scores")
        hidden = request.prompt_hidden_states
        if request.sampling_params.prompt_hidden_states and len(hidden) != count + 1:
            raise IntegrityError(f"request {request.request_id} lacks some hidden states")
        return cls(
            tokens=tuple(request.prompt_tokens),
            log_probs=tuple(log_probs or ()),
            ranks=tuple(ranks or ()),
            entropies=tuple(entropies or ()),
            top=tuple(request.prompt_top_n_logprobs or ()),
            weight_version=request.weight_spans[0].version,
            hidden_states=hidden,
        )
