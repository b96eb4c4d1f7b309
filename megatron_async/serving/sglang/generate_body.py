"""The body of SGLang's ``/generate``, and what it asks of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from megatron_async.errors import RequestError
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.sampling_params import LOG_PROBS_MODES, LogprobsMode, SamplingParams
from megatron_async.serving.bodies.body import (
    MAX_ENTRIES,
    MAX_IDS,
    MAX_TEXTS,
    Body,
    Integer,
    Several,
    Text,
    Token,
    at_most,
)
from megatron_async.serving.bodies.python_fields import (
    DEFAULTS,
    OF_SGLANG,
    SGLANG,
    refuse_python_fields,
)
from megatron_async.serving.bodies.sampling_fields import dividing
from megatron_async.serving.endpoints.request_shapes import check_tokens
from megatron_async.serving.http.errors import ApiError, renamed

DEFAULT_TOKENS = 128
_LEAVE = "leave it out"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "return_indexer_topk", "return_hidden_states",
            "return_sampling_mask", "return_entropy", "return_flat_raw_top_logprobs",
            "image_data", "video_data", "audio_data", "lora_path", "lora_id",
            "positional_embed_overrides", "multi_item_delimiter_indices", "bootstrap_host",
            "bootstrap_port", "bootstrap_room", "background", "require_reasoning",
            "return_bytes", "return_prompt_token_ids",
        ),
        _LEAVE,
    ),
    "input_embeds": "send input_ids",
    "token_ids_logprob": "send top_logprobs_num",
    "session_params": "send the whole prompt",
    "custom_logit_processor": "send logit_bias in sampling_params",
    "max_thinking_tokens": "send max_new_tokens",
    "priority": "send it to /v1/completions",
    "extra_key": "send cache_salt",
}  # fmt: skip
"""Fields of SGLang's that change what comes back and are not served: what to do in place of each.
Others that are not here have no effect."""
_REFUSED_PARAMS: Mapping[str, str] = {
    "custom_params": _LEAVE,
    "stop_regex": "send stop",
    "structural_tag": "send json_schema, regex or ebnf",
}
NAMES = {
    "num_tokens_to_generate": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_words": "stop",
    "seed": "sampling_seed",
    "top_n_logprobs": "top_logprobs_num",
    "include_stop_str_in_output": "no_stop_trim",
    "prompt": "input_ids",
}
"""What SGLang calls the engine's parameters."""
_IN_PARAMS = dict.fromkeys(DEFAULTS, "sampling parameters go into sampling_params")
_STRUCTURES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


class SglangSampling(Body):
    """``sampling_params`` of one prompt. ``spaces_between_special_tokens`` and ``stream_interval``
    have no effect here."""

    max_new_tokens: Integer | None = None
    min_new_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: Integer | None = None
    stop: Text | Annotated[Several[Text], at_most(MAX_TEXTS)] | None = None
    stop_token_ids: Annotated[Several[Token], at_most(MAX_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Integer | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_ENTRIES)] | None = None
    sampling_seed: Integer | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, body: Any) -> Any:
        place = "sampling_params."
        refuse_python_fields(body, cls.model_fields, SGLANG, defaults=OF_SGLANG, place=place)
        if isinstance(body, Mapping):
            for name, value in body.items():
                if name in cls.model_fields or not value:
                    continue
                instead = _REFUSED_PARAMS.get(str(name), _LEAVE)
                raise _unsupported(f"sampling_params.{str(name)[:100]}", instead)
        return body

    @property
    def num_choices(self) -> int:
        """Texts of each prompt."""
        return 1 if self.n is None else self.n

    def params(self, asked: Asked, max_choices: int) -> SamplingParams:
        """What the engine is asked, checked; raises ApiError, which names the field."""
        if not 1 <= self.num_choices <= max_choices:
            said = f"n={self.n} must lie between 1 and {max_choices}"
            raise ApiError(400, said, param="n")
        greedy = self.top_p == 0
        top_k = 1 if greedy else self.top_k
        try:
            return SamplingParams(
                temperature=dividing(1.0 if self.temperature is None else self.temperature),
                top_k=0 if top_k in (None, -1) else top_k,  # type: ignore[arg-type]
                top_p=1.0 if self.top_p is None or greedy else self.top_p,
                min_p=self.min_p or 0.0,
                repetition_penalty=_or(self.repetition_penalty, 1.0),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                num_tokens_to_generate=_or(self.max_new_tokens, DEFAULT_TOKENS),
                min_tokens=self.min_new_tokens or 0,
                n=self.num_choices,
                stop_words=self.stop or None,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=bool(self.ignore_eos),
                include_stop_str_in_output=bool(self.no_stop_trim),
                logit_bias=self.logit_bias,  # type: ignore[arg-type]
                seed=self.sampling_seed,
                return_log_probs=asked.log_probs,
                skip_prompt_log_probs=asked.prompt_start is None,
                top_n_logprobs=asked.top if asked.log_probs else 0,
                log_probs_mode=LOG_PROBS_MODES[asked.mode],
                cache_salt=asked.cache_salt,
                structured_outputs=self._structure(),
                return_routed_experts=asked.routed_experts,
            ).checked()
        except RequestError as error:
            raise renamed(error, NAMES) from None

    def _structure(self) -> dict[str, Any] | None:
        given = {
            kind: value
            for name, kind in _STRUCTURES.items()
            if (value := getattr(self, name)) is not None
        }
        if len(given) > 1:
            raise RequestError("json_schema, regex and ebnf: send one of them")
        return StructuredOutputs.from_any(given).to_dict() if given else None


