"""The requests of OpenAI's API, with vLLM's further fields, and what they ask of the engine.

Fields that are not here are ignored, as OpenAI's API does, unless they change what comes back in
other servers; values of a wrong type are errors.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import WrapValidator
from pydantic_core import PydanticCustomError

from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.bodies.body import (
    MAX_TOKEN,
    Integer,
    Messages,
    Several,
    Text,
    Token,
    at_least,
    range_of,
    schema_of,
)
from megatron_async.serving.bodies.sampling_fields import SamplingFields
from megatron_async.serving.http.errors import ApiError

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's API generates for a completion that names no length."""
MANY = 1 << 16
"""Token ids that are looked at in a millisecond."""


def _check_prompt(value: Any, _: Any) -> Any:
    """Texts or token ids, told apart by the first: a union would try each type on every item."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        for number, tokens in enumerate(value):
            if not isinstance(tokens, list):
                raise _wrong(f"prompt[{number}]", "a list of token ids, as the first is")
            check_tokens(tokens, f"prompt[{number}]")
    elif isinstance(value, list) and value and isinstance(value[0], str):
        for number, text in enumerate(value):
            if not isinstance(text, str):
                raise _wrong(f"prompt[{number}]", "a text, as the first is")
    elif isinstance(value, list):
        check_tokens(value, "prompt")
    elif not isinstance(value, str):
        raise _wrong("prompt", "a text, a list of texts, or lists of token ids")
    return value


def check_tokens(tokens: list[Any], place: str) -> None:
    """Raises PydanticCustomError, which names ``place``, for what is no list of token ids."""
    # By parts: no other thread runs while one of them is looked at.
    for start in range(0, len(tokens), MANY):
        part = tokens[start : start + MANY]
        if set(map(type, part)) == {int} and min(part) >= 0 and max(part) <= MAX_TOKEN:
            continue
        for number, token in enumerate(part, start):
            if type(token) is not int or not 0 <= token <= MAX_TOKEN:
                raise _wrong(f"{place}[{number}]", f"a token id from 0 to {MAX_TOKEN}")


def _wrong(place: str, wanted: str) -> PydanticCustomError:
    return PydanticCustomError("prompt", f"{place} must be {wanted}")


def template_variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the chat template: those that a request gives go before its effort."""
    own = {} if effort is None else {"reasoning_effort": effort}
    return {**own, **(given or {})}


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: Annotated[
        Text
        | Annotated[list[Text] | list[Token], schema_of(minItems=1)]
        | Annotated[list[Annotated[list[Token], schema_of(minItems=1)]], schema_of(minItems=1)],
        WrapValidator(_check_prompt),
    ]
    best_of: Annotated[Integer | None, at_least(1)] = None
    echo: bool | None = None
    logprobs: Annotated[Integer | None, range_of("top_n_logprobs")] = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def num_ranked(self) -> int | None:
        """See the base."""
        return self.best_of

    @property
    def log_probs(self) -> int | None:
        """See the base."""
        return self.logprobs

    @property
    def prompt_log_probs(self) -> int | None:
        """With ``echo`` the prompt's tokens are the text's."""
        echoed = self.logprobs if self.echo else None
        known = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(known, default=None)

    @property
    def num_new_tokens(self) -> int | None:
        """OpenAI's default; to echo a prompt alone, one token is generated and not shown."""
        given = super().num_new_tokens
        if given == 0 and self.echo:
            return 1
        return DEFAULT_COMPLETION_TOKENS if given is None else given

    @property
    def shows_generated(self) -> bool:
        """False for ``max_tokens=0``, which echoes the prompt alone."""
        return super().num_new_tokens != 0

    def params(self, max_choices: int) -> SamplingParams:
        """See the base."""
        if self.suffix:
            raise ApiError(400, "suffix is not supported; leave it out", param="suffix")
        if self.best_of is not None:
            if not self.num_choices <= self.best_of <= max_choices:
                said = f"best_of={self.best_of} must lie between n={self.num_choices} and "
                raise ApiError(400, said + str(max_choices), param="best_of")
            if self.stream and self.best_of > self.num_choices:
                said = f"best_of={self.best_of} cannot be streamed; leave it out"
                raise ApiError(400, said, param="best_of")
        return super().params(max_choices)


class ChatCompletionRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer | None, range_of("top_n_logprobs")] = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None
    thinking_budget: Annotated[Integer | None, at_least(0)] = None
    thinking_token_budget: Annotated[Integer | None, at_least(0)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Megatron's, in whole answers alone
    add_BOS: bool | None = None
    return_tokenized_data: bool | None = None
    return_raw_text: bool | None = None
    prevent_retokenization: bool | None = None

    names: ClassVar[dict[str, str]] = {"logprobs": "top_logprobs"}

    def params(self, max_choices: int) -> SamplingParams:
        """See the base."""
        for name in ("return_tokenized_data", "return_raw_text"):
            if self.stream and getattr(self, name):
                raise ApiError(400, f"{name} goes with stream=false alone", param=name)
        return super().params(max_choices)

    @property
    def budget(self) -> int | None:
        """The most tokens of a thought, by either name."""
        given = self.thinking_budget
        return self.thinking_token_budget if given is None else given

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return template_variables(self.chat_template_kwargs, self.reasoning_effort)

    @property
    def log_probs(self) -> int | None:
        """``top_logprobs``, which goes with ``logprobs`` alone."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0
