"""From prompts to the engine, and from its outputs to text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_async.codec import encode
from megatron_async.errors import EngineDeadError, ReplicaDiedError, RequestError
from megatron_async.sampling_params import LIMITING, CheckedParams, SamplingParams
from megatron_async.serving.front_end.choice_text import ChoiceText
from megatron_async.serving.front_end.job import Choice, Job, Piece
from megatron_async.serving.front_end.protocols import Client, Metrics
from megatron_async.serving.front_end.text_work import SHORT, TextWork, limit_of
from megatron_async.serving.http.errors import TOO_LONG, ApiError, renamed
from megatron_async.serving.messages import Control, EngineInfo, Generate, Output

if TYPE_CHECKING:
    from megatron_async.tokenizer.tokenizer import Tokenizer  # which imports torch

MOST_COPIED = 1 << 26
"""Bytes of parameters that the prompts of a request bring to the engine, each its own."""
CUT_SHORT = frozenset({"timeout", "abort"})
"""Ends for which OpenAI's API has no word."""


class Generator:
    """Sends prompts to the engine and makes text of what comes back.

    Args:
        request_timeout: seconds after which a request ends with what it has.
        shows_aborts: a request that was aborted ends with the reason ``"abort"``.
        metrics: get how long things take.

    Attributes:
        texts: makes token ids of texts.
        running: ids of the requests that have not ended.
        draining: no request is taken any more.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        request_timeout: float | None = None,
        shows_aborts: bool = False,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.texts = TextWork(tokenizer)
        self.running: set[int] = set()
        self.draining = False
        self._request_timeout = request_timeout
        self._shows_aborts = shows_aborts
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._commands = itertools.count(1)

    def check_ready(self) -> None:
        """Raises EngineDeadError, which says why, while no request can be served."""
        if self.draining:
            raise EngineDeadError("the server is shutting down")
        self.client.check_ready()

    async def info(self) -> EngineInfo:
        """What the engine says of its model; raises EngineDeadError."""
        self.check_ready()
        return await self.client.info()

    async def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        """A command of the whole engine; raises as the client's."""
        return await self.client.command(Control(next(self._commands), name, arguments))

    async def tokenize(
        self,
        text: str,
        *,
        add_bos: bool = False,
        add_special_tokens: bool = False,
        field: str = "prompt",
    ) -> list[int]:
        """See ``TextWork.tokenize``, for this model; raises EngineDeadError too."""
        most = 0
        if len(text) > SHORT:
            most = (await self.info()).max_sequence_length
        return await self.texts.tokenize(
            text, most, add_bos=add_bos, add_special_tokens=add_special_tokens, field=field
        )

    async def check_room(
        self, params: SamplingParams, *, prompts: int = 1, field: str = "prompt"
    ) -> None:
        """Raises ApiError for more sequences than the server ever takes, for more token ids than
        the model has, and for parameters that would take too much with each of several prompts: to
        try again is no use.

        Args:
            field: what the API calls the prompts.
        """
        size = len(encode(CheckedParams.of(params))) if prompts > 1 else 0
        if size * prompts > MOST_COPIED:
            said = f"{field} has {prompts} prompts with {size:,} bytes of parameters each, and "
            said += f"{MOST_COPIED:,} bytes are the most in all; send fewer prompts"
            raise ApiError(413, said, param=field, code="too_many_values")
        info = await self.info()
        for name, ids in (
            ("allowed_token_ids", params.allowed_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if ids and len(ids) > info.vocab_size:
                said = f"{name} has {len(ids):,} token ids, and the model has {info.vocab_size:,}"
                raise ApiError(400, f"{said}; send those of the model", param=name)
        most, each = info.max_sequences, params.num_sequences
        if most is None or prompts * each <= most:
            return
        room = f"this server takes {most} sequences at once, running and waiting; send fewer"
        if each <= most:
            said = f"{field} has {prompts} prompts of {each} sequences each, and {room}"
            raise ApiError(400, said, param=field)
        param = "n" if params.best_of is None else "best_of"
        raise ApiError(400, f"{param}={each} is too many: {room}", param=param)

    async def job(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        names: dict[str, str],
        priority: int | None = None,
        cap_length: bool = False,
        skip_special_tokens: bool = True,
        text: str | None = None,
        scores_prompt: bool = False,
        markers: Sequence[str] = (),
        name: str = "",
        answer_id: str = "",
    ) -> Job:
        """A prompt that fits the model, ready to run.

        Args:
            name: the client's id of the request; ``answer_id``: of its answer.
            params: checked.
            names: what the API calls the engine's parameters.
            cap_length: the most tokens to generate are a default, which gives way to the model's
                maximum sequence length.
            markers: of tool calls, which stay in the text where they are special tokens.

        Raises:
            ApiError: it does not fit.
            EngineDeadError: no request can be served now.
        """
        limit = (await self.info()).max_sequence_length
        field = names.get("prompt", "prompt")
        if not prompt:
            raise ApiError(400, f"{field} is empty; send at least one token", param=field)
        if len(prompt) >= limit:
            said = f"{limit_of(limit)} {field} has {len(prompt)} tokens; shorten it to at most "
            said += f"{limit - 1} tokens"
            raise ApiError(400, said, param=field, code=TOO_LONG)
        if params.stop_words and not skip_special_tokens:
            said = "skip_special_tokens=false does not go together with stop; leave one of them out"
            raise ApiError(400, said, param="skip_special_tokens")
        most = params.num_tokens_to_generate
        if cap_length and most is not None and len(prompt) + most > limit:
            most = limit - len(prompt)
        if most is not None and len(prompt) + most > limit:
            length = names.get("num_tokens_to_generate", "max_tokens")
            said = f"{limit_of(limit)} you requested {len(prompt) + most} tokens ({len(prompt)} in "
            said += f"{field}, {most} in {length}); lower {length} to at most {limit - len(prompt)}"
            raise ApiError(400, said, param=length, code=TOO_LONG)
        return Job(
            prompt,
            # The engine makes text for stop words alone.
            dataclasses.replace(
                params, num_tokens_to_generate=most, detokenize=bool(params.stop_words)
            ),
            priority or 0,
            next(self._numbers),
            self._request_timeout,
            names,
            skip_special_tokens,
            text,
            scores_prompt,
            self.tokenizer.special_tokens(markers) if markers and skip_special_tokens else {},
            name=name,
            answer_id=answer_id,
        )

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices of a prompt as they come; leaving early aborts the request.

        Raises:
            ApiError, EngineDeadError, QueueFullError
        """
        info = await self.info()
        params = job.params
        stop_ids = frozenset(() if params.ignore_eos else info.eos_token_ids)
        if params.termination_id is not None:
            stop_ids = frozenset({params.termination_id})
        stop_ids |= frozenset(params.stop_token_ids or ())
        texts = [
            ChoiceText(
                self.tokenizer,
                () if job.keeps_stop else stop_ids,
                skip_special_tokens=job.skip_special_tokens,
                prompt=job.prompt,
                markers=job.markers,
            )
            for _ in range(params.n)
        ]
        message = Generate(
            job.request_id, job.prompt, CheckedParams.of(params), job.priority, job.timeout,
            job.is_acknowledged, job.deaths, job.name, job.answer_id,
        )  # fmt: skip
        self.running.add(job.request_id)
        started = time.perf_counter()
        last = [0.0] * params.n
        try:
            async with contextlib.aclosing(self.client.generate(message)) as outputs:
                async for output in outputs:
                    index, now = output.index, time.perf_counter()
                    self._measure(job, output, now - started, now - last[index])
                    last[index] = now
                    if output.prompt_log_probs is not None:
                        job.prompt_log_probs = [each[:2] for each in output.prompt_log_probs]
                        job.prompt_ranks = [rank for _, _, rank in output.prompt_log_probs]
                    if output.finish_reason in CUT_SHORT and not self._is_shown(output):
                        output = _cut_short(output)
                    if output.finish_reason == "error":
                        raise _no_token(job)
                    yield Piece(texts[index].push(output), output)
        except RequestError as error:
            raise renamed(error, job.names) from None
        finally:
            self.running.discard(job.request_id)

    def _is_shown(self, output: Output) -> bool:
        return self._shows_aborts and output.finish_reason == "abort"

    def _measure(self, job: Job, output: Output, total: float, since_last: float) -> None:
        """Count what has come, ``total`` seconds after the request and ``since_last`` seconds after
        the choice's last output."""
        count = len(output.token_ids)
        if count and output.index in job.begun:
            self._metrics.tokens(count, since_last)
        elif count:
            if not job.begun:
                job.first_token = total
                self._metrics.first_token(total)
            job.begun.add(output.index)
        job.generated += count
        if output.finish_reason is not None:
            job.ends[output.index] = output.finish_reason
            if output.usage is not None:
                job.cached = int(output.usage.get("cached_tokens", 0))
                job.queue_seconds = output.usage.get("queue_time")
            self._metrics.finished(output.finish_reason, output.usage, total)

    async def whole(self, job: Job) -> list[Choice]:
        """All choices of a prompt; raises as :meth:`stream`. Nobody has seen what it had when its
        replica died, so that it may begin again."""
        while True:
            try:
                return await self._whole(job)
            except ReplicaDiedError as error:
                if not error.may_try_again:
                    raise
                job.begin_again(error.deaths)

    async def _whole(self, job: Job) -> list[Choice]:
        choices = [Choice() for _ in range(job.params.n)]
        texts: list[list[str]] = [[] for _ in choices]
        async with contextlib.aclosing(self.stream(job)) as pieces:
            async for text, output in pieces:
                choice = choices[output.index]
                texts[output.index].append(text)
                choice.token_ids += output.token_ids
                if output.log_probs is not None:
                    choice.log_probs += output.log_probs
                if output.finish_reason is not None:
                    choice.finish_reason = output.finish_reason
                    choice.stop_reason = output.stop_reason
                    choice.weight_spans = output.weight_spans
                    choice.routed_experts = output.routed_experts
        for choice, parts in zip(choices, texts, strict=True):
            choice.text = "".join(parts)
        return choices

    async def all_whole(self, jobs: Sequence[Job]) -> list[list[Choice]]:
        """The choices of each prompt; an error of one ends all."""
        if len(jobs) == 1:
            return [await self.whole(jobs[0])]
        tasks = [asyncio.ensure_future(self.whole(job)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _cancelled(tasks)

    async def stream_all(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all prompts as they come, each with the number of its prompt."""
        if len(jobs) == 1:
            async with contextlib.aclosing(self.stream(jobs[0])) as pieces:
                async for piece in pieces:
                    yield 0, piece
            return
        arrived: asyncio.Queue[tuple[int, Piece | Exception | None]]
        arrived = asyncio.Queue(maxsize=len(jobs))

        async def forward(number: int) -> None:
            try:
                async with contextlib.aclosing(self.stream(jobs[number])) as pieces:
                    async for piece in pieces:
                        await arrived.put((number, piece))
                await arrived.put((number, None))
            except Exception as error:
                await arrived.put((number, error))

        tasks = [asyncio.ensure_future(forward(number)) for number in range(len(jobs))]
        try:
            left = len(jobs)
            while left:
                number, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield number, item
        finally:
            await _cancelled(tasks)

    async def abort_all(self) -> None:
        """End all requests with the text that they have."""
        for request_id in tuple(self.running):
            await self.client.abort(request_id)


def _no_token(job: Job) -> ApiError:
    """The engine says that there was none to sample, not whose fault that is."""
    limits = [name for name in LIMITING if getattr(job.params, name)]
    if not limits:
        return ApiError(500, "the model gave NaN for this request", code="nan")
    names = [job.names.get(name, name) for name in limits]
    said = f"{', '.join(names)} left nothing that the next token may be, or the model gave NaN"
    return ApiError(400, said, param=names[0], code="nothing_allowed")


def _cut_short(output: Output) -> Output:
    """A last output with OpenAI's nearest reason, and the engine's as ``stop_reason``."""
    return msgspec.structs.replace(output, finish_reason="length", stop_reason=output.finish_reason)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