@dataclass(frozen=True, slots=True)
class Asked:
    """What one prompt of a body asks besides its sampling parameters.

    Args:
        prompt_start: log-probabilities of the prompt begin with its token of this number; None for
            none of them.
        top: most likely tokens to show of each.
    """

    log_probs: bool
    prompt_start: int | None
    top: int
    mode: LogprobsMode
    cache_salt: str | None
    routed_experts: bool


def _check_ids(value: Any, _: Any) -> Any:
    """Token ids of a prompt or of several, told apart by the first."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise PydanticCustomError("input_ids", "input_ids must be a list of token ids, or of such")
    if not (value and isinstance(value[0], list)):
        check_tokens(value, "input_ids")
        return value
    for number, tokens in enumerate(value):
        if not isinstance(tokens, list):
            said = f"input_ids[{number}] must be a list of token ids, as the first is"
            raise PydanticCustomError("input_ids", said)
        check_tokens(tokens, f"input_ids[{number}]")
    return value


class GenerateRequest(Body):
    """``POST /generate``: one prompt, or several in one list. Fields that are lists then have one
    value for each."""

    text: str | Several[str] | None = None
    input_ids: Annotated[list[Token] | list[list[Token]] | None, WrapValidator(_check_ids)] = None
    sampling_params: SglangSampling | Several[SglangSampling] | None = None
    rid: Text | Several[Text] | None = None
    return_logprob: bool | Several[bool] | None = None
    logprob_start_len: Integer | Several[Integer] | None = None
    top_logprobs_num: Integer | Several[Integer] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    cache_salt: Text | None = None
    # This server's own
    logprobs_mode: LogprobsMode | None = None
    return_weight_versions: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, body: Any) -> Any:
        if isinstance(body, Mapping):
            for name in body.keys() & _REFUSED.keys():
                value = body[name]
                if value and not (isinstance(value, list) and not any(value)):
                    raise _unsupported(name, _REFUSED[name])
        refuse_python_fields(body, cls.model_fields, _IN_PARAMS, defaults=OF_SGLANG)
        return body

    @property
    def is_batch(self) -> bool:
        """There is a list of prompts."""
        if self.input_ids is None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)

    def prompts(self, most: int) -> list[str] | list[list[int]]:
        """The prompts; raises ApiError for none, or for more than ``most``."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "send either text or input_ids", param="input_ids")
        given: Any = self.text if self.input_ids is None else self.input_ids
        found: list[Any] = given if self.is_batch else [given]
        if not 1 <= len(found) <= most:
            name = "text" if self.input_ids is None else "input_ids"
            said = f"{name} has {len(found)} prompts; send between 1 and {most}"
            raise ApiError(400, said, param=name)
        return found

    def each(self, name: str, count: int) -> list[Any]:
        """The value of a field for each of ``count`` prompts; raises ApiError where they are
        others in number."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count or not self.is_batch:
            said = f"{name} has {len(value)} values for {count} prompts; send one for each"
            raise ApiError(400, said, param=name)
        return value

    def asked(self, lengths: list[int]) -> list[Asked]:
        """What each prompt asks besides its parameters; raises ApiError.

        Args:
            lengths: of the prompts, in tokens.
        """
        count = len(lengths)
        found = []
        fields = ("return_logprob", "logprob_start_len", "top_logprobs_num")
        rows = zip(lengths, *(self.each(name, count) for name in fields), strict=True)
        for length, wants, start, top in rows:
            if start is not None and not -1 <= start <= length:
                said = f"logprob_start_len={start} must lie between -1 and the prompt's {length}"
                raise ApiError(400, f"{said} tokens", param="logprob_start_len")
            shows = bool(wants) and start is not None and 0 <= start < length
            mode = self.logprobs_mode or "processed_logprobs"
            asked = Asked(
                bool(wants), start if shows else None, top or 0, mode, self.cache_salt,
                bool(self.return_routed_experts),
            )  # fmt: skip
            found.append(asked)
        return found


def _unsupported(name: str, instead: str) -> ApiError:
    said = f"{name} is not supported here; {instead}"
    return ApiError(400, said, param=name, code="unsupported_parameter")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
