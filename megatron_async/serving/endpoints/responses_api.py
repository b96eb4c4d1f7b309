"""``POST /v1/responses``: texts and calls, whole or as typed events. Nothing is stored."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatron_async.errors import RequestError
from megatron_async.serving.bodies.body import (
    MAX_MESSAGES,
    Body,
    Integer,
    Several,
    Text,
    at_least,
    at_most,
    range_of,
)
from megatron_async.serving.bodies.formats import JsonSchema, ResponseFormat, structure_of_format
from megatron_async.serving.bodies.sampling_fields import SamplingFields
from megatron_async.serving.chat.chat import ToolUse, with_tools
from megatron_async.serving.chat.chat_messages import plain
from megatron_async.serving.chat.prompt import Prompt
from megatron_async.serving.chat.thinking import Thinking
from megatron_async.serving.endpoints.json_body import apart
from megatron_async.serving.endpoints.log_prob_shapes import chat_log_probs
from megatron_async.serving.endpoints.request_shapes import template_variables
from megatron_async.serving.endpoints.responses_input import InputMessages
from megatron_async.serving.endpoints.responses_output import Event, OutputItems
from megatron_async.serving.front_end.job import Job, shown_experts, shown_weights, usage_of
from megatron_async.serving.http.errors import ApiError, describe, json_response, renamed
from megatron_async.serving.http.frontend import Frontend, log_jobs, name_of
from megatron_async.serving.http.sse import EventStream, event, until_disconnect
from megatron_async.serving.messages import Output

MOST_METADATA = 1024
"""Entries that are echoed; OpenAI takes 16."""


class TextFormat(Body):
    """``text.format``: chat's ``response_format`` with the schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def shown(self) -> dict[str, Any]:
        """Return the format as answers repeat it."""
        if self.type != "json_schema":
            return {"type": self.type}
        name, description = self.name or "schema", self.description
        own = {"schema": self.schema_, "strict": True}  # it is always followed strictly
        return {"type": self.type, "name": name, "description": description, **own}

    def response_format(self) -> ResponseFormat:
        """The same for chat; raises ApiError without a schema."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type, schema=self.schema_)
        if self.schema_ is None:
            said = "text.format of type json_schema needs schema"
            raise ApiError(400, said, param="text.format.schema")
        schema = JsonSchema(schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema, schema=None)


class TextOptions(Body):
    """``text``."""

    format: TextFormat | None = None


class Reasoning(Body):
    """``reasoning``."""

    effort: Text | None = None


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``."""

    input: str | Annotated[Several[dict[str, Any]], at_most(MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer | None, at_least(1)] = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    thinking_budget: Annotated[Integer | None, at_least(0)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Annotated[Integer | None, range_of("top_n_logprobs")] = None
    include: Several[str] | None = None
    metadata: Annotated[dict[str, Any] | None, at_most(MOST_METADATA)] = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None

    names: ClassVar[dict[str, str]] = {
        "num_tokens_to_generate": "max_output_tokens",
        "logprobs": "top_logprobs",
        "prompt": "input",
        "messages": "input",
        "response_format": "text",
    }
    length_field: ClassVar[str] = "max_output_tokens"

    @property
    def log_probs(self) -> int | None:
        """Asked for by ``include``, or by a number of most likely tokens."""
        if "message.output_text.logprobs" in (self.include or ()):
            return self.top_logprobs or 0
        return self.top_logprobs or None

    @property
    def num_new_tokens(self) -> int | None:
        """See the base."""
        return self.max_output_tokens

    @property
    def num_new_tokens_given(self) -> bool:
        """See the base."""
        return self.max_output_tokens is not None

    @property
    def effort(self) -> str | None:
        """How much the model is to reason, if it is said."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return template_variables(self.chat_template_kwargs, self.effort)

    def check_supported(self) -> None:
        """Raises ApiError for what this server does not do, rather than leave it out silently."""
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported here; leave it out", param=name)
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) is not None:
                raise ApiError(
                    400, f"{name} is of other paths; send max_output_tokens here", param=name
                )

    def take_format(self) -> None:
        """Have ``text.format`` as ``response_format``; raises ApiError."""
        if self.text is None or self.text.format is None:
            return
        try:
            plain("text.format", self.text.format.shown())
        except RequestError as error:
            raise renamed(error, {}) from None
        self.response_format = self.text.format.response_format()
        structure_of_format(self.response_format)


async def create_response(front: Frontend, request: Request, body: ResponsesRequest) -> Response:
    """The assistant's next message, or its calls of functions."""
    model = front.check_model(body.model)
    body.check_supported()
    await apart(request, body.take_format)
    tools = _tool_use(front, body)
    asked = body.with_defaults(front.config.defaults)
    checked = partial(asked.params, 1)
    params = front.salted(request, await apart(request, checked))
    params = with_tools(params, tools, has_format=body.response_format is not None)
    await front.generator.check_room(params)
    given = InputMessages(body.input, body.instructions)
    try:
        prompt = await front.chat.prompt(
            given.messages, tools, chat_template_kwargs=body.template_variables
        )
    except ApiError as error:
        raise given.in_items(error) from None
    thinking = front.chat.thinking(front.tokenizer, prompt.text)
    params = thinking.guide(params, body.thinking_budget)
    name = name_of(request, body.request_id)
    job = await front.generator.job(
        await front.generator.tokenize(prompt.text, field="input"),
        params,
        names=body.engine_names(),
        priority=body.priority,
        cap_length=not body.num_new_tokens_given,
        skip_special_tokens=body.skip_special_tokens is not False,
        markers=front.chat.markers(tools),
        name=name,
        answer_id=f"resp_{name}",
    )
    job.is_acknowledged = bool(body.stream)
    log_jobs(request, [job], model)
    answer = _Answer(front, body, tools, job, name, model, prompt, thinking)
    if body.stream:
        return EventStream(answer.events(), answer.failed)
    return json_response(await until_disconnect(request.receive, answer.whole()))


def _tool_use(front: Frontend, body: ResponsesRequest) -> ToolUse:
    parallel = body.parallel_tool_calls is not False
    try:
        plain("metadata", body.metadata or {})
        place = "tools[{}].parameters"
        return front.chat.tool_use(body.tools, body.tool_choice, parallel, place=place)
    except RequestError as error:
        raise renamed(error, {}) from None
    except ApiError as error:
        # Tools have no "function" of their own here.
        param = error.param and error.param.replace(".function", "", 1)
        said = str(error).replace(".function", "", 1)
        raise ApiError(error.status, said, param=param, code=error.code) from None


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool that has been checked, in the form of this API."""
    own = {name: value for name, value in tool.items() if name != "function"}
    defaults = {"parameters": None, "strict": None, "description": None}
    return {**defaults, **own, **tool.get("function", {}), "type": "function"}


class _Answer:
    """The answer to one request."""

    def __init__(
        self,
        front: Frontend,
        body: ResponsesRequest,
        tools: ToolUse,
        job: Job,
        request_id: str,
        model: str,
        prompt: Prompt,
        thinking: Thinking,
    ) -> None:
        self._front = front
        self._job = job
        self._thought = thinking.counter()
        self._top = body.log_probs
        self._shows_weights = bool(body.return_weight_versions)
        self._shows_experts = bool(body.return_routed_experts)
        self._numbers = itertools.count()
        parser = front.chat.parser(tools, prompt.text, job.markers.values())
        self._items = OutputItems(request_id, parser)
        format = (body.text and body.text.format) or TextFormat(schema=None)
        self._head: dict[str, Any] = {
            "id": job.answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": False,
            "temperature": job.params.temperature,
            "text": {"format": format.shown()},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [_flat(tool) for tool in body.tools or ()],
            "top_p": job.params.top_p,
            "truncation": "disabled",
            **prompt.fields,
        }

    async def whole(self) -> dict[str, Any]:
        """The JSON of the answer."""
        last: Output | None = None
        async with contextlib.aclosing(self._front.generator.stream(self._job)) as pieces:
            async for text, output in pieces:
                self._items.push(text, self._log_probs(output))
                self._thought.add(output.token_ids)
                last = output
        assert last is not None
        status = _status(last)
        self._items.finish(status)
        return self._response(status, last)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer as a stream, from the moment at which the engine has taken the
        request; an error before that has a status of its own."""
        begun = False
        last: Output | None = None
        async with contextlib.aclosing(self._front.generator.stream(self._job)) as pieces:
            async for text, output in pieces:
                if not begun:
                    begun = True
                    response = self._response("in_progress")
                    for name in ("response.created", "response.in_progress"):
                        yield self._event({"type": name, "response": response})
                for content in self._items.push(text, self._log_probs(output)):
                    yield self._event(content)
                self._thought.add(output.token_ids)
                last = output
        assert last is not None
        status = _status(last)
        for content in self._items.finish(status):
            yield self._event(content)
        response = self._response(status, last)
        yield self._event({"type": f"response.{status}", "response": response})

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that an error has cut."""
        response = self._response("failed", error=_error(error))
        return self._event({"type": "response.failed", "response": response})

    def _event(self, content: Event) -> bytes:
        name = content["type"]
        return event({"type": name, "sequence_number": next(self._numbers), **content}, name)

    def _response(
        self, status: str, last: Output | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response as it is now, or with its ``last`` output at its end."""
        response = {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "output": self._items.items(),
            "usage": None,
        }
        if last is None:
            return response
        if status == "incomplete":
            details: dict[str, Any] = {"reason": "max_output_tokens"}
            if last.finish_reason == "abort":
                details["stop_reason"] = "abort"
            elif last.stop_reason is not None:
                details["stop_reason"] = last.stop_reason
            response["incomplete_details"] = details
        if self._shows_weights:
            response |= shown_weights(last.weight_spans)
        if self._shows_experts:
            response |= shown_experts(last.routed_experts)
        usage = usage_of([self._job])
        response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": self._thought.count},
            "total_tokens": usage.prompt + usage.generated,
        }
        return response

    def _log_probs(self, output: Output) -> list[dict[str, Any]]:
        if self._top is None or not output.log_probs:
            return []
        names, ids = self._front.token_names, output.token_ids
        shown = chat_log_probs(names, ids, output.log_probs, self._top)["content"]
        assert isinstance(shown, list)
        return shown


def _status(last: Output) -> str:
    return "completed" if last.finish_reason == "stop" else "incomplete"


def _error(error: Exception) -> dict[str, Any]:
    """The error of a response, with one of the codes that this API has."""
    status, body = describe(error)
    code = "server_error" if status >= 500 else "invalid_prompt"
    return {
        "code": "rate_limit_exceeded" if status == 429 else code,
        "message": body["error"]["message"],
    }
