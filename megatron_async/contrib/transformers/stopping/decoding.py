"""The decoding loop whose host does not wait for stop checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async.contrib.transformers.stopping.cache_rollback import (
    Mark,
    find_cache,
    is_cache,
    mark,
    roll_back,
)
from megatron_async.contrib.transformers.stopping.criteria import AsyncStoppingCriteriaList, Check
from megatron_async.contrib.transformers.stopping.model_calls import (
    ModelCalls,
    longest_input,
    pad_token,
)
from megatron_async.contrib.transformers.stopping.recorded import Recorded
from megatron_async.contrib.transformers.stopping.selection import select
from megatron_async.contrib.transformers.stopping.streams import Streams


@dataclass(frozen=True, slots=True)
class Point:
    """The state after a token, kept until its check is settled. ``step``: tokens generated."""

    step: int
    input_ids: Tensor
    model_kwargs: dict[str, Any]
    rng: Any
    cache: Mark


def processors_of(processor: Any) -> Iterable[Any]:
    return processor if isinstance(processor, Iterable) else [processor]


def is_stock(thing: Any) -> bool:
    """Whether a logits processor or a model is of transformers: none of those draws random numbers,
    but for models in training mode."""
    return type(thing).__module__.startswith("transformers.")


def draws(model: Any, processor: Any, config: Any) -> bool:
    """Whether random numbers may be drawn while a token is computed."""
    stock = is_stock(model) and all(is_stock(p) for p in processors_of(processor))
    return config.do_sample or not stock or any(m.training for m in model.modules())


class Decoding:
    """One call of ``generate``: forwards are launched ahead, and what came too late is undone.

    The check of a token orders the device: it is joined before the next token is selected, so a
    row that the device knows to be done gets padding at once. The host learns of it when the
    check's copy has arrived, up to ``ahead - 1`` tokens later.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Callable[[Tensor, Tensor], Tensor],
        criteria: AsyncStoppingCriteriaList,
        config: Any,
        streams: Streams,
        ahead: int,
        streamer: Any,
        keeps_cache: bool,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.input_ids = input_ids
        self.model_kwargs = model_kwargs
        self.steps = 0
        self._config = config
        self._processor = logits_processor
        self._criteria = criteria
        self._streams = streams
        self._ahead = ahead
        self._streamer = streamer
        self._keeps_cache = keeps_cache
        self._calls = ModelCalls(model, config)
        self._recorded = Recorded(config, model.config.is_encoder_decoder)
        self._pads = any(hasattr(c, "eos_token_id") for c in criteria)
        self._draws = draws(model, logits_processor, config)
        self._pad = pad_token(config, input_ids)
        looked_at = criteria.on_device or criteria.host_marked or config.do_sample
        self._checks = bool(looked_at) or streamer is not None
        self._unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
        self._unjoined: Check | None = None
        self._is_last = False
        embeds = model_kwargs.get("inputs_embeds")
        unseen = 0 if embeds is None else embeds.shape[1] - input_ids.shape[1]
        longest = longest_input(model, find_cache(model_kwargs))
        self._longest = None if longest is None else longest - unseen

    def run(self) -> Any:
        """Decode; returns what stock ``generate`` returns."""
        try:
            self._criteria.begin(self.input_ids)
            self.model_kwargs = self._calls.start(self.input_ids, self.model_kwargs)
            outputs = self._calls.forward(self.input_ids, self.model_kwargs)
            with self._calls.decoding():
                self._take(outputs)
                cache = find_cache(self.model_kwargs)
                if self._keeps_cache and cache is not None and not is_cache(cache):
                    self._ahead = 1  # made in the prefill, and nothing can be taken back
                del outputs  # the logits of all prompt tokens
                while not self._has_ended():
                    self._take(self._calls.forward(self.input_ids, self.model_kwargs))
        finally:
            self._criteria.finalize()
        if self._streamer is not None:
            self._streamer.end()
        return self._recorded.result(self.input_ids, self.model_kwargs, self._config)

    def _take(self, outputs: Any) -> None:
        """Select the next token of each row, and start its check."""
        self.model_kwargs = self._calls.advance(outputs, self.model_kwargs)
        logits = outputs.logits[:, -1].to(
            copy=True, dtype=torch.float32, device=self.input_ids.device
        )
        scores = self._processor(self.input_ids, logits)
        self._recorded.add(outputs, logits, scores)
        tokens, probabilities = select(scores, self._config.do_sample)
        self._join()
        if self._pads and self._pad is not None and not self._criteria.is_one_row_with_end_tokens:
            tokens = tokens * self._unfinished + self._pad * (1 - self._unfinished)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        self.steps += 1
        self._is_last = self._criteria.known_at_launch(self.input_ids.shape[1])
        if self._checks:
            self._unjoined = self._criteria.submit(
                self.input_ids, tokens, self._recorded.scores, self._unfinished, probabilities
            )
            self._unjoined.data = self._point()

    def _join(self) -> None:
        if self._unjoined is not None:
            if self._unjoined.on_side_stream:
                self._streams.join(self._unjoined.ticket)
            assert self._unjoined.unfinished is not None
            self._unfinished, self._unjoined = self._unjoined.unfinished, None

    def _point(self) -> Point:
        cache = mark(find_cache(self.model_kwargs)) if self._keeps_cache else []
        rng = self._streams.rng_state() if self._draws else None
        return Point(self.steps, self.input_ids, dict(self.model_kwargs), rng, cache)

    def _has_ended(self) -> bool:
        """Settle what has arrived, and wait only for what must be known before another launch."""
        while self._criteria.oldest_ready():
            if self._settle():
                return True
        length = self.input_ids.shape[1]
        is_longest = self._longest is not None and length > self._longest
        while self._criteria.outstanding >= (1 if self._is_last or is_longest else self._ahead):
            self._criteria.wait_oldest()
            if self._settle():
                return True
        return self._is_last

    def _settle(self) -> bool:
        """Take the oldest check; whether all rows are done."""
        check, verdict, tokens = self._criteria.settle()
        if self._streamer is not None:
            self._streamer.put(tokens)
        if not verdict.unfinished.any():
            self._return_to(check.data)
            return True
        if verdict.host_ended and self._pads:
            self._return_to(check.data)
            self._unjoined = None
            self._unfinished = verdict.unfinished.to(self._unfinished)
        return False

    def _return_to(self, point: Point) -> None:
        """Undo the tokens launched after ``point``."""
        undone = self.steps - point.step
        if undone == 0:
            return
        self._criteria.discard()
        self._recorded.cut(point.step)
        self.input_ids, self.model_kwargs = point.input_ids, dict(point.model_kwargs)
        self.steps, self._is_last = point.step, False
        if self._draws:
            self._streams.set_rng_state(point.rng)
        if self._keeps_cache:
            position = self.model_kwargs.get("cache_position")  # transformers 4.57
            roll_back(find_cache(self.model_kwargs), point.cache, undone, position)
