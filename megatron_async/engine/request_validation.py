"""Checks what a user asks, and makes it a command that the scheduler can always serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from megatron_async.config import as_integer
from megatron_async.engine.commands import AddRequest, Command, UpdateSamplingParams
from megatron_async.engine.guidance import Grammars
from megatron_async.errors import ConfigError, RequestError, RequestTooLongError, shown
from megatron_async.parameter_checks import check_vocabulary
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.limits import Limits
from megatron_async.step.extras import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    NO_EXTRAS,
    NO_LOG_PROBS,
    PROCESSED_LOG_PROBS,
    RAW_LOG_PROBS,
    Extras,
)
from megatron_async.step.slot_fields import Source, Values, fields_from, request_values

CHANGEABLE = ("temperature", "top_k", "top_p", "seed", "num_speculative_tokens")
"""Parameters of a running request that may change."""
MAX_PRIORITY = 10**6
LOG_PROBS_OF = {"raw": RAW_LOG_PROBS, "processed": PROCESSED_LOG_PROBS}
ASKED_BY = {
    "log_probs": "return_log_probs or top_n_logprobs",
    "min_total": "min_tokens",
    "stop_ids": "min_tokens",
    "bias": "logit_bias",
    "allowed": "allowed_token_ids",
    "banned": "bad_words",
    "guided": "structured_outputs or logits_processors",
}
"""Sampling parameters behind the fields of ``Extras`` that have other names."""
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


def seed_of(values: Values) -> int:
    """The seed among the values of the REQUEST slot fields."""
    names = (field.name for field in fields_from(Source.REQUEST))
    return int(dict(zip(names, values, strict=True))["seed"])  # type: ignore[arg-type]


def has_filters(values: Values) -> bool:
    """Whether the values of the REQUEST slot fields ask for top-k or top-p, now or in case that the
    request is sampled later."""
    names = (field.name for field in fields_from(Source.REQUEST))
    found: dict[str, Any] = dict(zip(names, values, strict=True))
    return bool(found["top_k"] > 0 or 0 < found["top_p"] < 1)


def filters(params: SamplingParams) -> bool:
    """:func:`has_filters` of parameters."""
    return has_filters(request_values(dataclasses.replace(params, seed=0)))


class RequestValidator:
    """Checks requests against the model, the cache and themselves.

    Args:
        eos_token_ids: the model's own end tokens; None takes the tokenizer's ``eod``.
        has_ranks: the model is on several ranks.
        filters_need_extras: top-k and top-p need the extended S too: on GPUs of which each has some
            columns of the logits.

    Attributes:
        eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        limits: Limits,
        *,
        vocab_size: int,
        max_sequence_length: int,
        random_seed: int,
        eos_token_ids: tuple[int, ...] | None,
        grammars: Grammars,
        extras_enabled: bool,
        has_ranks: bool = False,
        filters_need_extras: bool = False,
    ) -> None:
        self._has_ranks = has_ranks
        self._filters_need_extras = filters_need_extras
        self._grammars = grammars
        self._extras_enabled = extras_enabled
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._max_sequence_length = max_sequence_length
        self._random_seed = random_seed
        if eos_token_ids is None:
            eod = getattr(tokenizer.tokenizer, "eod", None)
            eos_token_ids = () if eod is None else (int(eod),)
        self.eos_token_ids = eos_token_ids
        wrapper = getattr(tokenizer, "inference_wrapped_model", None)
        self.sampling_defaults: dict[str, Any] = getattr(wrapper, "sampling_defaults", None) or {}
        """Of requests without parameters."""

    def add(
        self,
        key: int,
        request_id: int,
        prompt: str | list[int] | torch.Tensor,
        params: SamplingParams | None,
        priority: object,
    ) -> tuple[AddRequest, SamplingParams]:
        """The command that queues a request, or the first of its sequences, and its parameters,
        checked.

        Raises:
            RequestError: names the value that cannot be served and what to change.
        """
        params = params if params is not None else SamplingParams(**self.sampling_defaults)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}, not SamplingParams")
        params = params.checked()
        if self._has_ranks and params.logits_processors:
            raise RequestError(
                "logits_processors are functions of rank 0, and a model of several ranks has no "
                "whole logits there: leave them out, or load the model on one rank"
            )
        number = as_integer(priority)
        if number is None or abs(number) > MAX_PRIORITY:
            raise RequestError(
                f"priority={priority!r} must be an integer of at most {MAX_PRIORITY:,}"
            )
        text, tokens = self.tokens(prompt, params)
        max_new = self._max_new(len(tokens), params)
        self._check_fits(len(tokens) + max_new)
        self._check_texts(params)
        self._check_drafts(params)
        stop_ids = self._stop_ids(params)
        sampled = params.for_ranking()
        extras = self._extras(sampled, stop_ids, len(tokens))
        command = AddRequest(
            key,
            request_id,
            text,
            tuple(tokens),
            max_new,
            stop_ids,
            self.values(request_id, params),
            number,
            sampled.serialize(),
            None if extras == NO_EXTRAS else tuple(extras),
            sampled.wants_prompt_log_probs,
        )
        return command, params

    def compile_grammar(self, params: SamplingParams | None) -> None:
        """Compile what :meth:`add` needs of these parameters, which takes up to a second: for
        threads that must not stand still in it.

        Raises:
            RequestError: it cannot be compiled.
        """
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

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
        self._check_drafts(checked)
        if self._filters_need_extras and filters(checked) and not filters(params):
            raise RequestError(
                "top_k and top_p cannot be turned on while a request runs on a model whose "
                "vocabulary is divided over GPUs; add the request with one of them"
            )
        return UpdateSamplingParams(key, {name: getattr(checked, name) for name in changes})

    def check_replay(self, commands: Iterable[Command]) -> None:
        """Raises ConfigError where a recorded run turns on what :meth:`update` refuses."""
        if not self._filters_need_extras:
            return
        plain: dict[int, SamplingParams] = {}
        for command in commands:
            if isinstance(command, AddRequest) and self.extras_of(command) is None:
                plain[command.key] = SamplingParams.deserialize(command.params)
            elif isinstance(command, UpdateSamplingParams) and command.key in plain:
                params = plain[command.key] = dataclasses.replace(
                    plain[command.key], **command.changes
                )
                if filters(params):
                    raise ConfigError(
                        "the run turns top_k or top_p on while a request runs, which a model whose "
                        "vocabulary is divided over GPUs cannot repeat: replay it with "
                        "tensor_model_parallel_size=1"
                    )

    def values(self, request_id: int, params: SamplingParams) -> Values:
        """The values of the REQUEST slot fields."""
        return request_values(dataclasses.replace(params, seed=self.seed(request_id, params.seed)))

    def extras_of(self, command: AddRequest) -> Extras | None:
        """What S is asked for a request; None for what the plain S does."""
        if command.extras is not None:
            return Extras(*command.extras)
        if self._filters_need_extras and has_filters(command.values):
            return NO_EXTRAS
        return None

    def seed(self, request_id: int, given: int | None) -> int:
        """A request's seed, derived from the engine's unless it is given."""
        return derive_seed(self._random_seed, request_id) if given is None else given

    def tokens(
        self, prompt: str | list[int] | torch.Tensor, params: SamplingParams
    ) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it is one, and its token ids; raises :class:`RequestError`."""
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
            raise RequestTooLongError(
                f"the prompt has {prompt_length} tokens and the model's maximum sequence length is "
                f"{limit}; shorten the prompt to at most {limit - 1} tokens"
            )
        max_new = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            max_new = params.num_tokens_total - prompt_length
            if max_new < 1:
                raise RequestTooLongError(
                    f"num_tokens_total={params.num_tokens_total} leaves nothing to generate after "
                    f"a prompt of {prompt_length} tokens; use at least {prompt_length + 1}"
                )
        if max_new is None:
            max_new = limit - prompt_length
        if params.min_tokens > max_new:
            raise RequestError(
                f"min_tokens={params.min_tokens} exceeds the {max_new} tokens that the request may "
                f"generate after a prompt of {prompt_length}; lower it"
            )
        if prompt_length + max_new > limit:
            name = (
                "num_tokens_to_generate" if params.num_tokens_total is None else "num_tokens_total"
            )
            raise RequestTooLongError(
                f"{name}={getattr(params, name)}: a prompt of {prompt_length} tokens and {max_new} "
                f"to generate exceed the maximum sequence length of {limit}; generate at most "
                f"{limit - prompt_length}"
            )
        return max_new

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = ids = self.eos_token_ids
        if params.termination_id is not None:
            ids = () if params.termination_id < 0 else (params.termination_id,)
            check_vocabulary("termination_id", ids, self._vocab_size)
        if params.ignore_eos:
            ids = tuple(token for token in ids if token not in own)
        further = tuple(params.stop_token_ids or ())
        check_vocabulary("stop_token_ids", further, self._vocab_size)
        return tuple(dict.fromkeys((*ids, *further)))

    def _check_drafts(self, params: SamplingParams) -> None:
        most, asked = self._limits.window - 1, params.num_speculative_tokens
        if asked is not None and asked > most:
            raise RequestError(
                f"num_speculative_tokens={asked} exceeds the engine's {most}; lower it, leave it "
                "out, or serve the model with more"
            )

    def _check_texts(self, params: SamplingParams) -> None:
        """Texts that are looked for need a tokenizer."""
        if self._tokenizer.tokenizer is not None:
            return
        for name, instead in (("stop_words", "stop_token_ids"), ("bad_words", "bad_words")):
            if any(isinstance(text, str) for text in getattr(params, name) or ()):
                raise RequestError(
                    f"{name} has texts, and the model has no tokenizer; give token ids in {instead}"
                )

    # --- extras -------------------------------------------------------------------------------

    def _extras(
        self, params: SamplingParams, stop_ids: tuple[int, ...], prompt_length: int
    ) -> Extras:
        """What S is asked beyond the REQUEST slot fields. Values that change nothing are left at
        the defaults."""
        stops = tuple(sorted(token for token in stop_ids if token < self._vocab_size))
        has_least = params.min_tokens > 0 and bool(stops)
        biases = params.logit_bias or {}
        check_vocabulary("logit_bias", biases, self._vocab_size)
        allowed = self._allowed(params)
        banned, bad_words = self._bad_words(params)
        extras = Extras(
            log_probs=LOG_PROBS_OF[params.log_probs_mode]
            if params.wants_log_probs
            else NO_LOG_PROBS,
            min_p=params.min_p,  # of a greedy request too: it may be sampled later
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_total=prompt_length + params.min_tokens if has_least else 0,
            stop_ids=stops if has_least else (),
            bias=tuple(sorted((token, bias) for token, bias in biases.items() if bias)),
            allowed=allowed,
            banned=banned,
            bad_words=bad_words,
            guided=self._is_guided(params),
        )
        if self._filters_need_extras and not self._extras_enabled and filters(params):
            raise RequestError(
                "top_k and top_p need enable_sampling_extras=True where the vocabulary is divided "
                "over GPUs; turn it on, or leave them out"
            )
        self._check_extras(extras)
        self._check_candidates(extras)
        return extras

    def _is_guided(self, params: SamplingParams) -> bool:
        """S needs all tokens before: for a grammar's masks, or for Python functions."""
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)
        return params.structured_outputs is not None or bool(params.logits_processors)

    def _check_extras(self, extras: Extras) -> None:
        if not self._extras_enabled and extras != NO_EXTRAS:
            pairs = zip(extras._asdict().items(), NO_EXTRAS, strict=True)
            changed = (name for (name, value), default in pairs if value != default)
            asked = dict.fromkeys(ASKED_BY.get(name, name) for name in changed)
            raise RequestError(
                f"{', '.join(asked)} cannot be served with enable_sampling_extras=False in the "
                "engine's configuration; turn it on, or ask for none of penalties, filters, "
                "log-probabilities, structured outputs and logits processors"
            )

    def _allowed(self, params: SamplingParams) -> tuple[int, ...] | None:
        if params.allowed_token_ids is None:
            return None
        check_vocabulary("allowed_token_ids", params.allowed_token_ids, self._vocab_size)
        ids = tuple(sorted(params.allowed_token_ids))
        return None if len(ids) == self._vocab_size else ids

    def _bad_words(
        self, params: SamplingParams
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Tokens that are bad words by themselves, and token sequences of the others."""
        banned: set[int] = set()
        longer: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for tokens in self._tokenized(word) if isinstance(word, str) else (tuple(word),):
                check_vocabulary("bad_words", tokens, self._vocab_size)
                if len(tokens) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words has {shown(word)}, which is {len(tokens)} tokens; the most is "
                        f"{MAX_BAD_WORD_TOKENS}"
                    )
                if len(tokens) == 1:
                    banned.add(tokens[0])
                else:
                    longer[tokens] = None
        if len(longer) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(longer)} token sequences; the most is {MAX_BAD_WORDS}"
            )
        return tuple(sorted(banned)), tuple(longer)

    def _tokenized(self, word: str) -> list[tuple[int, ...]]:
        """Token sequences of a bad word, as in vLLM: at the start of a text, and behind a space
        where a tokenizer makes another first token of that and the length stays."""
        word = word.lstrip()
        try:
            first, inside = (
                tuple(self._tokenizer.tokenize_prompt(text)) for text in (word, f" {word}")
            )
        except RequestError as error:
            raise RequestError(f"bad_words has {shown(word)}: {error}") from None
        if not first:
            raise RequestError(f"bad_words has {shown(word)}, of which the tokenizer makes nothing")
        differs = len(inside) == len(first) and inside[0] != first[0]
        return [first, inside] if differs else [first]

    def _check_candidates(self, extras: Extras) -> None:
        """Raises RequestError when no token at all may be the first one."""
        never = {*extras.banned, *extras.stop_ids}
        allowed = range(self._vocab_size) if extras.allowed is None else extras.allowed
        if len(never) >= len(allowed) and never.issuperset(allowed):
            raise RequestError(
                f"no token is left to generate: allowed_token_ids allows {len(allowed)}, bad_words "
                f"bans {len(extras.banned)}, and min_tokens holds back {len(extras.stop_ids)} that "
                "would end the request; allow more"
            )

    def _check_fits(self, max_total: int) -> None:
        size = self._limits.block_size
        need = -(-(max_total - 1) // size)  # the last token is never written
        if need > self._limits.block_count:
            raise RequestTooLongError(
                f"the request may need {need} KV blocks of {size} tokens and "
                f"the cache has {self._limits.block_count}; raise buffer_size_gb or block_count, "
                "or generate fewer tokens"
            )
