"""``POST /generate`` as SGLang answers it."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from megatron_async.request.parameter_checks import check_vocabulary
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.endpoints.json_body import apart
from megatron_async.serving.endpoints.log_prob_shapes import LEAST
from megatron_async.serving.endpoints.piece_order import ahead_of_others
from megatron_async.serving.front_end.job import Choice, Job, shown_weights
from megatron_async.serving.http.errors import ApiError, json_response
from megatron_async.serving.http.frontend import Frontend, log_jobs, name_of
from megatron_async.serving.http.sse import DONE, EventStream, event, until_disconnect
from megatron_async.serving.messages import EngineInfo, Kept
from megatron_async.serving.sglang.generate_body import (
    NAMES,
    Asked,
    GenerateRequest,
    SglangSampling,
)

EVENTS_OF_ALL = 256
"""Beyond as many tokens an event of a stream waits for more: each shows all so far."""
Shown = list[Any]
"""A log-probability as SGLang shows it: ``[value, token id, text or null]``."""


class Prompt(NamedTuple):
    """One prompt of a request."""

    job: Job
    asked: Asked
    rid: str


async def generate(front: Frontend, request: Request, body: GenerateRequest) -> Response:
    """Texts that continue one prompt or several, whole or as a stream."""
    prompts = await _prompts(front, request, body)
    log_jobs(request, [prompt.job for prompt in prompts], front.config.model_names[0])
    answer = _Answer(front, body, prompts, await front.generator.info())
    if body.stream:
        return EventStream(answer.events())
    return json_response(await until_disconnect(request.receive, answer.whole()))


async def _prompts(front: Frontend, request: Request, body: GenerateRequest) -> list[Prompt]:
    given = body.prompts(front.config.max_prompts)
    default = SglangSampling()
    sampling = [each or default for each in body.each("sampling_params", len(given))]
    if len({each.num_choices for each in sampling}) > 1:
        raise ApiError(400, "n must be the same for all prompts", param="n")
    field = "text" if body.input_ids is None else "input_ids"
    ids = [await _ids(front, field, prompt) for prompt in given]
    each_asked = body.asked([len(tokens) for tokens in ids])
    rids = _rids(request, body, len(given))
    found = []
    known: dict[tuple[int, Asked], SamplingParams] = {}
    rows = zip(ids, given, sampling, each_asked, rids, strict=True)
    for tokens, prompt, wanted, asked, rid in rows:
        key = id(wanted), asked  # all prompts may have the same ones, which take long to check
        if key not in known:
            checked = partial(wanted.params, asked, front.config.max_choices)
            params = front.salted(request, await apart(request, checked))
            await front.generator.check_room(params, prompts=len(given), field=field)
            known[key] = params
        params = known[key]
        job = await front.generator.job(
            tokens,
            params,
            names={**NAMES, "prompt": field},
            cap_length=wanted.max_new_tokens is None,
            skip_special_tokens=wanted.skip_special_tokens is not False,
            text=prompt if isinstance(prompt, str) else None,
            name=rid,
        )
        job.keeps_stop = bool(wanted.no_stop_trim)
        found.append(Prompt(job, asked, rid))
    return found


async def _ids(front: Frontend, field: str, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return await front.generator.tokenize(prompt, add_special_tokens=True, field=field)
    info = await front.generator.info()
    if len(prompt) < info.max_sequence_length:  # else it is refused unread
        check_vocabulary(field, prompt, info.vocab_size)
    return prompt


def _rids(request: Request, body: GenerateRequest, count: int) -> list[str]:
    """The id of each prompt: its own, or that of the request; with a number where one stands for
    several."""
    if isinstance(body.rid, list):
        return [_named(request, rid) for rid in body.each("rid", count)]
    one = _named(request, body.rid)
    return [f"{one}_{number}" for number in range(count)] if body.is_batch else [one]


def _named(request: Request, rid: str | None) -> str:
    try:
        return name_of(request, rid)
    except ApiError as error:
        said = str(error).replace("request_id", "rid")
        raise ApiError(error.status, said, param="rid") from None


class _Answer:
    """The answer to one request."""

    def __init__(
        self, front: Frontend, body: GenerateRequest, prompts: list[Prompt], info: EngineInfo
    ) -> None:
        self._front = front
        self._body = body
        self._prompts = prompts
        self._count = prompts[0].job.params.n
        self._is_list = body.is_batch or self._count > 1
        self._info = info
        self._started = time.perf_counter()

    async def whole(self) -> Any:
        """The JSON of the answer: a list for several prompts or texts."""
        jobs = [prompt.job for prompt in self._prompts]
        each = await self._front.generator.all_whole(jobs)
        self._info = await self._front.generator.client.info()
        shown = [
            self._shown(prompt, choice)
            for prompt, choices in zip(self._prompts, each, strict=True)
            for choice in choices
        ]
        return shown if self._is_list else shown[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer as a stream, each with all that its text has so far."""
        jobs = [prompt.job for prompt in self._prompts]
        choices = [[Choice() for _ in range(self._count)] for _ in jobs]
        sent: dict[tuple[int, int], int] = {}
        async with contextlib.aclosing(self._front.generator.stream_all(jobs)) as arriving:
            async for number, piece in ahead_of_others(arriving, jobs):
                output, choice = piece.output, choices[number][piece.output.index]
                if not (output.token_ids or piece.text or output.finish_reason):
                    continue
                choice.text += piece.text
                choice.token_ids += output.token_ids
                choice.log_probs += output.log_probs or ()
                if output.finish_reason is not None:
                    choice.finish_reason = output.finish_reason
                    choice.stop_reason = output.stop_reason
                    choice.weight_spans = output.weight_spans
                    choice.routed_experts = output.routed_experts
                    self._info = await self._front.generator.client.info()
                key, count = (number, output.index), len(choice.token_ids)
                due = sent.get(key, 0) * (EVENTS_OF_ALL + 1) // EVENTS_OF_ALL
                if count < due and output.finish_reason is None:
                    continue
                sent[key] = count
                shown = self._shown(self._prompts[number], choice)
                if self._is_list:
                    shown["index"] = number * self._count + output.index
                yield event(shown)
        yield DONE

    def _shown(self, prompt: Prompt, choice: Choice) -> dict[str, Any]:
        job = prompt.job
        meta = {
            "id": prompt.rid,
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": job.cached,
            "weight_version": _weight_version(choice, self._info.kept),
            "e2e_latency": time.perf_counter() - self._started,
        }
        if self._body.return_weight_versions:
            meta |= shown_weights(choice.weight_spans)
        if prompt.asked.routed_experts and choice.finish_reason is not None:
            meta["routed_experts"] = _routed_experts(choice.routed_experts)
        if prompt.asked.log_probs:
            meta |= self._log_probs(prompt, choice)
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _log_probs(self, prompt: Prompt, choice: Choice) -> dict[str, Any]:
        job, start, top = prompt.job, prompt.asked.prompt_start, prompt.asked.top
        of_prompt, tops_of_prompt = [], []
        if start is not None:
            ids = job.prompt[start:]
            known = list(job.prompt_log_probs or ())[start:]
            # A request that ends before its prompt is computed has those of a part, or none.
            of_prompt = [self._of(None, ids[0]), *self._each(ids[1 : 1 + len(known)], known)]
            tops_of_prompt = [None, *(self._top(likely, top) for _, likely in known)]
        shown: dict[str, Any] = {
            "input_token_logprobs": of_prompt,
            "output_token_logprobs": self._each(choice.token_ids, choice.log_probs),
        }
        if top:
            shown["input_top_logprobs"] = tops_of_prompt
            tops = [self._top(likely, top) for _, likely in choice.log_probs]
            shown["output_top_logprobs"] = tops
        return shown

    def _each(
        self, ids: Sequence[int], known: Sequence[tuple[float, dict[int, float]]]
    ) -> list[Shown]:
        return [self._of(own, token) for token, (own, _) in zip(ids, known, strict=True)]

    def _top(self, likely: dict[int, float], top: int) -> list[Shown]:
        return [self._of(of, token) for token, of in list(likely.items())[:top]]

    def _of(self, log_prob: float | None, token: int) -> Shown:
        wants_text = self._body.return_text_in_logprobs
        shown = None if log_prob is None else max(log_prob, LEAST)
        return [shown, token, self._front.token_names.text(token) if wants_text else None]


