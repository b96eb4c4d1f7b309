"""``POST /v1/chat/completions``."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_async.serving.chat.answers.message import Message, MessageParser
from megatron_async.serving.chat.chat import ToolUse, with_tools
from megatron_async.serving.chat.kept_tokens import joined, kept_turn, text_behind
from megatron_async.serving.chat.prompt import Prompt
from megatron_async.serving.chat.thinking import Thinking, ThoughtLength
from megatron_async.serving.endpoints.json_body import apart
from megatron_async.serving.endpoints.log_prob_shapes import chat_log_probs, prompt_log_probs
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest
from megatron_async.serving.front_end.job import (
    Choice,
    Job,
    Piece,
    Usage,
    shown_experts,
    shown_weights,
    usage_of,
)
from megatron_async.serving.http.errors import json_response
from megatron_async.serving.http.frontend import Frontend, log_jobs, name_of
from megatron_async.serving.http.sse import DONE, EventStream, event, until_disconnect
from megatron_async.tokenizer.begin import behind_begin


async def create_chat_completion(
    front: Frontend, request: Request, body: ChatCompletionRequest
) -> Response:
    """The assistant's next message, whole or as a stream."""
    model = front.check_model(body.model)
    tools = front.chat.tool_use(body.tools, body.tool_choice, body.parallel_tool_calls is not False)
    asked = body.with_defaults(front.config.defaults)
    checked = partial(asked.params, front.config.max_choices)
    params = front.salted(request, await apart(request, checked))
    params = with_tools(params, tools, has_format=body.response_format is not None)
    await front.generator.check_room(params)
    prompt = await _prompt(front, body, tools, body.messages)
    thinking = front.chat.thinking(front.tokenizer, prompt.text)
    params = thinking.guide(params, body.budget)
    name = name_of(request, body.request_id)
    job = await front.generator.job(
        await _tokens(front, body, tools, prompt),
        params,
        names={**body.engine_names(), "prompt": "messages"},
        priority=body.priority,
        skip_special_tokens=body.skip_special_tokens is not False,
        cap_length=not body.num_new_tokens_given,
        markers=front.chat.markers(tools),
        name=name,
        answer_id=(answer_id := f"chatcmpl-{name}"),
    )
    log_jobs(request, [job], model)
    head = {
        "id": answer_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": (await front.generator.info()).fingerprint,
    }
    answer = _ChatCompletion(front, body, tools, job, head, prompt, thinking)
    if body.stream:
        return EventStream(answer.events())
    return json_response(await until_disconnect(request.receive, answer.whole()))


async def _prompt(
    front: Frontend,
    body: ChatCompletionRequest,
    tools: ToolUse,
    messages: Sequence[Mapping[str, Any]],
) -> Prompt:
    return await front.chat.prompt(
        messages,
        tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.template_variables,
    )


async def _tokens(
    front: Frontend, body: ChatCompletionRequest, tools: ToolUse, prompt: Prompt
) -> list[int]:
    """The tokens of the prompt: of its text, or an earlier turn's own and those behind it."""
    turn = None
    if body.prevent_retokenization is not False and not body.continue_final_message:
        turn = kept_turn(body.messages)
    if turn is not None:
        marked = await _prompt(front, body, tools, turn.marked(body.messages))
        behind = text_behind(marked.text)
        if behind is not None:
            return joined(turn.ids, await front.generator.tokenize(behind, field="messages"))
    # By default none: the template writes the begin token itself.
    ids = await front.generator.tokenize(
        prompt.text,
        add_special_tokens=bool(body.add_special_tokens),
        add_bos=bool(body.add_BOS),
        field="messages",
    )
    if body.add_BOS is None:
        return ids
    # As in Megatron's server, one or none, whatever the template writes.
    begin = front.tokenizer.bos_id
    others = behind_begin(ids, begin)
    return ids[:1] + others if body.add_BOS else others


