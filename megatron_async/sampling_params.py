"""How a request is sampled and when it ends, with megatron-core's names."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal, get_args

from megatron_async.errors import RequestError
from megatron_async.request import parameter_checks as checks
from megatron_async.request.parameter_checks import as_integer
from megatron_async.step.extras import MAX_LOGIT_BIASES

MAX_STOP_TOKEN_IDS = 8
"""Width of the stop set kept on the device; further ids are the host's to find."""
MAX_LOGIT_BIAS = 100.0
"""Larger biases are cut to this, as in vLLM."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""megatron-core's and vLLM's words for ``log_probs_mode``."""
LOG_PROBS_MODES: dict[str, str] = {
    mode: mode.removesuffix("_logprobs") for mode in get_args(LogprobsMode)
}
"""``log_probs_mode`` by these words."""
_NOT_FORCED = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_words",
    "structured_outputs",
    "logits_processors",
)
"""Parameters that count the tokens of the output, or follow them, from its first one on."""
LIMITING = (
    "structured_outputs",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logit_bias",
)
"""Sampling parameters that can leave no token."""
_TAKEN = (
    "return_prompt_top_n_logprobs",
    "detokenize_stop_sequence",
    "return_prompt_tokens",
    "streaming",
    "streaming_interval",
    "do_kv_handoff",
)
"""Names of megatron-core's that are no fields of ours, in the order of the class."""
_check_interval = checks.integer(1, none=1)


