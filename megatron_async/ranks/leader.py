"""Rank 0's runner: it tells the other ranks what it launches, and then launches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.errors import IntegrityError
from megatron_async.ranks import messages
from megatron_async.ranks.group import RankGroup
from megatron_async.runner.masks import Mask
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.runner.step_program import RowProcessor
from megatron_async.step.plan import Guess, Plan, Ticket
from megatron_async.step.records import StepResult


class LeadingRunner(ModelRunner):
    """A runner whose launches all ranks of ``group`` make, in its order.

    Args:
        engine: the number of its engine in the group.
    """

    def __init__(self, *args: Any, group: RankGroup, engine: int, **options: Any) -> None:
        self._group = group
        self._engine = engine
        self._in_flight = 0
        self._claimed: tuple[Mask, Mask] | None = None
        """Masks of the pending ticket, which the other ranks do not have yet."""
        self._guesses: Sequence[Guess] = ()
        """Likewise."""
        super().__init__(*args, **options)

    @property
    def engine(self) -> int:
        """The number of its engine in the group."""
        return self._engine

    def launch(self, plan: Plan) -> Ticket:
        self._group.begin_steps(self._engine)
        self._in_flight += 1
        self._tell_masks()
        self._group.tell(messages.Launch(self._engine, plan))
        try:
            return super().launch(plan)
        except RuntimeError as error:
            raise self._group.explain(error) from error

    def take(self, ticket: Ticket) -> StepResult:
        if self.lacks(ticket):
            self._tell_masks()
            self._group.tell(messages.Sample(self._engine, ticket.number))
        try:
            result = super().take(ticket)
        except RuntimeError as error:
            raise self._group.explain(error) from error
        self._in_flight -= 1
        if not self._in_flight:
            self._group.end_steps(self._engine)
        return result

    def claim_masks(self, ticket: Ticket) -> tuple[Mask, Mask]:
        self._claimed = super().claim_masks(ticket)
        return self._claimed

    def _tell_masks(self) -> None:
        if self._claimed is None:
            return
        masks, masked = self._claimed
        self._claimed = None
        data = masked.tobytes() + masks[masked != 0].tobytes()
        self._group.tell(messages.Masks(self._engine, data))
        if self._guesses:
            self._group.tell(messages.Guesses(self._engine, list(self._guesses)))
            self._guesses = ()

    def guess(self, ticket: Ticket, guesses: Sequence[Guess]) -> None:
        super().guess(ticket, guesses)
        self._guesses = guesses

    def process_logits(self, ticket: Ticket, processors: Mapping[int, RowProcessor]) -> None:
        raise IntegrityError("logits processors are refused where a request asks for them")

    def poison_freed(self, blocks: list[int], slots: list[int]) -> None:
        self._group.tell(messages.PoisonFreed(self._engine, blocks, slots))
        super().poison_freed(blocks, slots)

    def restart(self) -> None:
        self._group.tell(messages.Restart(self._engine))
        super().restart()

    def choose_scales(self, *, stored: bool) -> None:
        self.launching = True
        self._group.tell(messages.ChooseScales(self._engine, stored))
        try:
            super().choose_scales(stored=stored)
        except RuntimeError as error:
            raise self._group.explain(error) from error
        self.launching = False

    def release(self) -> None:
        self._group.forget(self._engine)
        self._group.end_steps(self._engine)
        if self._group.is_alive:
            self._group.tell(messages.Release(self._engine))
        super().release()
