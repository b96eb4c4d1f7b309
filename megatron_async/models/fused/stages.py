"""The ends of a pipeline stage that is not the first, or not the last: hidden states come from the
stage before, and go to the one behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from megatron_async.models.fused.blocks.gemms import Work
from megatron_async.models.fused.blocks.residual import LAYER, Norm, Step


class Stages(Protocol):
    """This process's place among the stages of a model."""

    is_first: bool
    is_last: bool

    def receive_(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden`` with what the stage before has put out."""

    def send(self, hidden: Tensor) -> None:
        """Hand hidden states to the next stage."""


class ReceivedBlock:
    """Hidden states of the stage before, where the first stage has the embedding."""

    norm: Norm | None = None

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def why_not(self, rows: int, context: Any) -> str | None:
        """Return None: it runs for all rows."""
        return None

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Begin the residual stream; returns the statistics for the reader."""
        rows, size = step.residual.hidden.shape
        received = self._stages.receive_(step.residual.workspace.buffer("received", size)[:rows])
        return step.residual.replace(received, reader, LAYER)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """Nothing ahead: Triton compiles at the first call."""
        return iter(())


class SentBlock:
    """Hidden states to the stage behind, where the last stage has the head."""

    norm: Norm | None = None

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def why_not(self, rows: int, context: Any) -> str | None:
        """Return None: it runs for all rows."""
        return None

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> None:
        """Send the residual stream; this stage has no logits, which stay zeros."""
        hidden = step.residual.hidden
        self._stages.send(hidden)
        step.logits.zero_()
        if step.hidden_states is not None:
            step.hidden_states.copy_(hidden)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """Nothing ahead: no kernel of ours runs."""
        return iter(())
