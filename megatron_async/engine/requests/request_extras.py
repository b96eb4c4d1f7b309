"""What a request asks of S beyond temperature, top-k, top-p and seed, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

from megatron_async.engine.commands import AddRequest, Command, UpdateSamplingParams
from megatron_async.engine.requests.guidance import Grammars
from megatron_async.errors import ConfigError, RequestError, shown
from megatron_async.request.parameter_checks import check_vocabulary
from megatron_async.sampling_params import SamplingParams
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


class PromptTokenizer(Protocol):
    """What a ``ServedModel`` knows of prompts and of requests without parameters."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def sampling_defaults(self) -> dict[str, Any] | None: ...

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Token ids of a text prompt."""


def _has_filters(values: Values) -> bool:
    """Whether the values of the REQUEST slot fields ask for top-k or top-p, now or in case that the
    request is sampled later."""
    names = (field.name for field in fields_from(Source.REQUEST))
    found: dict[str, Any] = dict(zip(names, values, strict=True))
    return bool(found["top_k"] > 0 or 0 < found["top_p"] < 1)


def _filters(params: SamplingParams) -> bool:
    """:func:`_has_filters` of parameters."""
    return _has_filters(request_values(params, 0))


class RequestExtras:
    """Makes the extras of requests from their sampling parameters.

    Args:
        enabled: the engine has the extended S.
        needed_by_filters: top-k and top-p need it too.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        grammars: Grammars,
        *,
        vocab_size: int,
        enabled: bool,
        needed_by_filters: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._enabled = enabled
        self.needed_by_filters = needed_by_filters

    def of(self, params: SamplingParams, stop_ids: tuple[int, ...], prompt_length: int) -> Extras:
        """Extras of a request with these parameters. Values that change nothing are left at the
        defaults.

        Raises:
            RequestError: names the parameter that cannot be served and what to change.
        """
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
        if self.needed_by_filters and not self._enabled and _filters(params):
            raise RequestError(
                "top_k and top_p need enable_sampling_extras=True where the vocabulary is divided "
                "over GPUs; turn it on, or leave them out"
            )
        self._check_extras(extras)
        self._check_candidates(extras)
        return extras

    def of_command(self, command: AddRequest) -> Extras | None:
        """What S is asked for a request; None for what the plain S does."""
        if command.extras is not None:
            return command.extras
        if self.needed_by_filters and _has_filters(command.values):
            return NO_EXTRAS
        return None

    def check_change(self, before: SamplingParams, after: SamplingParams) -> None:
        """Raises RequestError if the parameters of a running request would need other extras."""
        if self.needed_by_filters and _filters(after) and not _filters(before):
            raise RequestError(
                "top_k and top_p cannot be turned on while a request runs on a model whose "
                "vocabulary is divided over GPUs; add the request with one of them"
            )

    def check_replay(self, commands: Iterable[Command]) -> None:
        """Raises ConfigError where a recorded run turns on what :meth:`check_change` refuses."""
        if not self.needed_by_filters:
            return
        plain: dict[int, SamplingParams] = {}
        for command in commands:
            if isinstance(command, AddRequest) and self.of_command(command) is None:
                plain[command.key] = command.params.params()
            elif isinstance(command, UpdateSamplingParams) and command.key in plain:
                params = plain[command.key] = dataclasses.replace(
                    plain[command.key], **command.changes
                )
                if _filters(params):
                    raise ConfigError(
                        "the run turns top_k or top_p on while a request runs, which a model whose "
                        "vocabulary is divided over GPUs cannot repeat: replay it with "
                        "tensor_model_parallel_size=1"
                    )

    def _is_guided(self, params: SamplingParams) -> bool:
        """S needs all tokens before: for a grammar's masks, or for Python functions."""
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)
        return params.structured_outputs is not None or bool(params.logits_processors)

    def _check_extras(self, extras: Extras) -> None:
        if not self._enabled and extras != NO_EXTRAS:
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
