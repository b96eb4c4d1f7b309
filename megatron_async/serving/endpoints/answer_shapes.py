"""What the endpoints answer, for the OpenAPI description alone: answers are made as plain dicts.

An answer has these fields at least. A test compares them with what is really answered.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """There may be further fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


# --- errors ---------------------------------------------------------------------------------------


class ErrorDetail(Shape):
    """What went wrong; ``param`` is the field of the body at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    """An answer other than success."""

    error: ErrorDetail


# --- completions and chat -------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "abort"]
StopReason = int | str | None
"""The stop word or the stop token's id; why it was cut short, with the reason "length"."""


class PromptTokens(Shape):
    """The prompt's tokens that were found in the prefix cache."""

    cached_tokens: int


class UsageShape(Shape):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class CompletionLogProbsShape(Shape):
    """One entry for each token, in lists side by side."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


PromptLogProbs = list[dict[str, Any] | None] | None
"""By token id; null where nobody asked for it, as are lists of token ids."""


class CompletionChoice(Shape):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogProbsShape | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_logprobs: PromptLogProbs
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class CompletionAnswer(Shape):
    """``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageShape


class TopLogProb(Shape):
    """A token that was likely at a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogProb(TopLogProb):
    """The token that was taken there."""

    top_logprobs: list[TopLogProb]


class ChatLogProbs(Shape):
    """One entry for each token."""

    content: list[TokenLogProb]


class CalledFunction(Shape):
    """Its arguments are JSON as a text."""

    name: str
    arguments: str


class ToolCallShape(Shape):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class MessageShape(Shape):
    """The assistant's; there may be ``tool_calls``."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallShape] = []


class ChatChoice(Shape):
    """One message."""

    index: int
    message: MessageShape
    logprobs: ChatLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: StopReason
    token_ids: list[int] | None


class ChatAnswer(Shape):
    """``POST /v1/chat/completions``; there may be ``warnings``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageShape
    prompt_logprobs: PromptLogProbs
    prompt_token_ids: list[int] | None
    warnings: list[str] = []


# --- responses ------------------------------------------------------------------------------------

Status = Literal["completed", "incomplete"]


class TextPart(Shape):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogProb]


class MessageItem(Shape):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[TextPart]


class CallItem(Shape):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseUsageShape(Shape):
    """Tokens of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseAnswer(Shape):
    """``POST /v1/responses``; there may be ``warnings``."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: None
    incomplete_details: dict[str, Any] | None
    output: list[MessageItem | CallItem]
    usage: ResponseUsageShape
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    warnings: list[str] = []


# --- the others -----------------------------------------------------------------------------------


class MegatronAnswer(Shape):
    """``PUT /api``, with ``logprobs`` and ``top_n_logprobs`` if asked."""

    text: list[str]
    tokens: list[list[int]]
    segments: list[list[str]]


class ModelAnswer(Shape):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelsAnswer(Shape):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(Shape):
    """``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Shape):
    """``POST /detokenize``."""

    prompt: str


class HealthAnswer(Shape):
    """The engine serves."""

    status: Literal["ok"]


class VersionAnswer(Shape):
    """The version of this package."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is at fault"},
    "5XX": {"model": ErrorAnswer, "description": "The server is at fault, or not ready"},
}


def answers(shape: type[Shape], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint.

    Args:
        streams: its answer may be events.
    """
    success: dict[str, Any] = {"model": shape, "description": "Success"}
    if streams:
        events = {"schema": {"type": "string"}}
        success["content"] = {"text/event-stream": events}
    return {200: success}
