"""The hash model with drafts: it knows its own next tokens, and errs at a seeded rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf

import torch

from megatron_async.runner.drafter import MixedTokens, SampledRows
from megatron_async.runner.memory.forward_batch import ForwardBatch
from tests.support.hash_model import VOCAB_SIZE, HashModel, hash_logits
from tests.support.oracle import Ask, process_row, sampled_token


class DraftingHashModel(HashModel):
    """Drafts ``num_speculative_tokens`` tokens a row, each wrong with probability ``error_rate``.

    A draft is computed on the CPU from what the cache holds of the request, so a lost or stale
    token shows as fewer accepted drafts, and never as another output.

    Args:
        guide: from the tokens of a request to what it asks, where the drafts are to know its
            grammar. Then a wrong draft is another token that the grammar allows.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        error_rate: float,
        seed: int = 0,
        guide: Callable[[list[int]], Ask | None] | None = None,
    ) -> None:
        super().__init__()
        self._guide = guide
        self.num_speculative_tokens = num_speculative_tokens
        self._error_rate = error_rate
        self._seed = seed

    drafts_itself = True

    def make_drafter(self, context: ForwardBatch, max_rows: int) -> HashDrafter:
        return HashDrafter(self, context)

    def draft_row(self, context: ForwardBatch, slot: int) -> list[int]:
        state = context.slots
        if state.finished[slot]:
            return [0] * self.num_speculative_tokens
        length, size = int(state.kv_length[slot]), context.block_size_tokens
        positions = torch.arange(length)
        places = state.block_table[slot][positions // size] * size + positions % size
        salt = int(self.salt)
        cells = context.kv_cache[0, 0, :, :, 0, 0].reshape(-1)[places]
        tokens = [*(cells - 97 * salt).tolist(), int(state.last_token[slot])]
        drafts = []
        for _ in range(self.num_speculative_tokens):
            row = hash_logits(self.history(tokens, salt))
            ask = None if self._guide is None else self._guide(tokens)
            if ask is not None:
                row = process_row(row, ask, tokens)
            allowed = [token for token, x in enumerate(row) if x > -inf] or [0]
            token = self._next_token(context, slot, tokens, row)
            errs = random.Random(hash((self._seed, len(tokens) + 1, token)))
            if errs.random() < self._error_rate:
                token = next((each for each in allowed if each > token), allowed[0])
            tokens.append(token)
            drafts.append(token)
        return drafts

    def _next_token(
        self, context: ForwardBatch, slot: int, tokens: list[int], row: list[float]
    ) -> int:
        state = context.slots
        if max(row) == -inf:
            return 0
        if state.inverse_temperature[slot] <= 0:
            return max(range(VOCAB_SIZE), key=lambda v: (row[v], -v))
        return sampled_token(
            tuple(row),
            float(state.inverse_temperature[slot]),
            int(state.top_k[slot]),
            float(state.top_p[slot]),
            int(state.seed[slot]),
            len(tokens),
        )


class HashDrafter:
    """Has a drafting model look at the cache behind each S."""

    wants_tokens = False

    def __init__(self, model: DraftingHashModel, context: ForwardBatch) -> None:
        self._model = model
        self._context = context

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def hidden_states(self, count: int) -> None:
        return None

    def prefill(self, tokens: MixedTokens, hidden_states: torch.Tensor | None) -> None:
        pass

    def draft(self, rows: SampledRows, count: int) -> torch.Tensor:
        model, context = self._model, self._context
        if not count:
            return rows.tokens[:, :0]
        drafts = [model.draft_row(context, slot)[:count] for slot in rows.slots.tolist()]
        return torch.tensor(drafts)
