"""``generate_captured``: the whole decode step in one graph, launched ahead of its results."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from megatron_async.contrib.transformers.captured.graphs import CudaGraphs, Graphs
from megatron_async.contrib.transformers.captured.step import CapturedStep
from megatron_async.contrib.transformers.stopping.cache_rollback import find_cache
from megatron_async.contrib.transformers.stopping.criteria import AsyncStoppingCriteriaList
from megatron_async.contrib.transformers.stopping.eligibility import obstacle_to_capture
from megatron_async.contrib.transformers.stopping.generate import (
    SAMPLING,
    AsyncGenerate,
    generate_arguments,
)
from megatron_async.contrib.transformers.stopping.model_calls import (
    ModelCalls,
    forget_unused_cache,
    longest_input,
    pad_token,
)
from megatron_async.contrib.transformers.stopping.notices import say_once
from megatron_async.contrib.transformers.stopping.selection import INVALID
from megatron_async.contrib.transformers.stopping.streams import Streams, Ticket, streams_of

KEPT_STEPS = 4
"""Captured steps kept for a model; each has a cache of its own."""


@dataclass(slots=True)
class Launched:
    """A step whose results (int64 ``(3, batch)``, see :class:`CapturedStep`) are on their way to
    the host; ``rng`` is the random generator's state after it, where it draws."""

    number: int
    results: Tensor
    rng: Any
    ticket: Ticket


