"""Log-probabilities of prompts: which logits of a forward they come from, and their way back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_async.sampling.log_probs import (
    pack,
    token_entropies,
    token_log_probs,
    token_ranks,
)
from megatron_async.step.extras import PROMPT_LOG_PROB_WORDS
from megatron_async.step.plan import Plan
from megatron_async.step.records import LogProbs

ROWS_AT_ONCE = 64
"""Rows of logits at once: their integer masses take eight bytes each."""


class PromptTargets(NamedTuple):
    """Prompt tokens of the forward of ticket ``number``: the logits of its tokens ``tokens`` are
    those of the prompt tokens ``ids``. The hidden states of its tokens ``hidden`` are wanted behind
    ``layers``, ascending."""

    number: int
    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> PromptTargets:
        """The targets that a plan asks for."""
        tokens: list[int] = []
        ids: list[int] = []
        hidden: list[int] = []
        layers: set[int] = set()
        at = plan.decode_tokens
        for chunk in plan.prefills:
            tokens += range(at, at + len(chunk.targets))
            ids += chunk.targets
            if chunk.layers:
                hidden += range(at, at + len(chunk.tokens))
                layers.update(chunk.layers)
            at += len(chunk.tokens)
        return cls(plan.number, tuple(tokens), tuple(ids), tuple(hidden), tuple(sorted(layers)))


class PromptLogProbs:
    """A pinned ring of results, an entry for each ticket. What F(n) writes is there when the record
    of S(n) is, which comes behind it on the stream: nobody waits for it by itself.

    Args:
        entries: no fewer than the results' ring has, so none is overwritten before it is taken.
        tokens: of the largest forward.
    """

    def __init__(self, entries: int, tokens: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        shape = (entries, tokens, PROMPT_LOG_PROB_WORDS)
        self._ring = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

    def publish(self, targets: PromptTargets, logits: torch.Tensor) -> None:
        """Device: hand out the log-probabilities from ``logits`` [targets, vocabulary]."""
        ids = torch.tensor(targets.ids, pin_memory=logits.is_cuda)
        ids = ids.to(logits.device, non_blocking=True)
        entry = self._ring[targets.number % len(self._ring)]
        for start in range(0, len(targets.ids), ROWS_AT_ONCE):
            end = start + ROWS_AT_ONCE
            rows, tokens = logits[start:end], ids[start:end]
            words = pack(*token_log_probs(rows, tokens)).T
            entropies = token_entropies(rows).view(torch.int32)
            further = torch.stack((token_ranks(rows, tokens), entropies), dim=1)
            words = torch.cat((words, further), dim=1)
            entry[start : start + len(words)].copy_(words, non_blocking=True)

    def take(self, targets: PromptTargets) -> LogProbs:
        """Host: those of a ticket whose record has been taken, [targets, PROMPT_LOG_PROB_WORDS]
        int32."""
        entry = self._ring[targets.number % len(self._ring)]
        words: LogProbs = entry[: len(targets.ids)].numpy().copy()
        return words
