"""Drafts of grammars alone: what the host knows to follow, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_async.runner.drafter import MixedTokens, SampledRows


class GrammarDrafter:
    """Leaves drafts to ``runner.guided_drafts``, which writes what a grammar forces. The scheduler
    gives windows to rows that have such drafts alone."""

    wants_tokens = False

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def hidden_states(self, count: int) -> None:
        return None

    def prefill(self, tokens: MixedTokens, hidden_states: Tensor | None) -> None:
        pass

    def draft(self, rows: SampledRows, count: int) -> None:
        return None
