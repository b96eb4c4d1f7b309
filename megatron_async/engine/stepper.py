"""Stepping the engine for those who wait: one step, whole generations, streams."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from typing import Any

from megatron_async.engine.desk import Prompt, RequestDesk
from megatron_async.engine.output_processor import TokenOutput
from megatron_async.errors import RequestError
from megatron_async.request import DynamicInferenceRequest, RequestFuture
from megatron_async.sampling_params import SamplingParams

STANDSTILL_SECONDS = 1e-3
"""How long to sleep before looking again when all requests are paused."""


class Stepper(RequestDesk):
    """Takes the turns in which steps are run; whoever waits for tokens takes one."""

    suspended = False
    """Nothing is launched until :meth:`resume`."""

    def step_modern(self) -> dict[str, Any]:
        """Run one step.

        Returns:
            ``active_request_ids``; ``finished_request_records``, the requests that ended;
            ``tokens``, a list of :class:`TokenOutput` in order of commit; ``step_time`` in
            seconds; ``cuda_graph_request_count``, the row bucket replayed, or None.

        Raises:
            EngineStoppedError: the engine is closed, or was stopped by an error in an earlier
                step, which was raised there. The futures of all requests get it too.
        """
        with self._told, self._turn.lock, self._turn:
            started = time.perf_counter_ns()
            if self.suspended:
                self._obey()
                self._settle()
            else:
                self._log_step()
                self._step()
            self._turns += 1
            outputs, self._outputs = self._outputs, []
            finished, self._finished = self._finished, []
            elapsed = time.perf_counter_ns() - started
            self.counters.step_ns += elapsed
            self.counters.wait_ns = self.controller.wait_ns
            if (outputs or finished) and not self.has_unfinished_requests():
                self.scheduler.check_idle()
            active = self._book.active_request_ids
        return {
            "active_request_ids": active,
            "finished_request_records": finished,
            "tokens": outputs,
            "step_time": elapsed * 1e-9,
            "cuda_graph_request_count": self.controller.last_graph_rows,
        }

    async def async_step(self) -> dict[str, Any]:
        """:meth:`step_modern` that lets other coroutines run afterwards."""
        result = self.step_modern()
        await asyncio.sleep(0)
        return result

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Decode all prompts and return their requests in the same order. What other requests
        generate meanwhile is in their records and futures.

        Args:
            prompts: several; a single text is taken as one prompt.
            sampling_params: for all prompts, or one for each.

        Raises:
            RequestError: the prompts are no list, or one of them cannot be served; then none is
                started.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, (Mapping, Set)) or not isinstance(prompts, Iterable):
            raise RequestError(
                f"prompts is a {type(prompts).__name__}; give a list of prompts, each a text or a "
                "list of token ids"
            )
        prompts = list(prompts)
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params] * len(prompts)  # type: ignore[list-item]
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(sampling_params)} sampling_params; give one "
                "for all, or one for each"
            )
        added: list[tuple[int, RequestFuture]] = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                added.append(self._add(None, prompt, params, 0, None))
            while not all(future.done() for _, future in added):
                self.step_modern()
                self._nap()
        except BaseException:
            for key, _ in added:
                self._ask_to_abort(key)
            raise
        while self._in_flight and not self.scheduler.has_unfinished:
            self.step_modern()
        return [future.result() for _, future in added]

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
    ) -> AsyncIterator[TokenOutput]:
        """Decode one prompt and yield its tokens as they are committed.

        Several streams may run at once: whichever is waited for steps the engine for all, and all
        get their tokens before the next step. Leaving the iteration early aborts the request. What
        other requests generate meanwhile is in their streams, records and futures.

        Raises:
            RequestError: the request cannot be served.
        """
        arrived: deque[TokenOutput] = deque()
        key, _ = self._add(request_id, prompt, sampling_params, 0, arrived)
        seen = -1
        try:
            while True:
                while arrived:
                    output = arrived.popleft()
                    yield output
                    if output.finish_reason is not None:
                        return
                if seen == self._turns:  # else somebody has stepped: let all look first
                    self.step_modern()
                seen = self._turns
                await asyncio.sleep(STANDSTILL_SECONDS if self._stands_still else 0)
        finally:
            # When the request has ended, its id may be another one's by now.
            with self._door:
                for number in [n for n, each in self._listeners.items() if each is arrived]:
                    del self._listeners[number]
                if key in self._book.active_keys:
                    self._ask_to_abort(key)

    @property
    def _stands_still(self) -> bool:
        """Nothing can go on until somebody resumes a request or the engine."""
        return not self._in_flight and not self._inbox and (self.suspended or self._no_plan)

    def _nap(self) -> None:
        if self._stands_still:
            time.sleep(STANDSTILL_SECONDS)
