"""Checks what a user asks, and makes it a command that the scheduler can always serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_async.checkpoint.reading.json_file import one_line
from megatron_async.engine.commands import AddRequest, Command, UpdateSamplingParams
from megatron_async.engine.requests.guidance import Grammars
from megatron_async.engine.requests.recorded_requests import check_recorded
from megatron_async.engine.requests.request_extras import PromptTokenizer, RequestExtras
from megatron_async.errors import RequestError, RequestTooLongError, shown
from megatron_async.request.parameter_checks import as_integer, check_vocabulary, seed
from megatron_async.request.parameter_ranges import INTEGERS
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.scheduler.limits import Limits
from megatron_async.step.extras import NO_EXTRAS, Extras
from megatron_async.step.slot_fields import Values, request_values

CHANGEABLE = ("temperature", "top_k", "top_p", "seed", "num_speculative_tokens")
"""Parameters of a running request that may change."""
MASK64 = 2**64 - 1


def derive_seed(engine_seed: int, request_id: int) -> int:
    """A request's seed when it brings none: splitmix64 (Steele et al., 2014), as int64."""
    z = (engine_seed * 0x9E3779B97F4A7C15 + (request_id + 1) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


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
        returns_routes: bool = False,
        hidden_state_count: int = 0,
    ) -> None:
        self._returns_routes = returns_routes
        self._hidden_state_count = hidden_state_count
        self._has_ranks = has_ranks
        self._grammars = grammars
        self._extras = RequestExtras(
            tokenizer,
            grammars,
            vocab_size=vocab_size,
            enabled=extras_enabled,
            needed_by_filters=filters_need_extras,
        )
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._max_sequence_length = max_sequence_length
        self._random_seed = random_seed
        if eos_token_ids is None:
            eod = getattr(tokenizer.tokenizer, "eod", None)
            eos_token_ids = () if eod is None else (int(eod),)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.sampling_defaults: dict[str, Any] = tokenizer.sampling_defaults or {}
        """Values for requests without parameters."""

    def add(
        self,
        key: int,
        request_id: int,
        prompt: str | list[int] | torch.Tensor,
        params: SamplingParams | CheckedParams | None,
        priority: object,
    ) -> tuple[AddRequest, SamplingParams]:
        """The command that queues a request, or the first of its sequences, and its parameters,
        checked.

        Args:
            params: ``CheckedParams`` are not checked again.

        Raises:
            RequestError: names the value that cannot be served and what to change.
        """
        checked, params = self.checked(params)
        if self._has_ranks and params.logits_processors:
            raise RequestError(
                "logits_processors are functions of rank 0, and a model of several ranks has no "
                "whole logits there: leave them out, or load the model on one rank"
            )
        if params.return_routed_experts:
            self._check_routes()
        if params.prompt_hidden_states:
            self.layers_of(params.prompt_hidden_states)
        number = as_integer(priority)
        most = INTEGERS["priority"].high or 0
        if number is None or abs(number) > most:
            raise RequestError(f"priority={shown(priority)} must be an integer of at most {most:,}")
        text, tokens = self.tokens(prompt, params)
        max_new = self._max_new(len(tokens), params)
        if params.forced_token_ids:
            max_new -= self._check_forced(params.forced_token_ids, max_new)
            tokens = [*tokens, *params.forced_token_ids]
        self._check_fits(len(tokens) + max_new)
        if self._tokenizer.tokenizer is None:
            _check_texts(params)
        if params.num_speculative_tokens is not None:
            self._check_drafts(params.num_speculative_tokens)
        stop_ids = self._stop_ids(params)
        sampled = params if params.best_of is None else params.for_ranking()
        extras = NO_EXTRAS
        if sampled.needs_extras or self._extras.needed_by_filters:
            extras = self._extras.of(sampled, stop_ids, len(tokens))
        command = AddRequest(
            key,
            request_id,
            text,
            tuple(tokens),
            max_new,
            stop_ids,
            request_values(params, self.seed(request_id, params.seed)),
            number,
            checked if sampled is params else CheckedParams.of(sampled),
            None if extras is NO_EXTRAS or extras == NO_EXTRAS else extras,
            sampled.wants_log_probs
            and not (sampled.skip_prompt_log_probs and not sampled.forced_token_ids),
        )
        return command, params

    def _check_routes(self) -> None:
        """Raises :class:`RequestError` unless the engine hands out the experts of tokens."""
        if not self._returns_routes:
            raise RequestError(
                "return_routed_experts=True needs an engine with "
                "EngineConfig(return_routed_experts=True), or a server with "
                "--enable-return-routed-experts"
            )

    def layers_of(self, asked: Sequence[int]) -> tuple[int, ...]:
        """Layers behind which hidden states are asked for, counted from 0.

        Raises:
            RequestError: the model has no such layer, or hands out none.
        """
        count = self._hidden_state_count
        if not count:
            raise RequestError(
                f"prompt_hidden_states={shown(asked)} needs a GPT or hybrid model all of whose "
                "layers are on rank 0: leave it out, or pipeline_model_parallel_size"
            )
        for layer in asked:
            if not -count <= layer < count:
                raise RequestError(
                    f"prompt_hidden_states has {layer}; the model has hidden states 0 to "
                    f"{count - 1}, or from -{count} to -1"
                )
        return tuple(layer % count for layer in asked)

    def checked(
        self, params: SamplingParams | CheckedParams | None
    ) -> tuple[CheckedParams, SamplingParams]:
        """The parameters of a request, checked once, and an own copy of them as a user has them;
        None takes the model's defaults. Raises :class:`RequestError`."""
        if isinstance(params, CheckedParams):
            return params, params.params()
        params = params if params is not None else SamplingParams(**self.sampling_defaults)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}, not SamplingParams")
        own = params.checked()
        return CheckedParams.of(own), own

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
        checked = self.changed(params, changes)
        self._extras.check_change(params, checked)
        return UpdateSamplingParams(key, {name: getattr(checked, name) for name in changes})

    def changed(self, params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
        """The parameters of a running request after ``changes``; raises :class:`RequestError`."""
        for name in changes:
            if name not in CHANGEABLE:
                called = name if name.isidentifier() else shown(name)
                raise RequestError(
                    f"{called} of a running request cannot be changed; {', '.join(CHANGEABLE)} can"
                )
        checked = dataclasses.replace(params, **changes).checked()
        if checked.num_speculative_tokens is not None:
            self._check_drafts(checked.num_speculative_tokens)
        return checked

    def recorded(self, command: AddRequest) -> SamplingParams:
        """The parameters of a recorded request; raises :class:`RequestError` unless :meth:`add`
        could have made its command."""
        params = command.params.params().checked()
        if params.return_routed_experts:
            self._check_routes()
        if params.prompt_hidden_states:
            self.layers_of(params.prompt_hidden_states)
        if self._tokenizer.tokenizer is None:
            _check_texts(params)
        if params.num_speculative_tokens is not None:
            self._check_drafts(params.num_speculative_tokens)
        self.tokens(list(command.tokens), params)
        total = len(command.tokens) + command.max_new
        if command.max_new < 1 or total > self._max_sequence_length:
            raise RequestError(
                f"max_new={shown(command.max_new)} after a prompt of {len(command.tokens)} tokens "
                f"must be at least 1 and at most {self._max_sequence_length} in all"
            )
        self._check_fits(total)
        foreign = [token for token in command.stop_ids if token not in self.eos_token_ids]
        check_vocabulary("stop_ids", foreign, self._vocab_size)
        if abs(command.priority) > (INTEGERS["priority"].high or 0):
            raise RequestError(f"priority={shown(command.priority)} is too large")
        extras = NO_EXTRAS
        if params.needs_extras:
            extras = self._extras.of(params, command.stop_ids, len(command.tokens))
        derived = {
            "values": request_values(params, _seed_in(command.values)) == command.values,
            "extras": extras == (NO_EXTRAS if command.extras is None else command.extras),
            "prompt_log_probs": command.prompt_log_probs
            == (
                params.wants_prompt_log_probs
                or bool(params.wants_log_probs and params.forced_token_ids)
            ),
            "automaton": command.automaton is None or params.structured_outputs is not None,
            "tokens": _ends_with(command.tokens, params.forced_token_ids or ()),
        }
        for name, agrees in derived.items():
            if not agrees:
                raise RequestError(f"{name} and params contradict each other")
        return params

    def check_replay(self, commands: Iterable[Command]) -> None:
        """Raises :class:`RequestError` where a recorded run has a command that nobody could have
        given this engine, and ConfigError where it turns on what :meth:`update` refuses."""
        commands = list(commands)
        check_recorded(commands, self)
        self._extras.check_replay(commands)

    def values(self, request_id: int, params: SamplingParams) -> Values:
        """The values of the REQUEST slot fields."""
        return request_values(params, self.seed(request_id, params.seed))

    def extras_of(self, command: AddRequest) -> Extras | None:
        """What S is asked for a request; None for what the plain S does."""
        if command.extras is None and not self._extras.needed_by_filters:
            return None
        return self._extras.of_command(command)

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
            tokens = _values_of(prompt)
        elif isinstance(prompt, (list, tuple)):
            tokens = list(prompt)
        else:
            raise RequestError(
                f"prompt is a {type(prompt).__name__}; give text or a list of token ids"
            )
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        for index, token in enumerate(tokens):
            number = token if type(token) is int else as_integer(token)
            if number is None:
                raise RequestError(
                    f"the prompt holds {shown(token)}; every token id must be an integer"
                )
            tokens[index] = number
            if not 0 <= number < self._vocab_size:
                raise RequestError(
                    f"the prompt holds token id {shown(number)}; the model's ids are "
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
            max_new = max(1, min(limit, self._limits.most_tokens) - prompt_length)
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
            if ids:
                check_vocabulary("termination_id", ids, self._vocab_size)
        if params.ignore_eos:
            ids = tuple(token for token in ids if token not in own)
        if params.stop_token_ids:
            check_vocabulary("stop_token_ids", params.stop_token_ids, self._vocab_size)
            ids = tuple(dict.fromkeys((*ids, *params.stop_token_ids)))
        return ids

    def _check_forced(self, forced: Sequence[int], max_new: int) -> int:
        """How many tokens are forced, of ``max_new``."""
        check_vocabulary("forced_token_ids", forced, self._vocab_size)
        if len(forced) >= max_new:
            raise RequestError(
                f"forced_token_ids has {len(forced)} tokens and the request may generate {max_new}:"
                " raise num_tokens_to_generate, or give the engine all tokens to score()"
            )
        return len(forced)

    def _check_drafts(self, asked: int) -> None:
        most = self._limits.window - 1
        if asked > most:
            raise RequestError(
                f"num_speculative_tokens={asked} exceeds the engine's {most}; lower it, leave it "
                "out, or serve the model with more"
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


def _values_of(prompt: torch.Tensor) -> list[int]:
    """The elements of a vector of integers."""
    try:
        values: list[int] = prompt.tolist()
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a meta tensor, a sparse one
        raise RequestError(f"prompt is a tensor without values: {one_line(error)}") from None
    return values


def _ends_with(tokens: Sequence[int], forced: Sequence[int]) -> bool:
    prompt = len(tokens) - len(forced)
    return prompt > 0 and tuple(tokens[prompt:]) == tuple(forced)


def _seed_in(values: Values) -> int:
    """The seed among recorded values."""
    number = seed("seed", values[-1] if values else None)
    if number is None:
        raise RequestError("values must end with a seed")
    return number


def _check_texts(params: SamplingParams) -> None:
    """Texts that are looked for need a tokenizer, and there is none."""
    for name, instead in (("stop_words", "stop_token_ids"), ("bad_words", "bad_words")):
        if any(isinstance(text, str) for text in getattr(params, name) or ()):
            raise RequestError(
                f"{name} has texts, and the model has no tokenizer; give token ids in {instead}"
            )