def _routed_experts(experts: bytes | None) -> str | None:
    """The experts of all tokens but the last, in SGLang's form: base64 of int32 ``[tokens - 1,
    layers, top_k]``, without a header."""
    if experts is None:
        return None
    import io

    import numpy as np

    ids = np.load(io.BytesIO(experts), allow_pickle=False)
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    """Why a text ended, in SGLang's form; None while it goes on."""
    reason = choice.finish_reason
    if reason is None:
        return None
    if reason == "length" and isinstance(choice.stop_reason, str):
        reason = choice.stop_reason  # OpenAI's API has no word for it
    if reason == "stop":
        matched = choice.stop_reason
        if matched is None and choice.token_ids:
            matched = choice.token_ids[-1]
        return {"type": "stop", "matched": matched}
    if reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    said = "its time was over" if reason == "timeout" else "it was aborted"
    return {"type": "abort", "message": f"the request has ended: {said}"}


def _weight_version(choice: Choice, kept: Kept) -> str:
    """What the weights that sampled its last token are called."""
    version = choice.weight_spans[-1].version if choice.weight_spans else kept.weight_version
    return name_of_weights(version, kept)


def name_of_weights(version: int, kept: Kept) -> str:
    """What the trainer called weights, or their number."""
    return dict(kept.weight_names).get(version, str(version))