class CapturedGenerate:
    """Greedy decoding and sampling with a static cache, one graph launch per token, as a
    ``custom_generate``. What it cannot do goes to :class:`AsyncGenerate`, with the reason.

    Args:
        depth: steps that may be launched before the result of the first of them is known.
        streams, graphs: of a device.

    Raises:
        ValueError: ``depth`` is less than 1.
    """

    def __init__(
        self,
        depth: int = 4,
        streams: Callable[[torch.device], Streams | None] = streams_of,
        graphs: Callable[[torch.device], Graphs] = CudaGraphs,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1 (1 waits for each step)")
        self.depth = depth
        self._streams = streams
        self._graphs = graphs
        self._otherwise = AsyncGenerate(streams=streams)
        self._steps: WeakKeyDictionary[Any, OrderedDict[Any, CapturedStep]] = WeakKeyDictionary()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``generate`` in place of ``_sample``; returns the same."""
        call = {"streamer": streamer, "synced_gpus": synced_gpus, **generate_arguments()}
        criteria = AsyncStoppingCriteriaList(stopping_criteria, self._streams(input_ids.device))
        config = generation_config
        reason = obstacle_to_capture(model, criteria, logits_processor, config, call, model_kwargs)
        if config.get_generation_mode(call.get("assistant_model")) not in SAMPLING:
            reason = "the mode is neither greedy decoding nor sampling"
        if reason is not None or criteria.streams is None:
            say_once(f"decoding is not captured: {reason}")
            return self._otherwise.decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                config,
                call,
                model_kwargs,
            )
        step = self._step(model, input_ids, logits_processor, criteria, config, model_kwargs)
        loop = CapturedLoop(
            step, criteria, criteria.streams, self._graphs(input_ids.device), self.depth, call
        )
        try:
            return loop.run(model, input_ids, config, model_kwargs)
        except BaseException:
            self.release(model)  # an interrupted step may be half captured
            raise

    def release(self, model: Any) -> None:
        """Free what is kept for ``model``: graphs and caches."""
        self._steps.pop(model, None)

    def _step(
        self,
        model: Any,
        input_ids: Tensor,
        processors: Any,
        criteria: AsyncStoppingCriteriaList,
        config: Any,
        model_kwargs: dict[str, Any],
    ) -> CapturedStep:
        """A captured step for the shape and parameters of this call; a kept one if there is."""
        length = find_cache(model_kwargs).layers[0].max_cache_len
        ends = end_tokens(criteria, input_ids)
        compiled = ModelCalls(model, config).compilation(model_kwargs)
        key = (
            input_ids.shape[0],
            length,
            len(ends),
            bool(config.do_sample),
            model.dtype,
            model.config.to_json_string(),
            repr(compiled),
            tuple(p.data_ptr() for p in model.parameters()),  # a graph has their addresses
            tuple((type(p).__name__, repr(sorted(vars(p).items()))) for p in processors),
        )
        kept = self._steps.setdefault(model, OrderedDict())
        if key not in kept:
            kept[key] = CapturedStep(
                model,
                input_ids.shape[0],
                length,
                len(ends),
                sample=bool(config.do_sample),
                processors=processors,
                device=input_ids.device,
                compiled=compiled,
            )
        kept.move_to_end(key)
        while len(kept) > KEPT_STEPS:
            kept.popitem(last=False)
        return kept[key]


def end_tokens(criteria: AsyncStoppingCriteriaList, input_ids: Tensor) -> Tensor:
    """All end tokens, int64, on the device of ``input_ids``."""
    ends = [c.eos_token_id.reshape(-1) for c in criteria.on_device]
    return torch.cat(ends).to(input_ids) if ends else input_ids.new_zeros(0)


class CapturedLoop:
    """One call: prefill, then steps launched up to ``depth`` ahead of the oldest unknown result."""

    def __init__(
        self,
        step: CapturedStep,
        criteria: AsyncStoppingCriteriaList,
        streams: Streams,
        graphs: Graphs,
        depth: int,
        call: dict[str, Any],
    ) -> None:
        self._step = step
        self._criteria = criteria
        self._streams = streams
        self._graphs = graphs
        self._depth = depth
        self._longest: int | None = None
        self._streamer = call.get("streamer")
        self._launched = self._ended = 0
        self._outstanding: deque[Launched] = deque()
        self._free: list[Tensor] = []

    def run(
        self, model: Any, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Decode; returns ids, int64 ``(batch, prompt + generated)``."""
        step, prompt = self._step, input_ids.shape[1]
        step.cache.reset()
        longest = longest_input(model, step.cache)
        self._longest = None if longest is None else longest - prompt
        forget_unused_cache(model, find_cache(model_kwargs))
        model_kwargs["past_key_values"] = step.cache
        pad = pad_token(config, input_ids)
        step.begin(
            input_ids,
            model_kwargs.get("attention_mask"),
            model_kwargs.get("position_ids"),
            end_tokens(self._criteria, input_ids),
            input_ids.new_zeros(()) if pad is None else pad,
        )
        try:
            calls = ModelCalls(model, config)
            model_kwargs = calls.start(input_ids, model_kwargs)
            step.first(calls.forward(input_ids, model_kwargs).logits[:, -1])
            last = self._submit(prompt)
            with calls.decoding():
                while not self._has_ended(last):
                    step.run(self._graphs)
                    last = self._submit(prompt)
        finally:
            self._streams.close()
        if self._streamer is not None:
            self._streamer.end()
        return torch.cat([input_ids, step.results[: self._ended, 0].t()], dim=-1)

    def _submit(self, prompt: int) -> bool:
        """Have the results of the step just launched copied; whether it is the last one."""
        source = self._step.results[self._launched]
        self._launched += 1
        host = self._free.pop() if self._free else None
        if host is None:
            host = self._streams.host_buffer(tuple(source.shape), torch.long)
        rng = self._streams.rng_state() if self._step.draws else None
        ticket = self._streams.fetch(host, source)
        self._outstanding.append(Launched(self._launched, host, rng, ticket))
        return self._criteria.known_at_launch(prompt + self._launched)

    def _has_ended(self, is_last: bool) -> bool:
        """Look at what has arrived; wait only if another step may not be launched before."""
        is_longest = self._longest is not None and self._launched > self._longest
        depth = 1 if is_last or is_longest else self._depth
        while self._outstanding:
            ticket = self._outstanding[0].ticket
            if not ticket.ready():
                if len(self._outstanding) < depth:
                    return False
                ticket.wait()
            if self._settle():
                return True
        return is_last

    def _settle(self) -> bool:
        """Take the oldest result; whether all rows are done."""
        launched = self._outstanding.popleft()
        tokens, still, invalid = launched.results.clone()
        self._free.append(launched.results)
        if invalid.any():
            raise RuntimeError(INVALID)
        if self._streamer is not None:
            self._streamer.put(tokens)
        self._ended = launched.number
        if still.any():
            return False
        if launched.number < self._launched and self._step.draws:
            self._streams.set_rng_state(launched.rng)
        return True


generate_captured = CapturedGenerate()
"""``model.generate(..., cache_implementation="static", custom_generate=generate_captured)``."""
