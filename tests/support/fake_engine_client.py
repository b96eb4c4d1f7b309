"""An ``EngineClient`` without a process: an engine of its own in this one, with a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.requests.siblings import sibling_seed
from megatron_async.errors import EngineDeadError, EngineGivenUpError, QueueFullError, RequestError
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.messages import Control, EngineInfo, Generate, Output, Snapshot
from megatron_async.version import __version__

NEVER_STEPS = 9999
"""A profile of so many steps is never done."""


FINGERPRINT = "megatron-async-1-0123abcd"


class FakeEngineClient:
    """Serves requests from ``engine``.

    Attributes:
        state: as the client's; tests set it.
        states: of replicas; none, as where there is one engine.
        most: requests that may run or wait; None for any number.
        max_sequences: as :class:`EngineInfo` has it.
        aborted: ids of requests that were left before their end.
        failures: errors of commands, by name.
        cancelled: names of the commands that were left before their end.
        commands: what :meth:`command` was asked.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine = engine
        engine.start()  # a thread that streams start may end before it has applied their aborts
        self.state = "ready"
        self.snapshot: Snapshot | None = None
        self.states: dict[str, bool] = {}
        self.most: int | None = None
        self.max_sequences: int | None = None
        self.aborted: list[int] = []
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[int, list[int]] = {}
        self._engine_ids = 0
        self.failures: dict[str, Exception] = {}
        self.cancelled: list[str] = []
        self._queues: set[asyncio.Queue[Output | Exception]] = set()
        self._loop = asyncio.get_running_loop()

    async def connect(self) -> None:
        """Nothing is to be found."""

    async def aclose(self) -> None:
        """Nothing is left."""

    async def info(self) -> EngineInfo:
        """Of the engine."""
        engine = self.engine
        return EngineInfo(
            model_name=engine.model_name,
            vocab_size=engine.model.network.vocab_size,
            max_sequence_length=engine.max_request_tokens,
            eos_token_ids=list(engine.eos_token_ids or ()),
            dtype="float32",
            depth=engine.depth,
            max_requests=engine.cache.sizes.max_requests,
            block_count=engine.cache.sizes.block_count,
            version=__version__,
            max_sequences=self.max_sequences,
            fingerprint=FINGERPRINT,
        )

    async def generate(self, request: Generate) -> AsyncGenerator[Output, None]:
        """As the client's; all sequences of a request go through one queue."""
        self.check_ready()
        if self.most is not None and len(self.running) >= self.most:
            raise QueueFullError(f"{len(self.running)} sequences run or wait, and {self.most} may")
        # Through the form in which it would reach the engine's process.
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Generate)
        asked = request.params.params()
        if asked.num_sequences > asked.n:
            for output in await self._ranked(request, asked):
                yield output
            return
        seed = 1 if asked.seed is None else asked.seed
        arrived: asyncio.Queue[Output | Exception] = asyncio.Queue()
        tasks = []
        self.running[request.request_id] = []
        self._queues.add(arrived)
        for index in range(asked.n):
            params = dataclasses.replace(
                asked,
                n=1,
                best_of=None,
                seed=sibling_seed(seed, index),
                skip_prompt_log_probs=asked.skip_prompt_log_probs or index > 0,
            )
            tasks.append(asyncio.ensure_future(self._run(request, index, params, arrived)))
        left = len(tasks)
        try:
            while left:
                output = await arrived.get()
                if isinstance(output, Exception):
                    raise output
                left -= output.finish_reason is not None
                yield output
        finally:
            del self.running[request.request_id]
            self._queues.discard(arrived)
            if left:
                self.aborted.append(request.request_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_id: int) -> None:
        """As the client's."""
        for engine_id in self.running.get(request_id, ()):
            self.engine.abort_request(engine_id)

    async def command(self, control: Control) -> dict[str, Any]:
        """Noted; ``profile`` writes a file, ``weights`` of "missing" is an error, and
        what is in ``failures`` fails with its error."""
        self.check_ready()
        self.commands.append((control.name, control.arguments))
        if control.name == "profile" and control.arguments["steps"] == NEVER_STEPS:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.cancelled.append(control.name)
        if (failure := self.failures.get(control.name)) is not None:
            raise failure
        if control.name == "profile":
            Path(control.arguments["path"]).write_text('{"traceEvents": []}')
        if control.arguments.get("path") == "missing":
            raise RequestError("path='missing': no such directory")
        return {"done": control.name}

    def kill(self) -> None:
        """Die, from any thread: all requests end with an error."""
        self.state = "dead"
        for queue in list(self._queues):
            self._loop.call_soon_threadsafe(
                queue.put_nowait, EngineDeadError("the engine has died; try again later")
            )

    def check_ready(self) -> None:
        """As the client's."""
        if self.state == "given up":
            raise EngineGivenUpError("the engine is not started again")
        if self.state != "ready":
            raise EngineDeadError("the engine is being restarted; try again later")

    async def _ranked(self, request: Generate, params: SamplingParams) -> list[Output]:
        """The best sequences, which are known only at the end."""
        engine_id, self._engine_ids = self._engine_ids, self._engine_ids + 1
        best = await self.engine.add_request(engine_id, list(request.prompt), params)
        return [
            Output(
                request.request_id,
                index,
                list(record.generated_tokens),
                finish_reason=None if record.finish_reason is None else record.finish_reason.value,
                usage=_usage(record),
            )
            for index, record in enumerate(best.choices)
        ]

    async def _run(
        self,
        request: Generate,
        index: int,
        params: SamplingParams,
        arrived: asyncio.Queue[Output | Exception],
    ) -> None:
        try:
            engine_id, self._engine_ids = self._engine_ids, self._engine_ids + 1
            stream = self.engine.stream(list(request.prompt), params, request_id=engine_id)
            async with contextlib.aclosing(stream) as outputs:
                await self._forward(request, index, params, engine_id, outputs, arrived)
        except Exception as error:
            arrived.put_nowait(error)

    async def _forward(
        self,
        request: Generate,
        index: int,
        params: SamplingParams,
        engine_id: int,
        outputs: Any,
        arrived: asyncio.Queue[Output | Exception],
    ) -> None:
        record: DynamicInferenceRequest | None = None
        timed_out = False

        def expire() -> None:
            nonlocal timed_out
            timed_out = True
            self.engine.abort_request(engine_id)

        timer = None
        if request.timeout is not None:
            timer = asyncio.get_running_loop().call_later(request.timeout, expire)
        self.running[request.request_id].append(engine_id)
        # No step may end it meanwhile: a record is known only until then.
        with self.engine.lock.gate, self.engine.lock.mutex:
            begun = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            with contextlib.suppress(RequestError):
                record = self.engine.get_request(engine_id)
                if request.acknowledge:
                    arrived.put_nowait(Output(request.request_id, index, []))
        is_first = True
        while True:
            output = await begun if is_first else await anext(outputs)
            reason = output.finish_reason and output.finish_reason.value
            of_prompt = None
            if is_first and record is not None and record.prompt_log_probs is not None:
                own = record.prompt_log_probs
                tops = record.prompt_top_n_logprobs or [{}] * len(own)
                ranks = record.prompt_token_ranks or ()
                of_prompt = list(zip(own, tops, ranks, strict=True))
            is_first = False
            arrived.put_nowait(
                Output(
                    request.request_id,
                    index,
                    [] if output.token_id is None else [output.token_id],
                    output.text if params.stop_words else None,
                    None if output.log_probs is None else [tuple(output.log_probs)],
                    of_prompt,
                    "timeout" if timed_out and reason == "abort" else reason,
                    None if record is None else record.stop_reason,
                    None if reason is None or record is None else _usage(record),
                )
            )
            if reason is not None:
                if timer is not None:
                    timer.cancel()
                return


def _usage(record: DynamicInferenceRequest) -> dict[str, float]:
    return {
        "prompt_tokens": len(record.prompt_tokens),
        "cached_tokens": record.counters.cached,
        "generated_tokens": len(record.generated_tokens),
        "queue_time": 0.0,
    }
