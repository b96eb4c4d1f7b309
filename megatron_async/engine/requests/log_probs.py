"""Log-probabilities, from the words of a record to the records of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_async.errors import IntegrityError
from megatron_async.request.request import DynamicInferenceRequest, TokenLogProbs
from megatron_async.step.extras import LOG_PROB_WORDS, MAX_TOP_LOG_PROBS

TokenName = Callable[[int], str]
"""What a token is called in a request's ``top_n`` lists, in place of its id."""


def read_log_probs(words: Any, n: int) -> list[TokenLogProbs]:
    """The log-probabilities of positions, with the ``n`` most likely tokens of each.

    Args:
        words: int32 or float32 [positions, LOG_PROB_WORDS or more], as in ``step/extras.py``.
            Where the vocabulary has fewer tokens than a position has places, the ids that are left
            are -1.
    """
    log_probs = words.view(np.float32)
    each = log_probs[:, 0].tolist()
    if not n:
        return [TokenLogProbs(own, {}) for own in each]
    first = 1 + MAX_TOP_LOG_PROBS
    ids = words.view(np.int32)[:, 1 : 1 + n].tolist()
    rows = zip(each, ids, log_probs[:, first : first + n].tolist(), strict=True)
    return [
        TokenLogProbs(own, {id: of for id, of in zip(top, of_top, strict=True) if id >= 0})
        for own, top, of_top in rows
    ]


def names_of(tokenizer: Any) -> TokenName:
    """The text of a token; nothing of one that the tokenizer cannot show, as of padding behind its
    vocabulary: log-probabilities are made in the midst of a step."""

    def name(token: int) -> str:
        try:
            return str(tokenizer.detokenize([token]))
        except Exception:
            return ""

    return name


def tops_by_text(top: dict[int, float], name: TokenName) -> dict[str, float]:
    """The most likely tokens by text, as megatron-core has them; of tokens with the same text, such
    as parts of characters, the likeliest."""
    named: dict[str, float] = {}
    for token, log_prob in top.items():
        named.setdefault(name(token), log_prob)
    return named


def start_log_probs(request: DynamicInferenceRequest) -> None:
    """Give the request empty lists for what it asks; the others stay None."""
    params = request.sampling_params
    top = params.top_n_logprobs > 0
    if not params.wants_log_probs:
        return
    request.generated_log_probs = []
    request.generated_top_n_logprobs = [] if top else None
    if params.wants_prompt_log_probs:
        request.prompt_log_probs = []
        request.prompt_token_ranks = []
        request.prompt_entropies = []
        request.prompt_top_n_logprobs = [] if top else None


def add_generated(
    request: DynamicInferenceRequest, words: Any, name: TokenName | None = None
) -> list[TokenLogProbs]:
    """Append the log-probabilities of generated tokens, ``words`` [tokens, LOG_PROB_WORDS]; returns
    them, by token id. Nothing when the request has not asked."""
    if request.generated_log_probs is None:
        return []
    each = read_log_probs(words, request.sampling_params.top_n_logprobs)
    _extend(request.generated_log_probs, request.generated_top_n_logprobs, each, name)
    return each


def add_forced(
    request: DynamicInferenceRequest, each: list[TokenLogProbs], name: TokenName | None = None
) -> None:
    """Append the log-probabilities of forced tokens, which were prefilled, to those of generated
    ones."""
    if request.generated_log_probs is not None:
        _extend(request.generated_log_probs, request.generated_top_n_logprobs, each, name)


def of_forced(
    request: DynamicInferenceRequest, known: int, first: int, words: Any
) -> list[TokenLogProbs]:
    """The log-probabilities of forced tokens, behind the ``known`` first of them, among ``words``
    of prefilled tokens from position ``first`` on.

    Raises:
        IntegrityError: some in between have not come.
    """
    due = len(request.prompt_tokens) + known
    if first > due:
        raise IntegrityError(
            f"request {request.request_id}: log-probabilities of position {first} have come before "
            f"those of {due}"
        )
    new = words[due - first :]
    return read_log_probs(new, request.sampling_params.top_n_logprobs) if len(new) else []


def add_of_prompt(
    request: DynamicInferenceRequest, first: int, words: Any, name: TokenName | None = None
) -> None:
    """Append the log-probabilities, ranks and entropies of prompt tokens, ``words`` [tokens,
    PROMPT_LOG_PROB_WORDS], of which the first has position ``first``.

    What has come before stays: a prompt computed again after an eviction adds nothing twice.

    Raises:
        IntegrityError: positions before ``first`` have not come.
    """
    known, ranks = request.prompt_log_probs, request.prompt_token_ranks
    entropies = request.prompt_entropies
    if known is None or ranks is None or entropies is None:
        return
    due = 1 + len(known)  # the first prompt token has none
    if due == len(request.prompt_tokens):
        return  # what is prefilled behind them is forced
    if first > due:
        raise IntegrityError(
            f"request {request.request_id}: prompt log-probabilities of position {first} have come "
            f"before those of {due}"
        )
    new = words[due - first : len(request.prompt_tokens) - first]
    if len(new):
        each = read_log_probs(new, request.sampling_params.top_n_logprobs)
        _extend(known, request.prompt_top_n_logprobs, each, name)
        ranks += new.view(np.int32)[:, LOG_PROB_WORDS].tolist()
        entropies += new.view(np.float32)[:, LOG_PROB_WORDS + 1].tolist()


def _extend(
    own: list[float], top: list[Any] | None, each: list[TokenLogProbs], name: TokenName | None
) -> None:
    own += [item.log_prob for item in each]
    if top is not None:
        top += [item.top if name is None else tops_by_text(item.top, name) for item in each]
