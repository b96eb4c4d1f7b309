"""Log-probabilities of the hash model's requests against a float64 softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import pytest

from megatron_async.request.request import DynamicInferenceRequest
from tests.support.hash_model import hash_history, hash_logits

History = Callable[[list[int], int], int]


@functools.lru_cache(maxsize=4096)
def _log_softmax(tokens: tuple[int, ...], salt: int, history: History) -> list[float]:
    row = hash_logits(history(list(tokens), salt))
    top = max(row)
    total = math.log(sum(math.exp(value - top) for value in row))
    return [value - top - total for value in row]


def check_log_probs(
    request: DynamicInferenceRequest,
    salts: Sequence[tuple[int, int]] = (),
    *,
    of_prompts: bool = True,
    history: History = hash_history,
) -> None:
    """Those that were asked for are there, one for each token, within 1e-5, and no others.

    Args:
        salts: (first generated token, salt of the model) in order; 0 before.
        of_prompts: the prompt was computed with salt 0, and never with another.
        history: that of the model.
    """
    params, prompt = request.sampling_params, request.prompt_tokens
    tokens = prompt + request.generated_tokens
    wanted = params.return_log_probs or params.top_n_logprobs > 0
    of_prompt = wanted and not params.skip_prompt_log_probs
    assert (request.generated_log_probs is not None) == wanted
    assert (request.prompt_log_probs is not None) == of_prompt
    assert (request.generated_top_n_logprobs is not None) == (params.top_n_logprobs > 0)
    if not wanted:
        return
    values, tops = request.generated_log_probs, request.generated_top_n_logprobs
    assert values is not None and len(values) == len(request.generated_tokens)
    assert tops is None or len(tops) == len(values)
    if params.log_probs_mode == "raw":
        for index, value in enumerate(values):
            salt = next((s for start, s in reversed(salts) if start <= index), 0)
            at = len(prompt) + index
            _check(tokens, at, salt, value, tops and tops[index], history)
    if of_prompt and of_prompts:
        values, tops = request.prompt_log_probs, request.prompt_top_n_logprobs
        assert values is not None
        if request.generated_tokens:
            assert len(values) == len(prompt) - 1
        for index, value in enumerate(values):
            _check(tokens, 1 + index, 0, value, tops and tops[index], history)


def _check(
    tokens: list[int],
    at: int,
    salt: int,
    value: float,
    top: dict[int, float] | None,
    history: History,
) -> None:
    row = _log_softmax(tuple(tokens[:at]), salt, history)
    assert value == pytest.approx(row[tokens[at]], abs=1e-5)
    if top is not None:
        # Equal logits give equal values: the lower id comes first.
        best = sorted(range(len(row)), key=lambda v: (-row[v], v))[: len(top)]
        assert list(top) == best
        assert list(top.values()) == pytest.approx([row[v] for v in best], abs=1e-5)
