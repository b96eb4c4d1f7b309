"""The door: turns what a user asks into a sequence that the scheduler can always serve."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megatron_async.config import as_integer
from megatron_async.errors import RequestError
from megatron_async.request import DynamicInferenceRequest
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from megatron_async.scheduler.limits import Limits
from megatron_async.scheduler.request_state import Sequence

MASK64 = 2**64 - 1
LEAST_TOP_P = 1e-37
"""Less would be 0 as float32, which is off; this too keeps the most likely token alone."""


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


class Intake:
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

    def accept(
        self,
        key: int,
        request_id: int,
        prompt: str | list[int] | torch.Tensor,
        params: SamplingParams | None,
    ) -> tuple[DynamicInferenceRequest, Sequence]:
        """The request's public record and the scheduler's.

        Raises:
            RequestError: names the value that cannot be served and what to change.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}, not SamplingParams")
        params = params.checked()
        text, tokens = self._tokens(prompt, params)
        max_new = self._max_new(len(tokens), params)
        stop_ids = self._stop_ids(params)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._random_seed, request_id)
        inverse_temperature = 0.0 if params.greedy else 1.0 / params.temperature
        top_p = max(params.top_p, LEAST_TOP_P) if params.top_p else 0.0
        sampling = (inverse_temperature, min(params.top_k, 2**31 - 1), top_p, seed)
        sequence = Sequence(key, tuple(tokens), max_new, stop_ids, sampling)
        self._check_fits(sequence)
        request = DynamicInferenceRequest(
            request_id=request_id, prompt=text, prompt_tokens=tokens, sampling_params=params
        )
        return request, sequence

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

    def _check_fits(self, sequence: Sequence) -> None:
        need = sequence.worst_case_blocks(self._limits.block_size)
        if need > self._limits.block_count:
            raise RequestError(
                f"the request may need {need} KV blocks of {self._limits.block_size} tokens and "
                f"the cache has {self._limits.block_count}; raise buffer_size_gb or block_count, "
                "or generate fewer tokens"
            )
