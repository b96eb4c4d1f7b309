"""Megatron's own API, ``PUT /api``, as its text-generation server has it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from megatron_async.errors import RequestError
from megatron_async.request import parameter_checks as checks
from megatron_async.request.parameter_ranges import INTEGERS, NUMBERS
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.bodies.body import Body, Integer, Several
from megatron_async.serving.bodies.python_fields import (
    MEGATRON,
    OF_MEGATRON,
    refuse_python_fields,
)
from megatron_async.serving.bodies.sampling_fields import dividing
from megatron_async.serving.front_end.job import Choice, Job
from megatron_async.serving.http.errors import ApiError, json_response, renamed
from megatron_async.serving.http.frontend import Frontend, log_jobs, name_of
from megatron_async.serving.http.sse import until_disconnect

TOP_N, TOP_P = INTEGERS["top_n_logprobs"], NUMBERS["top_p"]
MAX_PROMPTS = 128
MAX_TOP_K = 1000
DEFAULT_TOKENS = 64

_NAMES = {
    "num_tokens_to_generate": "tokens_to_generate",
    "prompt": "prompts",
    "seed": "random_seed",
}
_UNSUPPORTED = {
    "top_p_decay": 0.0,
    "top_p_bound": 0.0,
    "prevent_newline_after_colon": False,
    "beam_width": None,
}
"""Fields that only their defaults are taken for."""


class MegatronRequest(Body):
    """``PUT /api``. ``length_penalty`` and ``stop_token`` are of beam search alone, and ``no_log``
    is what this server does."""

    prompts: Several[str] = Field(min_length=1, max_length=MAX_PROMPTS)
    tokens_to_generate: Integer = Field(default=DEFAULT_TOKENS, ge=0)
    logprobs: bool = False
    top_n_logprobs: Integer = Field(default=0, ge=TOP_N.low, le=TOP_N.high)
    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    top_k: Integer = Field(default=0, ge=0, le=MAX_TOP_K)
    top_p: float = Field(default=0.0, ge=TOP_P.low, le=TOP_P.high)
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False
    stop_on_eol: bool = False
    stop_on_double_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: Annotated[Integer, Field(ge=0)] | None = None
    beam_width: Integer | None = None
    max_len: Any = None
    sentences: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_python(cls, body: Any) -> Any:
        refuse_python_fields(body, cls.model_fields, MEGATRON, defaults=OF_MEGATRON)
        return body

    def check_together(self) -> None:
        """Raises ApiError when values contradict each other, or are not supported."""
        for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
            if getattr(self, old) is not None:
                raise ApiError(400, f"{old} is no longer used; replace it with {new}", param=old)
        for name, default in _UNSUPPORTED.items():
            if getattr(self, name) != default:
                raise ApiError(400, f"{name} is not supported; leave it out", param=name)
        if self.top_k and self.top_p:
            raise ApiError(400, "top_k and top_p are both set; leave one out", param="top_p")
        if not self.tokens_to_generate and not self.logprobs:
            said = "tokens_to_generate=0 needs logprobs=true"
            raise ApiError(400, said, param="tokens_to_generate")
        if not self.add_BOS and not all(self.prompts):
            raise ApiError(400, "empty prompts need add_BOS=true", param="prompts")

    def params(self) -> list[SamplingParams]:
        """Return the parameters of each prompt, checked; raises ApiError. Each prompt has a seed of
        its own."""
        stop = ["\n"] * self.stop_on_eol + ["\n\n"] * self.stop_on_double_eol
        seed = self.random_seed
        try:
            first = SamplingParams(
                temperature=dividing(self.temperature),
                top_k=self.top_k,
                top_p=self.top_p,
                return_log_probs=self.logprobs,
                top_n_logprobs=self.top_n_logprobs if self.logprobs else 0,
                num_tokens_to_generate=max(1, self.tokens_to_generate),
                stop_words=stop or None,
                include_stop_str_in_output=True,
                seed=seed,
            ).checked()
            places = range(len(self.prompts))
            if seed is None:
                return [first for _ in places]
            seeds = (checks.seed("seed", seed + place) for place in places)
            return [dataclasses.replace(first, seed=own) for own in seeds]
        except RequestError as error:
            raise renamed(error, _NAMES) from None


async def megatron_generate(front: Frontend, request: Request, body: MegatronRequest) -> Response:
    """The prompts with the texts that continue them."""
    body.check_together()
    each_params = [front.salted(request, params) for params in body.params()]
    await front.generator.check_room(each_params[0], prompts=len(each_params), field="prompts")
    jobs = []
    name = name_of(request, None)
    for prompt, params in zip(body.prompts, each_params, strict=True):
        ids = await front.generator.tokenize(prompt, add_bos=body.add_BOS, field="prompts")
        alone = not body.tokens_to_generate
        jobs.append(
            await front.generator.job(
                ids, params, names=_NAMES, text=prompt, scores_prompt=alone, name=name
            )
        )
    log_jobs(request, jobs, front.config.model_names[0])
    each = await until_disconnect(request.receive, front.generator.all_whole(jobs))
    return json_response(_shown(front, body, jobs, [choices[0] for choices in each]))


def _shown(
    front: Frontend, body: MegatronRequest, jobs: list[Job], choices: list[Choice]
) -> dict[str, Any]:
    if not body.tokens_to_generate:
        choices = [Choice() for _ in choices]
    pairs = list(zip(jobs, choices, strict=True))
    tokens = [job.prompt + choice.token_ids for job, choice in pairs]
    name = front.token_names.text
    shown: dict[str, Any] = {
        "text": [(job.text or "") + choice.text for job, choice in pairs],
        "tokens": tokens,
        "segments": [[name(token) for token in each] for each in tokens],
    }
    if body.logprobs:
        known = [[*(job.prompt_log_probs or ()), *choice.log_probs] for job, choice in pairs]
        shown["logprobs"] = [[own for own, _ in each] for each in known]
        if body.top_n_logprobs:
            shown["top_n_logprobs"] = [
                [{name(token): of for token, of in top.items()} for _, top in each]
                for each in known
            ]
    return shown
