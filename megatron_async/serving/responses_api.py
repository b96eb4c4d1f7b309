"""``POST /v1/responses``: text in and out, whole or as typed events. Nothing is stored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatron_async.serving.chat import ToolUse
from megatron_async.serving.errors import ApiError, json_response
from megatron_async.serving.frontend import Frontend, log_jobs
from megatron_async.serving.generation import Choice, Job, usage_of
from megatron_async.serving.log_prob_shapes import chat_log_probs
from megatron_async.serving.openai_api import (
    Body,
    JsonSchema,
    ResponseFormat,
    SamplingFields,
    structure_of_format,
)
from megatron_async.serving.sse import EventStream, event, until_disconnect


class TextFormat(Body):
    """``text.format``: chat's ``response_format`` with the schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def response_format(self) -> ResponseFormat:
        """The same for chat; raises ApiError without a schema."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        if self.schema_ is None:
            said = "text.format of type json_schema needs schema"
            raise ApiError(400, said, param="text.format.schema")
        return ResponseFormat(type=self.type, json_schema=JsonSchema(schema=self.schema_))


class TextOptions(Body):
    """``text``."""

    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    tools: list[Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    names: ClassVar[dict[str, str]] = {
        "num_tokens_to_generate": "max_output_tokens",
        "logprobs": "top_logprobs",
        "prompt": "input",
        "messages": "input",
        "response_format": "text",
    }

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

    def messages(self) -> list[dict[str, Any]]:
        """The chat that is to be continued; raises ApiError for what is no text."""
        messages = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            if item.get("type", "message") != "message":
                said = f"input[{number}]: only messages are supported"
                raise ApiError(400, said, param=f"input[{number}].type")
            messages.append({name: item[name] for name in ("role", "content") if name in item})
        return messages

    def check_supported(self) -> None:
        """Raises ApiError for what this server does not do, rather than leave it out silently."""
        for name in ("tools", "previous_response_id", "background"):
            if getattr(self, name):
                instead = "; send tools to /v1/chat/completions" if name == "tools" else ""
                raise ApiError(400, f"{name} is not supported here{instead}", param=name)


async def create_response(front: Frontend, request: Request, body: ResponsesRequest) -> Response:
    """The assistant's next message."""
    model = front.check_model(body.model)
    body.check_supported()
    if body.text is not None and body.text.format is not None:
        body.response_format = body.text.format.response_format()
        structure_of_format(body.response_format)
    params = body.params(1)
    text = front.chat.prompt(body.messages(), ToolUse(), names=body.names)
    job = await front.generator.job(
        await front.generator.tokenize(text),
        params,
        names=body.engine_names(),
        priority=body.priority,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    log_jobs(request, [job], model)
    answer = _Answer(front, body, job, request.state.request_id, model)
    if body.stream:
        return EventStream(answer.events())
    return json_response(await until_disconnect(request.receive, answer.whole()))


class _Answer:
    """The answer to one request."""

    def __init__(
        self, front: Frontend, body: ResponsesRequest, job: Job, request_id: str, model: str
    ) -> None:
        self._front = front
        self._body = body
        self._job = job
        self._item_id = f"msg_{request_id}"
        format = (body.text and body.text.format) or TextFormat(schema=None)
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": job.params.temperature,
            "text": {"format": format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": job.params.top_p,
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        """The JSON of the answer."""
        (choice,) = await self._front.generator.whole(self._job)
        return self._response(choice)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer as a stream."""
        choice, number = Choice(), 0
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        parts: list[str] = []

        def make(name: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **fields}, name)

        async with contextlib.aclosing(self._front.generator.stream(self._job)) as pieces:
            async for text, output in pieces:
                if not number:
                    begun = self._response(None)
                    yield make("response.created", response=begun)
                    yield make("response.in_progress", response=begun)
                    item = self._item("in_progress", [])
                    yield make("response.output_item.added", output_index=0, item=item)
                    yield make("response.content_part.added", **where, part=self._part(choice))
                choice.token_ids += output.token_ids
                log_probs = output.log_probs or []
                choice.log_probs += log_probs
                parts.append(text)
                if text or log_probs:
                    shown = self._log_probs(output.token_ids, log_probs)
                    yield make("response.output_text.delta", **where, delta=text, logprobs=shown)
                if output.finish_reason is not None:
                    choice.finish_reason = output.finish_reason
        choice.text = "".join(parts)
        part, response = self._part(choice), self._response(choice)
        said = {"text": choice.text, "logprobs": part["logprobs"]}
        yield make("response.output_text.done", **where, **said)
        yield make("response.content_part.done", **where, part=part)
        yield make("response.output_item.done", output_index=0, item=response["output"][0])
        yield make(f"response.{response['status']}", response=response)

    def _response(self, choice: Choice | None) -> dict[str, Any]:
        """As it is at its end, or at its beginning without ``choice``."""
        response = {
            **self._head,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        if choice is None:
            return response
        status = "completed" if choice.finish_reason == "stop" else "incomplete"
        if status == "incomplete":
            is_length = choice.finish_reason == "length"
            reason = "max_output_tokens" if is_length else choice.finish_reason
            response["incomplete_details"] = {"reason": reason}
        usage = usage_of([self._job])
        return response | {
            "status": status,
            "output": [self._item(status, [self._part(choice)])],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.generated,
            },
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}
        return {**item, "content": content}

    def _part(self, choice: Choice) -> dict[str, Any]:
        log_probs = self._log_probs(choice.token_ids, choice.log_probs)
        part = {"type": "output_text", "text": choice.text, "annotations": []}
        return {**part, "logprobs": log_probs}

    def _log_probs(self, ids: list[int], log_probs: Any) -> list[dict[str, Any]]:
        top = self._body.log_probs
        if top is None or not log_probs:
            return []
        shown = chat_log_probs(self._front.token_names, ids, log_probs, top)["content"]
        assert isinstance(shown, list)
        return shown
