"""Checks what a user asks, and makes it a command that the scheduler can always serve."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from megatron_async.config import as_integer
from megatron_async.engine.commands import AddRequest, UpdateSamplingParams
from megatron_async.errors import RequestError
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from megatron_async.scheduler.limits import Limits
from megatron_async.step.slot_fields import Values, request_values

CHANGEABLE = ("temperature", "top_k", "top_p", "seed")
"""Parameters of a running request that may change."""
MAX_PRIORITY = 10**6
MASK64 = 2**64 - 1


class PromptTokenizer(Protocol):
    """The controller's part that makes token ids of text."""

    tokenizer: Any

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Token ids of a text prompt."""


def derive_seed(engine_seed: int, request_id: int) -> int:
    """A request's seed when it brings none: splitmix64 (Steele et al., 2014), as int64."""
    z = (engine_seed * 0x9E3779B97F4A7C15 + (request_id + 1) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


class RequestValidator:
    """Checks requests against the model, the cache and themselves."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        limits: Limits,
        *,
        vocab_size: int,
        max_sequence_length: int,
        random_seed: int,
        eos_token_ids: tuple[int, ...] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._max_sequence_length = max_sequence_length
        self._random_seed = random_seed
        self._eos_token_ids = eos_token_ids

    def add(
        self,
        key: int,
        request_id: int,
        prompt: str | list[int] | torch.Tensor,
        params: SamplingParams | None,
        priority: object,
    ) -> tuple[AddRequest, SamplingParams]:
        """The command that queues a request, and its parameters, checked.

        Raises:
            RequestError: names the value that cannot be served and what to change.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}, not SamplingParams")
        params = params.checked()
        number = as_integer(priority)
        if number is None or abs(number) > MAX_PRIORITY:
            raise RequestError(
                f"priority={priority!r} must be an integer of at most {MAX_PRIORITY:,}"
            )
        text, tokens = self._tokens(prompt, params)
        max_new = self._max_new(len(tokens), params)
        self._check_fits(len(tokens) + max_new)
        command = AddRequest(
            key,
            request_id,
            text,
            tuple(tokens),
            max_new,
            self._stop_ids(params),
            self.values(request_id, params),
            number,
            params.serialize(),
        )
        return command, params

    def update(
        self, key: int, params: SamplingParams, changes: dict[str, Any]
    ) -> UpdateSamplingParams:
        """The command that changes the sampling parameters of a request, which are ``params``.

        Raises:
            RequestError: a parameter cannot be changed, or has a wrong value.
        """
        for name in changes:
            if name not in CHANGEABLE:
                raise RequestError(
                    f"{name} of a running request cannot be changed; {', '.join(CHANGEABLE)} can"
                )
        checked = dataclasses.replace(params, **changes).checked()
        return UpdateSamplingParams(key, {name: getattr(checked, name) for name in changes})

    def values(self, request_id: int, params: SamplingParams) -> Values:
        """The values of the REQUEST slot fields."""
        if params.seed is None:
            params = dataclasses.replace(params, seed=derive_seed(self._random_seed, request_id))
        return request_values(params)

    def _tokens(
        self, prompt: str | list[int] | torch.Tensor, params: SamplingParams
    ) -> tuple[str | None, list[int]]:
        text = None
        if isinstance(prompt, str):
            text = prompt
            tokens = self._tokenizer.tokenize_prompt(prompt, params.add_BOS)
        elif isinstance(prompt, torch.Tensor):
            if prompt.dim() != 1 or prompt.is_floating_point():
                raise RequestError(
                    f"prompt is a {prompt.dtype} tensor of shape {tuple(prompt.shape)}; "
                    "give a vector of integer token ids"
                )
            tokens = prompt.tolist()
        elif isinstance(prompt, (list, tuple)):
            tokens = list(prompt)
        else:
            raise RequestError(
                f"prompt is a {type(prompt).__name__}; give text or a list of token ids"
            )
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        for index, token in enumerate(tokens):
            number = as_integer(token)
            if number is None:
                raise RequestError(f"the prompt holds {token!r}; every token id must be an integer")
            tokens[index] = number
            if not 0 <= number < self._vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token}; the model's ids are "
                    f"0 .. {self._vocab_size - 1}"
                )
        return text, tokens

    def _max_new(self, prompt_length: int, params: SamplingParams) -> int:
        limit = self._max_sequence_length
        if prompt_length >= limit:
            raise RequestError(
                f"the prompt has {prompt_length} tokens and the model's maximum sequence length is "
                f"{limit}; shorten the prompt to at most {limit - 1} tokens"
            )
        max_new = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            max_new = params.num_tokens_total - prompt_length
            if max_new < 1:
                raise RequestError(
                    f"num_tokens_total={params.num_tokens_total} leaves nothing to generate after "
                    f"a prompt of {prompt_length} tokens; use at least {prompt_length + 1}"
                )
        if max_new is None:
            return limit - prompt_length
        if prompt_length + max_new > limit:
            raise RequestError(
                f"a prompt of {prompt_length} tokens and {max_new} to generate exceed the maximum "
                f"sequence length of {limit}; generate at most {limit - prompt_length}"
            )
        return max_new

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        if params.termination_id is None:
            ids: tuple[int, ...]
            if self._eos_token_ids is not None:
                ids = self._eos_token_ids
            else:
                eod = getattr(self._tokenizer.tokenizer, "eod", None)
                ids = () if eod is None else (int(eod),)
        else:
            ids = () if params.termination_id < 0 else (params.termination_id,)
        unique = tuple(dict.fromkeys((*ids, *(params.stop_token_ids or ()))))
        if len(unique) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"{len(unique)} stop-token ids were given; the most is {MAX_STOP_TOKEN_IDS}"
            )
        return unique

    def _check_fits(self, max_total: int) -> None:
        size = self._limits.block_size
        need = -(-(max_total - 1) // size)  # the last token is never written
        if need > self._limits.block_count:
            raise RequestError(
                f"the request may need {need} KV blocks of {size} tokens and "
                f"the cache has {self._limits.block_count}; raise buffer_size_gb or block_count, "
                "or generate fewer tokens"
            )
