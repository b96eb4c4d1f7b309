"""Forward, selection of the next token and the end check as one step over fixed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from megatron_async.contrib.transformers.captured.graphs import Graphs, Step
from megatron_async.contrib.transformers.captured.row_forward import (
    RowCache,
    RowForward,
    why_not,
)
from megatron_async.contrib.transformers.stopping.model_calls import (
    attention_kind,
    takes_cache_position,
)
from megatron_async.contrib.transformers.stopping.notices import say_once
from megatron_async.contrib.transformers.stopping.selection import is_invalid, select


class CapturedStep:
    """One captured decode step, for one shape of batch. It owns the cache that it was captured
    over, so it can serve further calls with the same shape.

    Args:
        batch: rows. ``length``: tokens of the cache. ``ends``: how many end tokens there are.
        processors: logits processors that look at the scores alone.
        compiled: arguments of ``torch.compile`` for the forward; None leaves it as it is.

    Attributes:
        results: of each step, int64 ``(length + 1, 3, batch)``: the tokens, which rows are
            unfinished after them, and whether the probabilities were not finite. A step writes the
            entry at ``cursor``, which no later step writes.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        length: int,
        ends: int,
        *,
        sample: bool,
        processors: Any,
        device: torch.device,
        compiled: dict[str, Any] | None = None,
    ) -> None:
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.results = torch.zeros((length + 1, 3, batch), dtype=torch.long, device=device)
        self._valid = torch.zeros(batch, dtype=torch.long, device=device)
        self._model = model
        self._compiled = compiled
        self._sample = sample
        self._forward: Any = model
        self._finish: Any = self._take
        self._used_cache: Any = self.cache
        self._in_parts = False
        self._processors = processors
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._token = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._position_ids = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self._unfinished = torch.ones(batch, dtype=torch.long, device=device)
        self._allowed = torch.zeros((batch, 1, 1, length), dtype=torch.bool, device=device)
        self._ends = torch.zeros(ends, dtype=torch.long, device=device)
        self._pad = torch.zeros((), dtype=torch.long, device=device)
        self._takes_bools = attention_kind(model) == "sdpa"
        self._told = (
            {"cache_position": self._position} if takes_cache_position(model) else {}
        )  # transformers 4.57
        self._replay: Step | None = None

    @property
    def draws(self) -> bool:
        """Whether steps draw random numbers."""
        return self._sample

    def begin(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        ends: Tensor,
        pad: Tensor,
    ) -> None:
        """Take a call's prompts ``(batch, prompt)``, their mask and positions likewise, and its end
        tokens. Without positions the mask has them (transformers 4.57)."""
        prompt = input_ids.shape[1]
        self._cursor.zero_()
        self._unfinished.fill_(1)
        self._ends.copy_(ends)
        self._pad.copy_(pad)
        self._position.fill_(prompt)
        self._allowed.zero_()
        if mask is None:
            self._allowed[..., :prompt] = True
            self._position_ids.fill_(prompt)
        else:
            self._allowed[:, 0, 0, :prompt] = mask.bool()
            self._position_ids.copy_(mask.long().sum(dim=-1, keepdim=True))
        if positions is not None:
            self._position_ids.copy_(positions[:, -1:] + 1)

    def first(self, logits: Tensor) -> None:
        """Select the first token from the prefill's logits ``(batch, vocabulary)``."""
        self._take(logits)

    def run(self, graphs: Graphs) -> None:
        """The next token: the first time eagerly and then captured, later replayed."""
        if self._replay is not None:
            self._replay()
            return
        if self._compiled is None:
            self._run_and_capture(graphs, self._step)
            return
        reason = why_not(self._model, self.cache, len(self._token))
        if reason is None:
            reason = self._run_with_rows(graphs)
        if reason is not None:
            say_once(f"a captured step has no kernels of one token: {reason}")
            self._compile(self._compiled)
            self._run_and_capture(graphs, self._step)

    def _run_with_rows(self, graphs: Graphs) -> str | None:
        """The same with the kernels of one token, or why they are not used."""
        assert self._compiled is not None
        rows = RowCache(self.cache, self._position, self._allowed)
        forward = RowForward(self._model, rows)

        def step() -> None:
            with forward.swapped():
                self._step()

        self._used_cache, self._in_parts = rows, True
        try:
            with forward.swapped(), torch.cuda.device_of(self._token):
                rows.probe(self._logits)
            self._compile(without_padding(self._compiled), call_of_its_own(self._model))
            graphs.run(step)
        except Exception as error:  # of the probe, the model, the compiler or Triton
            self._used_cache, self._in_parts = self.cache, False
            self._forward, self._finish = self._model, self._take
            return (str(error).splitlines() or [type(error).__name__])[0]
        self._replay = graphs.capture(step)  # the token is there: nothing may run it again
        return None

    def _compile(self, arguments: dict[str, Any], call: Any = None) -> None:
        self._forward = torch.compile(call or self._model.__call__, **arguments)
        if not self._sample:  # compiled code draws other random numbers
            self._finish = torch.compile(self._take, **arguments)

    def _run_and_capture(self, graphs: Graphs, step: Step) -> None:
        graphs.run(step)
        self._replay = graphs.capture(step)

    def _logits(self) -> Tensor:
        self._allowed.index_fill_(3, self._position, True)
        logits: Tensor = self._forward(
            input_ids=self._token,
            attention_mask=self._mask(),
            position_ids=self._position_ids,
            past_key_values=self._used_cache,
            use_cache=True,
            return_dict=True,
            **self._told,
        ).logits
        return logits[:, -1]

    def _step(self) -> None:
        self._finish(self._logits())
        self._position.add_(1)
        self._position_ids.add_(1)

    def _mask(self) -> Tensor:
        if self._takes_bools:
            return self._allowed
        least = torch.finfo(self._model.dtype).min
        zeros = torch.zeros_like(self._allowed, dtype=self._model.dtype)
        return zeros.masked_fill(~self._allowed, least)

    def _take(self, logits: Tensor) -> None:
        scores = self._processors(self._token, logits.to(copy=True, dtype=torch.float32))
        tokens, probabilities = select(scores, self._sample, in_parts=self._in_parts)
        if self._ends.numel():
            tokens = tokens * self._unfinished + self._pad * (1 - self._unfinished)
            self._unfinished.mul_(~torch.isin(tokens, self._ends))
        invalid = self._valid
        if probabilities is not None:
            invalid = is_invalid(probabilities).expand_as(tokens).long()
        result = torch.stack((tokens, self._unfinished, invalid))
        self.results.index_copy_(0, self._cursor, result[None])
        self._token.copy_(tokens[:, None])
        self._cursor.add_(1)


def call_of_its_own(model: Any) -> Callable[..., Any]:
    """``model``'s call with code of its own. The compiler limits the versions of a code, and each
    step with other forwards is one: they would use up those of stock's compiled forward."""

    def call(**given: Any) -> Any:
        return model(**given)

    call.__code__ = call.__code__.replace()
    return call


def without_padding(compiled: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``torch.compile`` that pad no matrix; a mode of the caller stays."""
    if compiled.get("mode") not in (None, "default"):
        return compiled
    options = {"shape_padding": False, **(compiled.get("options") or {})}
    return {**compiled, "mode": None, "options": options}