class _ChatCompletion:
    """The answer to one request."""

    def __init__(
        self,
        front: Frontend,
        body: ChatCompletionRequest,
        tools: ToolUse,
        job: Job,
        head: dict[str, Any],
        prompt: Prompt,
        thinking: Thinking,
    ) -> None:
        self._front = front
        self._body = body
        self._tools = tools
        self._job = job
        self._head = head
        self._prompt = prompt
        self._thinking = thinking
        self._thoughts: dict[int, ThoughtLength] = defaultdict(thinking.counter)
        """By choice."""
        self._top = body.log_probs

    async def whole(self) -> dict[str, Any]:
        """The JSON of the answer."""
        job = self._job
        choices = [
            self._choice(index, choice)
            for index, choice in enumerate(await self._front.generator.whole(job))
        ]
        wants_log_probs = self._body.prompt_logprobs is not None
        return {
            **self._head,
            "choices": choices,
            "usage": self._shown_usage(usage_of([job])),
            "prompt_logprobs": self._prompt_log_probs() if wants_log_probs else None,
            "prompt_token_ids": job.prompt if self._body.return_token_ids else None,
            **self._prompt.fields,
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = Message()
        parser = self._parser()
        self._thoughts[index].add(choice.token_ids)
        message.add(parser.push(choice.text))
        message.add(parser.finish())
        return {
            "index": index,
            "message": {**message.to_dict(), **self._as_megatron(choice)},
            "logprobs": self._log_probs(choice.token_ids, choice.log_probs),
            "finish_reason": parser.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
            **(shown_weights(choice.weight_spans) if self._body.return_weight_versions else {}),
            **(shown_experts(choice.routed_experts) if self._body.return_routed_experts else {}),
        }

    def _as_megatron(self, choice: Choice) -> dict[str, Any]:
        """What Megatron's trainers read in a message."""
        body, shown = self._body, dict[str, Any]()
        if body.return_tokenized_data:
            shown["prompt_token_ids"] = self._job.prompt
            shown["generation_token_ids"] = choice.token_ids
        if body.return_raw_text:
            shown["raw_text"] = self._raw_prompt() + choice.text
        if shown and body.logprobs:
            shown["generation_log_probs"] = [own for own, _ in choice.log_probs]
        return shown

    def _raw_prompt(self) -> str:
        """The text of the prompt's tokens."""
        text, begin = self._prompt.text, self._front.tokenizer.bos_id
        if self._body.add_BOS is None or begin is None:
            return text
        written = self._front.tokenizer.token_name(begin) or ""
        behind = re.sub(rf"\A(?:{re.escape(written)})+", "", text)
        return written + behind if self._body.add_BOS else behind

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer as a stream."""
        parsers: dict[int, MessageParser] = {}
        async with contextlib.aclosing(self._front.generator.stream(self._job)) as pieces:
            async for piece in pieces:
                index = piece.output.index
                parser = parsers.get(index)
                if parser is None:
                    parser = parsers[index] = self._parser()
                    unsaid = len(piece.output.token_ids)
                    yield event(self._first(index, unsaid, is_first=len(parsers) == 1))
                self._thoughts[index].add(piece.output.token_ids)
                for chunk in self._chunks(piece, parser):
                    yield event(chunk)
        if self._body.wants_usage:
            usage = self._shown_usage(usage_of([self._job]))
            yield event({**self._head, "choices": [], "usage": usage, **self._prompt.fields})
        yield DONE

    def _first(self, index: int, unsaid: int, *, is_first: bool) -> dict[str, Any]:
        """The chunk that names the role, before ``unsaid`` tokens that are counted already."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self._head, "choices": [choice], **self._usage(unsaid)}
        if is_first and self._body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = self._prompt_log_probs()
        if is_first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._job.prompt
        return chunk

    def _chunks(self, piece: Piece, parser: MessageParser) -> list[dict[str, Any]]:
        """What a piece adds to the message; its last chunk ends the choice."""
        output, reason = piece.output, piece.finish_reason
        deltas = parser.push(piece.text)
        if reason is not None:
            deltas = [*deltas, *parser.finish()]
        log_probs = self._log_probs(output.token_ids, output.log_probs or ())
        # Tokens whose text is held back are shown with their log-probabilities at once.
        if not deltas and (reason is not None or log_probs or self._body.return_token_ids):
            deltas = [{}]
        chunks = []
        for number, delta in enumerate(deltas, start=1):
            is_last = number == len(deltas)
            shown: dict[str, Any] = {
                "index": output.index,
                "delta": delta,
                "logprobs": log_probs if number == 1 else None,
                "finish_reason": None,
            }
            if self._body.return_token_ids:
                shown["token_ids"] = output.token_ids if number == 1 else []
            if is_last and reason is not None:
                shown["finish_reason"] = parser.finish_reason(reason)
                shown["stop_reason"] = output.stop_reason
                if self._body.return_weight_versions:
                    shown |= shown_weights(output.weight_spans)
                if self._body.return_routed_experts:
                    shown |= shown_experts(output.routed_experts)
            chunks.append({**self._head, "choices": [shown], **self._usage()})
        if len(self._job.ends) == self._job.params.n and not self._body.wants_usage:
            chunks[-1] |= self._prompt.fields
        return chunks

    def _usage(self, unsaid: int = 0) -> dict[str, Any]:
        """The field of a chunk that is not the last, but for tokens that come behind it."""
        if self._body.wants_continuous_usage:
            usage = usage_of([self._job])
            shown = usage._replace(generated=usage.generated - unsaid)
            return {"usage": self._shown_usage(shown)}
        return {"usage": None} if self._body.wants_usage else {}

    def _shown_usage(self, usage: Usage) -> dict[str, Any]:
        """With the tokens of thoughts, where they are known."""
        if not self._thinking.is_known:
            return usage.to_dict()
        count = sum(thought.count for thought in self._thoughts.values())
        return {**usage.to_dict(), "completion_tokens_details": {"reasoning_tokens": count}}

    def _parser(self) -> MessageParser:
        return self._front.chat.parser(
            self._tools,
            self._prompt.text,
            self._job.markers.values(),
            shows_thought=self._body.include_reasoning is not False,
        )

    def _log_probs(self, ids: list[int], log_probs: Any) -> dict[str, Any] | None:
        if self._top is None or not log_probs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_log_probs(self._front.token_names, ids, log_probs, self._top, as_ids=as_ids)

    def _prompt_log_probs(self) -> list[dict[str, Any] | None]:
        job, top = self._job, self._body.prompt_logprobs or 0
        return prompt_log_probs(self._front.token_names, job, top)
