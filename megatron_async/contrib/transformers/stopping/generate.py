"""``custom_generate=async_generate``, and ``async_stopping`` for plain ``generate``."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerationMode

from megatron_async.contrib.transformers.stopping.criteria import AsyncStoppingCriteriaList
from megatron_async.contrib.transformers.stopping.decoding import Decoding
from megatron_async.contrib.transformers.stopping.eligibility import must_keep_cache, obstacle
from megatron_async.contrib.transformers.stopping.model_calls import stock_beam_search, stock_sample
from megatron_async.contrib.transformers.stopping.notices import say_once
from megatron_async.contrib.transformers.stopping.streams import Streams, streams_of

SAMPLING = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class AsyncGenerate:
    """Greedy decoding and sampling with asynchronous stopping, as a ``custom_generate``.

    Args:
        ahead: checks that may be outstanding; the host waits for the oldest when there are that
            many. 1 is synchronous.
        streams: the streams of a device, or None where stopping must be synchronous.

    Raises:
        ValueError: ``ahead`` is less than 1.
    """

    def __init__(
        self, ahead: int = 2, streams: Callable[[torch.device], Streams | None] = streams_of
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}; it must be at least 1 (1 waits for each check)")
        self.ahead = ahead
        self._streams = streams

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
        return self.decode(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            call,
            model_kwargs,
        )

    def decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        call: dict[str, Any],
        model_kwargs: dict[str, Any],
    ) -> Any:
        """The same with what ``generate`` keeps to itself in ``call``: ``streamer``,
        ``synced_gpus``, ``assistant_model``."""
        streamer, synced_gpus = call.get("streamer"), bool(call.get("synced_gpus"))
        mode = generation_config.get_generation_mode(call.get("assistant_model"))
        criteria = AsyncStoppingCriteriaList(stopping_criteria, self._streams(input_ids.device))
        stock = {
            "logits_processor": logits_processor,
            "stopping_criteria": criteria,
            "generation_config": generation_config,
            "synced_gpus": synced_gpus,
        }
        if mode in BEAMS:
            say_once("asynchronous stopping is not used: beam search goes to stock generate")
            return stock_beam_search(model, input_ids, **stock, **model_kwargs)
        if mode not in SAMPLING:
            raise ValueError(
                f"custom_generate=async_generate cannot do {mode.value}: leave custom_generate "
                "out, or use async_stopping(model), which leaves other modes to transformers"
            )
        keeps_cache = must_keep_cache(model, criteria, generation_config, model_kwargs)
        reason = obstacle(
            criteria,
            logits_processor,
            generation_config,
            model_kwargs,
            keeps_cache=keeps_cache,
            synced_gpus=synced_gpus,
            device=input_ids.device,
        )
        if reason is not None or criteria.streams is None:
            say_once(f"asynchronous stopping is not used: {reason}")
            return stock_sample(model, input_ids, **stock, streamer=streamer, **model_kwargs)
        return Decoding(
            model,
            input_ids,
            logits_processor=logits_processor,
            criteria=criteria,
            config=generation_config,
            streams=criteria.streams,
            ahead=self.ahead,
            streamer=streamer,
            keeps_cache=keeps_cache,
            model_kwargs=model_kwargs,
        ).run()


def generate_arguments() -> dict[str, Any]:
    """What ``generate`` was called with and keeps from a ``custom_generate``.

    transformers 4.57 to 5.23 hands a callable neither the streamer nor ``synced_gpus`` nor the
    assistant, so they are read in the frame of ``generate``, which is the caller's caller.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "generate":
        return {}
    names = ("streamer", "synced_gpus", "assistant_model")
    return {name: frame.f_locals[name] for name in names if name in frame.f_locals}


async_generate = AsyncGenerate()
"""``model.generate(..., custom_generate=async_generate)``."""


class Patches:
    """Classes of models whose ``_sample`` looks first whether a model asks for another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[type, int] = {}
        self._chosen: WeakKeyDictionary[Any, list[AsyncGenerate]] = WeakKeyDictionary()

    def add(self, model: Any, chosen: AsyncGenerate) -> None:
        with self._lock:
            kind = type(model)
            if self._users.setdefault(kind, 0) == 0:
                self._install(kind)
            self._users[kind] += 1
            self._chosen.setdefault(model, []).append(chosen)

    def remove(self, model: Any, chosen: AsyncGenerate) -> None:
        with self._lock:
            kind = type(model)
            stack = self._chosen[model]
            stack.remove(chosen)
            if not stack:
                del self._chosen[model]
            self._users[kind] -= 1
            if self._users[kind] == 0:
                del self._users[kind]
                uninstall(kind)

    def _install(self, kind: Any) -> None:
        original = kind.__dict__.get("_sample")
        stock = getattr(kind, "_sample")  # noqa: B009 - inherited as a rule

        @functools.wraps(stock)
        def sample(model: Any, *args: Any, **kwargs: Any) -> Any:
            stack = self._chosen.get(model)
            return (stack[-1] if stack else stock)(model, *args, **kwargs)

        sample.stock = stock  # type: ignore[attr-defined]
        sample.original = original  # type: ignore[attr-defined]
        setattr(kind, "_sample", sample)  # noqa: B010


def uninstall(kind: Any) -> None:
    original = kind.__dict__["_sample"].original
    if original is None:
        delattr(kind, "_sample")
    else:
        setattr(kind, "_sample", original)  # noqa: B010


PATCHES = Patches()


@contextmanager
def async_stopping(
    model: Any,
    ahead: int = 2,
    streams: Callable[[torch.device], Streams | None] = streams_of,
) -> Iterator[Any]:
    """Within it, plain ``model.generate(...)`` stops asynchronously, where it can.

    Other models of the same class are not affected, and modes other than greedy decoding and
    sampling stay stock. Arguments as of :class:`AsyncGenerate`.
    """
    chosen = AsyncGenerate(ahead, streams)
    PATCHES.add(model, chosen)
    try:
        yield model
    finally:
        PATCHES.remove(model, chosen)
