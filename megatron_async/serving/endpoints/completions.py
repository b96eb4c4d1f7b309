"""``POST /v1/completions``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_async.request.parameter_checks import check_vocabulary
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.endpoints.json_body import apart
from megatron_async.serving.endpoints.log_prob_shapes import (
    CompletionLogProbs,
    joined,
    prompt_log_probs,
)
from megatron_async.serving.endpoints.piece_order import ahead_of_others
from megatron_async.serving.endpoints.request_shapes import CompletionRequest
from megatron_async.serving.front_end.job import (
    Choice,
    Job,
    Piece,
    shown_experts,
    shown_weights,
    usage_of,
)
from megatron_async.serving.http.errors import ApiError, json_response
from megatron_async.serving.http.frontend import Frontend, log_jobs, name_of
from megatron_async.serving.http.sse import DONE, EventStream, TextEvents, event, until_disconnect
from megatron_async.serving.messages import WeightVersion


async def create_completion(front: Frontend, request: Request, body: CompletionRequest) -> Response:
    """Texts that continue one prompt or several, whole or as a stream."""
    model = front.check_model(body.model)
    asked = body.with_defaults(front.config.defaults)
    checked = partial(asked.params, front.config.max_choices)
    params = front.salted(request, await apart(request, checked))
    name = name_of(request, body.request_id)
    answer_id = f"cmpl-{name}"
    jobs = await _jobs(front, body, params, name, answer_id)
    log_jobs(request, jobs, model)
    head = {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": (await front.generator.info()).fingerprint,
    }
    answer = _Completion(front, body, jobs, head)
    if body.stream:
        return EventStream(answer.events())
    return json_response(await until_disconnect(request.receive, answer.whole()))


async def _jobs(
    front: Frontend, body: CompletionRequest, params: SamplingParams, name: str, answer_id: str
) -> list[Job]:
    info = await front.generator.info()
    prompts = body.prompt
    several: list[str] | list[list[int]]
    if isinstance(prompts, str):
        several = [prompts]
    elif prompts and isinstance(prompts[0], int):
        several = [prompts]  # type: ignore[list-item]
    else:
        several = prompts  # type: ignore[assignment]
    most = front.config.max_prompts
    if not 1 <= len(several) <= most:
        said = f"prompt has {len(several)} prompts; send between 1 and {most}"
        raise ApiError(400, said, param="prompt")
    await front.generator.check_room(params, prompts=len(several))
    jobs = []
    for prompt in several:
        text = prompt if isinstance(prompt, str) else None
        offsets = None
        skips = body.skip_special_tokens is not False
        if isinstance(prompt, str):
            adds = body.add_special_tokens is not False
            ids = await front.generator.tokenize(prompt, add_special_tokens=adds)
            if body.echo and body.logprobs is not None and len(ids) < info.max_sequence_length:
                offsets = await front.generator.texts.offsets(prompt, add_special_tokens=adds)
        else:
            ids = prompt
            if len(ids) < info.max_sequence_length:  # else it is refused unread
                check_vocabulary("prompt", ids, info.vocab_size)
                text = await front.generator.texts.detokenize(ids, skips) if body.echo else None
        job = await front.generator.job(
            ids,
            params,
            names=body.engine_names(),
            priority=body.priority,
            cap_length=not body.num_new_tokens_given,
            skip_special_tokens=skips,
            text=text,
            scores_prompt=not body.shows_generated,
            name=name,
            answer_id=answer_id,
        )
        job.prompt_offsets = offsets
        jobs.append(job)
    return jobs


class _Completion:
    """The answer to one request."""

    def __init__(
        self, front: Frontend, body: CompletionRequest, jobs: list[Job], head: dict[str, Any]
    ) -> None:
        self._front = front
        self._body = body
        self._jobs = jobs
        self._head = head
        self._as_ids = bool(body.return_tokens_as_token_ids)

    async def whole(self) -> dict[str, Any]:
        """The JSON of the answer."""
        choices = []
        for number, of_prompt in enumerate(await self._front.generator.all_whole(self._jobs)):
            for index, choice in enumerate(of_prompt):
                choices.append(self._choice(number, index, choice))
        return {**self._head, "choices": choices, "usage": usage_of(self._jobs).to_dict()}

    def _choice(self, number: int, index: int, choice: Choice) -> dict[str, Any]:
        body, job = self._body, self._jobs[number]
        parts, log_probs = [], None
        if body.logprobs is not None:
            shaper = self._shaper(job)
            if body.echo:
                parts.append(_echoed(shaper, job))
            if body.shows_generated or not parts:
                parts.append(shaper.part(choice.token_ids, choice.log_probs))
            log_probs = joined(parts)
        text = choice.text if body.shows_generated else ""
        ids = choice.token_ids if body.shows_generated else []
        wants_log_probs = body.prompt_logprobs is not None
        return {
            "index": number * body.num_choices + index,
            "text": (job.text or "") + text if body.echo else text,
            "logprobs": log_probs,
            "finish_reason": choice.finish_reason if body.shows_generated else "length",
            "stop_reason": choice.stop_reason if body.shows_generated else None,
            "prompt_logprobs": self._prompt_log_probs(job) if wants_log_probs else None,
            "prompt_token_ids": job.prompt if body.return_token_ids else None,
            "token_ids": ids if body.return_token_ids else None,
            **self._weights(choice.weight_spans),
            **(shown_experts(choice.routed_experts) if body.return_routed_experts else {}),
        }

    def _weights(self, spans: Sequence[WeightVersion]) -> dict[str, Any]:
        body = self._body
        if not body.return_weight_versions:
            return {}
        return shown_weights(spans if body.shows_generated else ())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer as a stream."""
        body, count = self._body, self._body.num_choices
        is_plain = self._is_plain
        texts: dict[int, TextEvents] = {}
        shapers: dict[int, CompletionLogProbs] = {}
        seen: set[int] = set()
        async with contextlib.aclosing(self._front.generator.stream_all(self._jobs)) as arriving:
            async for number, piece in ahead_of_others(arriving, self._jobs):
                index = number * count + piece.output.index
                is_first = index not in seen
                seen.add(index)
                if is_plain and piece.text and piece.finish_reason is None:
                    made = texts.get(index) or texts.setdefault(index, self._text_events(index))
                    yield made.event(piece.text)
                    continue
                if not (piece.text or piece.finish_reason or piece.output.token_ids or is_first):
                    continue
                shown = self._piece(self._jobs[number], index, piece, is_first, shapers)
                yield event({**self._head, "choices": [shown], **self._usage()})
        if body.wants_usage:
            yield event({**self._head, "choices": [], "usage": usage_of(self._jobs).to_dict()})
        yield DONE

    @property
    def _is_plain(self) -> bool:
        """Most pieces bring text and nothing else."""
        body = self._body
        return body.shows_generated and not (
            body.echo
            or body.wants_continuous_usage
            or body.return_token_ids
            or body.logprobs is not None
            or body.prompt_logprobs is not None
        )

    def _text_events(self, index: int) -> TextEvents:
        shown = {"index": index, "text": TextEvents.PLACE, "logprobs": None, "finish_reason": None}
        return TextEvents({**self._head, "choices": [shown], **self._usage()})

    def _usage(self) -> dict[str, Any]:
        """The field of a chunk that is not the last."""
        if self._body.wants_continuous_usage:
            return {"usage": usage_of(self._jobs).to_dict()}
        return {"usage": None} if self._body.wants_usage else {}

    def _piece(
        self,
        job: Job,
        index: int,
        piece: Piece,
        is_first: bool,
        shapers: dict[int, CompletionLogProbs],
    ) -> dict[str, Any]:
        body, output = self._body, piece.output
        text = piece.text if body.shows_generated else ""
        shown: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if output.finish_reason is not None:
            shown["stop_reason"] = output.stop_reason
            if not body.shows_generated:
                shown["finish_reason"], shown["stop_reason"] = "length", None
            shown |= self._weights(output.weight_spans)
            if body.return_routed_experts:
                shown |= shown_experts(output.routed_experts)
        if is_first and body.echo:
            shown["text"] = (job.text or "") + text
        if body.logprobs is not None:
            shaper = shapers.get(index) or shapers.setdefault(index, self._shaper(job))
            parts = []
            if is_first and body.echo:
                parts.append(_echoed(shaper, job))
            if body.shows_generated or not parts:
                parts.append(shaper.part(output.token_ids, output.log_probs or ()))
            shown["logprobs"] = joined(parts)
        if is_first and body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = self._prompt_log_probs(job)
        if body.return_token_ids:
            shown["token_ids"] = output.token_ids if body.shows_generated else []
            if is_first:
                shown["prompt_token_ids"] = job.prompt
        return shown

    def _shaper(self, job: Job) -> CompletionLogProbs:
        return CompletionLogProbs(
            self._front.tokenizer,
            self._front.token_names,
            self._body.logprobs or 0,
            as_ids=self._as_ids,
            prompt=job.prompt,
            skip_special_tokens=job.skip_special_tokens,
        )

    def _prompt_log_probs(self, job: Job) -> list[dict[str, Any] | None]:
        top = self._body.prompt_logprobs or 0
        return prompt_log_probs(self._front.token_names, job, top)


def _echoed(shaper: CompletionLogProbs, job: Job) -> dict[str, Any]:
    """The prompt's part of the log-probabilities."""
    return shaper.prompt(job.prompt, job.prompt_log_probs, job.text or "", job.prompt_offsets)