@dataclass(kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names are megatron-core's.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most likely tokens; 0 is off, 1 is greedy.
        top_p: keep the smallest set of tokens with this probability mass; 0 and 1 are off.
        num_tokens_to_generate: most tokens to generate. When this and ``num_tokens_total`` are
            None, the model's maximum sequence length is the limit, or what the cache has room for.
        num_tokens_total: most tokens of prompt and generation together.
        termination_id: token that ends the request; None takes the model's own end tokens, -1
            means none.
        stop_token_ids: further tokens that end the request; None means none.
        add_BOS: put the tokenizer's begin token before a text prompt.
        seed: of this request's randomness; None derives one from the engine's seed and the
            request id. The same seed gives the same tokens whatever else is being decoded.
        min_p: keep tokens at least this share as likely as the most likely one; 0 is off.
        repetition_penalty, presence_penalty, frequency_penalty: vLLM's: the first of tokens in
            prompt or output, the others of tokens in the output.
        logit_bias: added to the logits of these token ids, bounded by -100 and 100; None for none.
        allowed_token_ids: the only tokens that may be generated; None for all.
        bad_words: texts, or lists of token ids, that may not be generated; None for none.
        min_tokens: tokens to generate before an end token or a stop word may end the request.
        ignore_eos: the model's own end tokens do not end the request; ``stop_token_ids`` and a
            ``termination_id`` of another token still do.
        stop_words: texts, or one text, that end the request; the text is cut before the first of
            them.
        detokenize: make text of the tokens; without it only requests with ``stop_words`` have text.
        include_stop_str_in_output: cut it behind the stop word instead; and the text of a token
            that ended the request is shown, unless it is a special one.
        return_log_probs: log-probabilities of the generated tokens, and of the prompt's unless
            ``skip_prompt_log_probs``.
        top_n_logprobs: log-probabilities of this many most likely tokens too, at most 20.
        log_probs_mode: ``"raw"``, the model's, or ``"processed"``, of what was sampled from; those
            of prompts are the model's.
        n: sequences to generate; they share one prefill and have seeds of their own. The request's
            record has them in ``choices``; the first is that of a request for one.
        best_of: sequences to generate, of which the ``n`` with the highest mean log-probability of
            their tokens are kept; None means ``n``.
        structured_outputs: what the text must conform to: a ``StructuredOutputs``; None for
            anything.
        cache_salt: the request shares cached prefixes with requests of the same salt alone; None
            with all that have none.
        num_speculative_tokens: most drafts of a step; None takes the engine's, which is the most.
            It changes no token.
        forced_token_ids: the first tokens of the output, which are not sampled: they are prefilled
            behind the prompt, their log-probabilities are the model's, and none of them ends the
            request. What follows is what would have followed had they been sampled. They come with
            the first token behind them; None for none.
        return_routed_experts: the record has the experts that each token went to; the engine has
            ``EngineConfig.return_routed_experts``.
        prompt_hidden_states: layers behind which the hidden states of the prompt are wanted, as
            Hugging Face counts them: 0 is the embedding, the last is behind the final norm, and
            those below 0 count from the end. With log-probabilities of the prompt alone; None for
            none.
        logits_processors: functions of (token ids so far, logits [vocabulary]) that return logits;
            each of their steps is a barrier. A recorded run that used them cannot be replayed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = 30
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    add_BOS: bool = False
    stop_words: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = ()
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    log_probs_mode: str = "raw"
    n: int = 1
    best_of: int | None = None
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    structured_outputs: Any = None
    forced_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    return_routed_experts: bool = False
    prompt_hidden_states: Sequence[int] | None = None
    # Fields of megatron-core's releases; docs/megatron.md says what becomes of each.
    return_prompt_top_n_logprobs: InitVar[bool] = False
    detokenize_stop_sequence: InitVar[bool] = False
    return_prompt_tokens: InitVar[bool] = False
    streaming: InitVar[bool] = False
    streaming_interval: InitVar[int | None] = 1
    do_kv_handoff: InitVar[bool | None] = None

    def __post_init__(self, *taken: Any) -> None:
        for name, value in zip(_TAKEN, taken, strict=False):
            self._take(name, value)
        default = type(self).__dataclass_fields__["num_tokens_to_generate"].default
        given = as_integer(self.num_tokens_to_generate)
        if self.num_tokens_total is not None and given == default:
            self.num_tokens_to_generate = None

    def _take(self, name: str, value: Any) -> None:
        """A name of megatron-core's that is no field; most have no effect."""
        if name == "do_kv_handoff" and value:
            raise RequestError(
                "do_kv_handoff=True is not supported: keys and values stay in this engine; leave "
                "it out"
            )
        if name == "streaming_interval":
            _check_interval(name, value)
        if name == "detokenize_stop_sequence" and value:
            self.include_stop_str_in_output = True

    def checked(self) -> SamplingParams:
        """An own copy in Python's own types: tuples in place of lists, and the default in place of
        None where vLLM takes that; raises as :meth:`validate`."""
        own = copy.copy(self)
        for name, default in _defaults(type(self)).items():
            value = getattr(own, name)
            if value is default:
                continue
            if (check := _CHECKS.get(name)) is not None:
                setattr(own, name, check(name, value))
            elif (number := as_integer(value)) is not None:  # of a subclass
                setattr(own, name, number)
        _check_together(own)
        return own

    def validate(self) -> None:
        """Check every value by itself and against the others.

        Raises:
            RequestError: names the value and what to change.
        """
        self.checked()

    @property
    def greedy(self) -> bool:
        """True when no randomness is involved."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def wants_log_probs(self) -> bool:
        """Log-probabilities of the generated tokens are asked for."""
        return self.return_log_probs or self.top_n_logprobs > 0

    @property
    def wants_prompt_log_probs(self) -> bool:
        """Log-probabilities of the prompt's tokens are asked for."""
        return self.wants_log_probs and not self.skip_prompt_log_probs

    @property
    def num_sequences(self) -> int:
        """Sequences to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_extras(self) -> bool:
        """Something is asked that only the extended S does, or that must be prepared for it."""
        return bool(
            self.return_log_probs
            or self.top_n_logprobs
            or self.min_p
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.structured_outputs
            or self.logits_processors
            or self.allowed_token_ids
            or self.bad_words
            or self.min_tokens
            or self.logit_bias
        )

    def for_ranking(self) -> SamplingParams:
        """The same with log-probabilities of generated tokens, if sequences are chosen by them."""
        if self.num_sequences == self.n or self.wants_log_probs:
            return self
        return dataclasses.replace(self, return_log_probs=True, skip_prompt_log_probs=True)

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set several attributes at once; an unknown name is an error."""
        names = {f.name for f in dataclasses.fields(self)}
        for name, value in attribute_value_pair.items():
            if name in _TAKEN:
                self._take(name, value)
                continue
            if name not in names:
                raise RequestError(f"unknown sampling parameter {name}={checks.shown(value)}")
            setattr(self, name, value)
        if "num_tokens_to_generate" not in attribute_value_pair:
            self.__post_init__()

    def serialize(self) -> dict[str, Any]:
        """All fields in plain JSON types. Functions are given by name, for people to read: what
        :meth:`deserialize` makes of them is not valid."""
        values = {f.name: checks.plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if values["prompt_hidden_states"] is None:  # earlier versions do not know it
            del values["prompt_hidden_states"]
        return values

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of :meth:`serialize` for checked parameters, after a way through JSON text
        too."""
        params = cls()
        params.add_attributes({name: checks.frozen(value) for name, value in data.items()})
        if isinstance(params.logit_bias, Mapping):
            biases = params.logit_bias.items()
            params.logit_bias = {checks.token_of_key(key): bias for key, bias in biases}
        return params


Scalar = bool | int | float | str | None
Plain = Scalar | tuple[Scalar | tuple[Scalar, ...], ...]


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """Sampling parameters that have been checked, as what nobody changes any more: messages of the
    server, commands of the engine and recorded runs carry them as they are.

    Args:
        given: name and value of each parameter that differs from its default. Values are numbers,
            texts, None, and tuples of them: biases are pairs, a structured output is JSON text, and
            functions are names.
    """

    given: tuple[tuple[str, Plain], ...] = ()

    @classmethod
    def of(cls, params: SamplingParams) -> CheckedParams:
        """What :meth:`SamplingParams.checked` returned."""
        given = []
        for name, default in _defaults(type(params)).items():
            value = getattr(params, name)
            if value is not default and value != default:
                given.append((name, _TO_PLAIN[name](value) if name in _TO_PLAIN else value))
        return cls(tuple(given))

    def params(self) -> SamplingParams:
        """The parameters, not checked again.

        Raises:
            RequestError: they have functions.
        """
        values: dict[str, Any] = dict(self.given)
        for name, read in _FROM_PLAIN.items():
            if name in values:
                values[name] = read(values[name])
        return SamplingParams(**values)

    def serialize(self) -> dict[str, Any]:
        """What is given in plain JSON types, as :meth:`SamplingParams.serialize` has it."""
        values: dict[str, Any] = dict(self.given)
        if "logit_bias" in values:
            values["logit_bias"] = dict(values["logit_bias"])
        if "structured_outputs" in values:
            values["structured_outputs"] = json.loads(values["structured_outputs"])
        return {name: checks.plain(value) for name, value in values.items()}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> CheckedParams:
        """The inverse of :meth:`serialize`, after a way through JSON text too; what a file of
        somebody else's says is not checked."""
        values = {name: checks.frozen(value) for name, value in data.items()}
        biases = values.get("logit_bias")
        if isinstance(biases, Mapping):
            values["logit_bias"] = tuple((checks.token_of_key(k), v) for k, v in biases.items())
        if values.get("structured_outputs") is not None:
            values["structured_outputs"] = json.dumps(values["structured_outputs"])
        return cls(tuple(values.items()))

    def __getitem__(self, name: str) -> Any:
        """The value of a parameter, its default if it is not given."""
        for given, value in self.given:
            if given == name:
                return _FROM_PLAIN[name](value) if name in _FROM_PLAIN else value
        return _defaults(SamplingParams)[name]


def _read_defaults(kind: Any) -> dict[str, Any]:
    """The default of each field of a class, which is checked and of its own type."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


_defaults: Callable[[Any], dict[str, Any]] = functools.cache(_read_defaults)


_TO_PLAIN: dict[str, Callable[[Any], Plain]] = {
    "logit_bias": lambda biases: tuple(biases.items()),
    "structured_outputs": json.dumps,
    "logits_processors": lambda processors: tuple(map(checks.plain, processors)),
}
_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "logit_bias": lambda pairs: None if pairs is None else dict(pairs),
    "structured_outputs": lambda text: None if text is None else json.loads(text),
    "logits_processors": lambda names: checks.callables("logits_processors", names),
}
"""Parameters that are something else as what is written down. Functions do not come back."""


def _check_together(params: SamplingParams) -> None:
    """Raises RequestError when checked values contradict each other."""
    if 0 < params.temperature < 1e-5:
        raise RequestError(
            f"temperature={params.temperature!r} is too small to divide by; "
            "use 0 for greedy decoding"
        )
    if params.num_tokens_to_generate is not None and params.num_tokens_total is not None:
        raise RequestError(
            f"num_tokens_to_generate={params.num_tokens_to_generate} and "
            f"num_tokens_total={params.num_tokens_total} contradict each other; set one of them"
        )
    for name in ("num_tokens_to_generate", "num_tokens_total"):
        most = getattr(params, name)
        if most is not None and params.min_tokens > most:
            raise RequestError(
                f"min_tokens={params.min_tokens} exceeds {name}={most}; lower one or raise the "
                "other"
            )
    if params.num_sequences < params.n:
        raise RequestError(
            f"best_of={params.best_of} must be at least n={params.n}, which are kept of them"
        )
    if params.forced_token_ids:
        _check_forced(params)
    if params.prompt_hidden_states:
        _check_hidden_states(params)
    if params.return_segments:
        raise RequestError("return_segments=True is not supported by this version; leave it out")


def _check_forced(params: SamplingParams) -> None:
    """Raises RequestError for what forced tokens do not go together with."""
    asked: dict[str, Any] = {name: getattr(params, name) for name in _NOT_FORCED}
    asked["n"] = params.num_sequences > 1 and params.num_sequences
    if params.wants_log_probs and params.log_probs_mode != "raw":
        asked["log_probs_mode"] = params.log_probs_mode
    for name, value in asked.items():
        if value:
            raise RequestError(
                f"forced_token_ids do not go together with {name}={checks.shown(value)}; leave one "
                "of them out"
            )


def _check_hidden_states(params: SamplingParams) -> None:
    """Raises RequestError for what hidden states of the prompt do not go together with."""
    asked = f"prompt_hidden_states={checks.shown(params.prompt_hidden_states)}"
    if not params.wants_prompt_log_probs:
        raise RequestError(
            f"{asked} come with log-probabilities of the prompt: add return_log_probs=True, and no "
            "skip_prompt_log_probs=True"
        )
    several = params.num_sequences > 1 and params.num_sequences
    for name, value in (("forced_token_ids", params.forced_token_ids), ("n", several)):
        if value:
            raise RequestError(
                f"{asked} does not go together with {name}={checks.shown(value)}; leave one of "
                "them out"
            )


_CHECKS: dict[str, checks.Check] = {
    "temperature": checks.in_range("temperature", none=1.0),
    "top_k": checks.in_range("top_k"),
    "top_p": checks.in_range("top_p", none=0.0),
    "return_log_probs": checks.flag,
    "skip_prompt_log_probs": checks.flag,
    "return_segments": checks.flag,
    "num_tokens_to_generate": checks.optional(checks.in_range("num_tokens_to_generate")),
    "num_tokens_total": checks.optional(checks.in_range("num_tokens_total")),
    "termination_id": checks.optional(checks.in_range("termination_id")),
    "top_n_logprobs": checks.in_range("top_n_logprobs", none=0),
    "add_BOS": checks.flag,
    "stop_words": checks.texts,
    "stop_token_ids": checks.token_ids,
    "seed": checks.seed,
    "min_p": checks.in_range("min_p", none=0.0),
    "repetition_penalty": checks.in_range("repetition_penalty", none=1.0),
    "presence_penalty": checks.in_range("presence_penalty", none=0.0),
    "frequency_penalty": checks.in_range("frequency_penalty", none=0.0),
    "logit_bias": checks.logit_bias(MAX_LOGIT_BIAS, MAX_LOGIT_BIASES),
    "allowed_token_ids": checks.allowed_token_ids,
    "bad_words": checks.words,
    "min_tokens": checks.in_range("min_tokens", none=0),
    "ignore_eos": checks.flag,
    "include_stop_str_in_output": checks.flag,
    "detokenize": checks.flag,
    "log_probs_mode": checks.one_of(*LOG_PROBS_MODES.values()),
    "n": checks.in_range("n", none=1),
    "best_of": checks.optional(checks.in_range("best_of")),
    "num_speculative_tokens": checks.optional(checks.in_range("num_speculative_tokens")),
    "cache_salt": checks.optional(checks.salt),
    "structured_outputs": checks.structure,
    "forced_token_ids": checks.sequence_of_tokens,
    "logits_processors": checks.callables,
    "return_routed_experts": checks.flag,
    "prompt_hidden_states": checks.layers,
}
"""How each parameter is checked."""
