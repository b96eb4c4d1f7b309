"""The fields that completions and chat have in common, and what they ask of the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from megatron_async.errors import RequestError
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.request.parameter_checks import in_range
from megatron_async.sampling_params import LOG_PROBS_MODES, LogprobsMode, SamplingParams
from megatron_async.serving.bodies.body import (
    MAX_ENTRIES,
    MAX_IDS,
    MAX_TEXTS,
    Integer,
    OwnFields,
    Several,
    Text,
    Token,
    at_least,
    at_most,
    range_of,
    schema_of,
)
from megatron_async.serving.bodies.foreign_fields import FOREIGN_FIELDS
from megatron_async.serving.bodies.formats import ResponseFormat, StreamOptions, structure_of_format
from megatron_async.serving.bodies.python_fields import OPENAI, refuse_python_fields
from megatron_async.serving.chat.chat_messages import plain
from megatron_async.serving.http.errors import ApiError, renamed

LEAST_TEMPERATURE = 1e-5
"""The engine divides by no smaller one."""


def dividing(temperature: float) -> float:
    """A temperature that may be divided by, or 0 for greedy, which clients mean by 1e-8."""
    return 0.0 if 0 < temperature < LEAST_TEMPERATURE else temperature


class SamplingFields(OwnFields):
    """What completions and chat have in common."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_python(cls, body: Any) -> Any:
        refuse_python_fields(body, cls.model_fields.keys() | FOREIGN_FIELDS.keys(), OPENAI)
        return body

    model: str | None = None
    temperature: Annotated[float | None, range_of("temperature")] = None
    top_p: Annotated[float | None, range_of("top_p")] = None
    n: Annotated[Integer | None, at_least(1)] = None
    seed: Integer | None = None
    stop: Text | Annotated[Several[Text], at_most(MAX_TEXTS)] | None = None
    presence_penalty: Annotated[float | None, range_of("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, range_of("frequency_penalty")] = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_ENTRIES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Integer | None, at_least(0)] = None
    max_completion_tokens: Annotated[Integer | None, at_least(0)] = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: Annotated[Integer | None, at_least(-1)] = None
    min_p: Annotated[float | None, range_of("min_p")] = None
    repetition_penalty: Annotated[float | None, range_of("repetition_penalty")] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Integer | None, range_of("min_tokens")] = None
    stop_token_ids: Annotated[Several[Token], at_most(MAX_IDS)] | None = None
    allowed_token_ids: Annotated[
        Annotated[Several[Token], at_most(MAX_IDS)] | None, schema_of(minItems=1)
    ] = None
    bad_words: Annotated[Several[Text], at_most(MAX_TEXTS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[Integer | None, range_of("top_n_logprobs")] = None
    logprobs_mode: LogprobsMode | None = None
    request_id: str | None = None
    return_weight_versions: bool | None = None
    return_routed_experts: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[Integer | None, range_of("priority")] = None
    cache_salt: Text | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Several[str] | None, schema_of(minItems=1)] = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: dict[str, Any] | None = None
    num_speculative_tokens: Annotated[Integer | None, range_of("num_speculative_tokens")] = None

    names: ClassVar[dict[str, str]] = {}
    length_field: ClassVar[str] = "max_tokens"

    @property
    def num_choices(self) -> int:
        """Texts of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_ranked(self) -> int | None:
        """Texts of which those choices are the likeliest."""
        return None

    @property
    def wants_usage(self) -> bool:
        """The stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Each chunk of the stream has the usage so far."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    @abstractmethod
    def log_probs(self) -> int | None:
        """Most likely tokens to report for each generated one; None for no log-probabilities."""

    @property
    def prompt_log_probs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    def as_megatron(self) -> Self:
        """This as Megatron's server takes it: ``top_p=0`` is off, as ``top_k=0`` is."""
        return self.model_copy(update={"top_p": 1.0}) if self.top_p == 0 else self

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """This with fields in place of those that it leaves out, by the names that they have here
        or in ``SamplingParams``."""
        length = self.length_field
        names = {"num_tokens_to_generate": length}
        named = {names.get(name, name): value for name, value in defaults.items()}
        given = {k: v for k, v in named.items() if getattr(self, k) is None}
        if self.num_new_tokens_given:
            given.pop(length, None)
        elif length in given:
            # What the client has sent goes before what it has not.
            given[length] = max(given[length], self.min_tokens or 0)
        return self.model_copy(update=given) if given else self

    def params(self, max_choices: int) -> SamplingParams:
        """What the engine is asked, checked.

        Raises:
            ApiError: names the field.
        """
        if not 1 <= self.num_choices <= max_choices:
            raise ApiError(400, f"n={self.n} must lie between 1 and {max_choices}", param="n")
        if self.stream_options is not None and not self.stream:
            said = "stream_options goes with stream=true alone"
            raise ApiError(400, said, param="stream_options")
        try:
            in_range("priority", none=0)("priority", self.priority)
            for name in ("stop", "bad_words"):
                plain(name, getattr(self, name))
            plain("structured_outputs", dict.fromkeys(self.structured_outputs or ()))
            return self._params(self._structure()).checked()
        except RequestError as error:
            raise renamed(error, self.engine_names()) from None

    def engine_names(self) -> dict[str, str]:
        """What this API calls the engine's parameters, for its error messages."""
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {"num_tokens_to_generate": length, "stop_words": "stop", **self.names}
        for field, structure in self._structures().items():
            if field != "structured_outputs":
                names |= {f"structured_outputs.{kind}": field for kind in structure}
                names["structured_outputs"] = field
        return names

    @property
    def num_new_tokens_given(self) -> bool:
        """The client has named the most tokens to generate; else they are cut to what fits."""
        return self.max_tokens is not None or self.max_completion_tokens is not None

    @property
    def num_new_tokens(self) -> int | None:
        """Most tokens to generate; None for as many as the model has room for."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    def _params(self, structure: dict[str, Any] | None) -> SamplingParams:
        asked, of_prompt = self.log_probs, self.prompt_log_probs
        for name, value in (("logprobs", asked), ("prompt_logprobs", of_prompt)):
            in_range("top_n_logprobs", none=0)(self.names.get(name, name), value)
        top_k, top_p = self.top_k, self.top_p
        if top_p == 0:
            top_k = 1  # the smallest set of at least no probability has one token; 0 is off to us
        return SamplingParams(
            temperature=dividing(_or(self.temperature, 1.0)),
            top_k=0 if top_k in (None, -1) else top_k,  # type: ignore[arg-type]
            top_p=_or(top_p, 1.0),
            return_log_probs=asked is not None or of_prompt is not None,
            skip_prompt_log_probs=of_prompt is None,
            num_tokens_to_generate=self.num_new_tokens,
            top_n_logprobs=max(asked or 0, of_prompt or 0),
            log_probs_mode=LOG_PROBS_MODES[_or(self.logprobs_mode, "raw_logprobs")],
            stop_words=self.stop or None,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias,  # type: ignore[arg-type]
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            min_tokens=_or(self.min_tokens, 0),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            n=self.num_choices,
            best_of=self.num_ranked,
            num_speculative_tokens=self.num_speculative_tokens,
            cache_salt=self.cache_salt,
            structured_outputs=structure,
            return_routed_experts=bool(self.return_routed_experts),
        )

    def _structure(self) -> dict[str, Any] | None:
        """The one structured output that is asked for.

        Raises:
            ApiError: two are asked for.
            RequestError: it is wrong.
        """
        structures = self._structures()
        if not structures:
            return None
        field, *others = structures
        if others:
            said = f"{field} and {others[0]} contradict each other; send one of them"
            raise ApiError(400, said, param=others[0])
        return StructuredOutputs.from_any(structures[field]).to_dict()

    def _structures(self) -> dict[str, dict[str, Any]]:
        """Structured outputs by the fields that ask for them."""
        asked: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs
        for name in ("json", "regex", "choice", "grammar", "json_object"):
            value = getattr(self, f"guided_{name}")
            if value not in (None, False):
                asked[f"guided_{name}"] = {name: value}
        format = structure_of_format(self.response_format)
        if format is not None:
            asked["response_format"] = format
        if self.guided_whitespace_pattern is not None:
            for field, structure in asked.items():
                if field != "structured_outputs" and structure.keys() & {"json", "json_object"}:
                    structure["whitespace_pattern"] = self.guided_whitespace_pattern
        return asked


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
