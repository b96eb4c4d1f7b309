"""What becomes of a row's logits before a token is sampled from them: masks, biases, penalties.

The rules shared by all implementations:

- In this order, which is vLLM's: allowed ids and the guide's mask, bad words, end tokens that are
  too early, bias, repetition penalty, frequency penalty, presence penalty, min-p. Each operation is
  rounded to float32 by itself.
- NaN stays NaN, whatever is masked, and min-p drops nothing beside one.
- A row that asks for any of it and has no candidate left gets a NaN in column 0, so that the
  sampler reports it as failed.
- Other rows are copied.

Repetition penalty: Keskar et al., "CTRL" (2019). Frequency and presence penalty are OpenAI's, as
vLLM reads them: of the output alone. Min-p: Nguyen et al., "Turning Up the Heat" (ICLR 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_async.sampling import filters
from megatron_async.step.extras import (
    FEATURE_ALLOWED,
    FEATURE_BAD_WORDS,
    FEATURE_BIAS,
    FEATURE_GUIDED,
    FEATURE_MIN_P,
    FEATURE_MIN_TOKENS,
    FEATURE_PENALTIES,
    FEATURES_OF_LOGITS,
    MAX_BAD_WORD_TOKENS,
)

IN_PROMPT = 1 << 30
"""Bit of a word of ``counts``: the token is in the prompt. The bits below it count the output."""
RECENT = MAX_BAD_WORD_TOKENS
"""Tokens of a sequence that ``recent`` holds; bad words look at all but one of them."""
WORD_BITS = 32
"""Token ids in a word of a mask."""


class Tables(Protocol):
    """What slots ask for, by slot: ``runner.extras_tables.ExtrasTables``. A table is read for the
    slots alone that have the FEATURE it is for."""

    features: Tensor
    log_probs: Tensor
    min_total: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    recent: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bad_words: Tensor
    allowed: Tensor
    stops: Tensor
    automaton: Tensor
    addresses: Tensor | None


class _Rows(NamedTuple):
    """Rows of logits: what ``process_logits`` takes with them."""

    tables: Tables
    slots: Tensor
    positions: Tensor
    inverse_temperature: Tensor
    masks: Tensor | None
    masked: Tensor | None
    ahead: Tensor | None

    def select(self, rows: Tensor) -> _Rows:
        """Return the rows of int64 ``[N]``."""
        return _Rows(self.tables, *(None if t is None else t[rows] for t in self[1:]))  # type: ignore[arg-type]


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask with a bit for each token id: bit ``id % 32`` of word ``id // 32``."""
    return -(-vocab_size // WORD_BITS)


def process_logits(
    logits: Tensor,
    tables: Tables,
    slots: Tensor,
    positions: Tensor,
    inverse_temperature: Tensor,
    masks: Tensor | None = None,
    masked: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Logits as the sampler is to take them, float32 ``[R, V]``.

    On CUDA this neither synchronises nor depends on values for its shapes. On the CPU the work
    depends on what the rows ask for.

    Args:
        logits: ``[R, V]`` of any float type; not changed.
        tables: of ``V`` token ids.
        slots: int64 ``[R]``; several rows may have the null slot, or one slot at its positions.
        positions: int64 ``[R]``, the index of the sampled token in its sequence.
        inverse_temperature: float32 ``[R]``; 0 is greedy, which min-p leaves as it is.
        masks: int32 ``[R, mask_words(V)]``, the ids that the guide of each row allows.
        masked: bool ``[R]``, the rows that have a mask.
        ahead: int64 ``[R, A]``, tokens between what the tables know of and the position, oldest
            first, -1 for none: they count as output.
    """
    x = logits.to(torch.float32, copy=True)
    features = tables.features[slots]
    rows = _Rows(tables, slots, positions, inverse_temperature, masks, masked, ahead)
    if x.is_cuda:
        return _processed(x, features, rows)
    asking = ((features & FEATURES_OF_LOGITS) != 0).nonzero()[:, 0]
    if len(asking):
        x[asking] = _processed(x[asking], features[asking], rows.select(asking))
    return x


def advance(
    tables: Tables, slots: Tensor, tokens: Tensor, counts: Tensor, positions: Tensor
) -> None:
    """Note sampled tokens: in ``recent``, and in ``counts`` of slots with penalties.

    Args:
        slots: int64 ``[R]``, distinct but for those that ask for nothing, of which nothing is
            noted: the null slot is one.
        tokens: int64 ``[R, w]``.
        counts: int64 ``[R]``; the first ``counts[r]`` tokens of row r count.
        positions: int64 ``[R]``, the index of the first token of each row in its sequence.
    """
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    features = tables.features[slots][:, None]
    counted = (offsets < counts[:, None]) & (features != 0)
    penalized = counted & ((features & FEATURE_PENALTIES) != 0)
    at = slots[:, None].expand_as(tokens)
    flat = at * tables.counts.shape[1] + tokens.clamp(min=0)
    tables.counts.view(-1).index_add_(0, flat.flatten(), penalized.flatten().to(torch.int32))
    columns = (positions[:, None] + offsets) % RECENT
    for first in range(0, tokens.shape[1], RECENT):  # columns of their own
        some = slice(first, first + RECENT)
        cells = at[:, some], columns[:, some]
        # Slots that several rows have are written with what they hold.
        noted = torch.where(counted[:, some], tokens[:, some].to(torch.int32), tables.recent[cells])
        tables.recent.index_put_(cells, noted)


def _processed(x: Tensor, features: Tensor, rows: _Rows) -> Tensor:
    holds = ~x.isnan()
    for feature, step in _STEPS:
        asks = (features & feature) != 0
        if x.is_cuda or asks.any():
            x = torch.where(asks[:, None] & holds, step(x, rows), x)
    empty = (x == -torch.inf).all(1) & ((features & FEATURES_OF_LOGITS) != 0)
    x[:, 0].masked_fill_(empty, torch.nan)
    return x


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Masks int32 ``[R, W]`` as bool ``[R, V]``."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def _allow(x: Tensor, rows: _Rows) -> Tensor:
    return x.masked_fill(~_bits(rows.tables.allowed[rows.slots], x.shape[1]), -torch.inf)


def _guide(x: Tensor, rows: _Rows) -> Tensor:
    if rows.masks is None or rows.masked is None:
        return x
    banned = ~_bits(rows.masks, x.shape[1]) & rows.masked[:, None]
    return x.masked_fill(banned, -torch.inf)


def _ban_words(x: Tensor, rows: _Rows) -> Tensor:
    vocab_size = x.shape[1]
    words = rows.tables.bad_words[rows.slots]
    before, last = words[:, :, :-1], words[:, :, -1].long()
    matches = ((before < 0) | (before == _preceding(rows)[:, None, :])).all(2) & (last >= 0)
    # One column more, for words that do not match.
    banned = x.new_zeros(len(x), vocab_size + 1, dtype=torch.bool)
    banned.scatter_(1, torch.where(matches, last, vocab_size), True)
    return x.masked_fill(banned[:, :vocab_size], -torch.inf)


def _preceding(rows: _Rows) -> Tensor:
    """The last ``RECENT - 1`` tokens before the positions, oldest first, -1 where there is none:
    int64 ``[R, RECENT - 1]``."""
    distance = torch.arange(RECENT - 1, 0, -1, device=rows.slots.device)
    at = rows.positions[:, None] - distance
    tokens = rows.tables.recent[rows.slots].long().gather(1, at % RECENT).masked_fill(at < 0, -1)
    if rows.ahead is None or rows.ahead.shape[1] == 0:
        return tokens
    absent = rows.ahead < 0
    ordered = rows.ahead.gather(1, absent.to(torch.int8).argsort(dim=1, stable=True))
    index = (~absent).sum(1, keepdim=True) - distance
    from_ahead = ordered.gather(1, index.clamp(0, ordered.shape[1] - 1))
    return torch.where(index >= 0, from_ahead, tokens)


def _ban_stops(x: Tensor, rows: _Rows) -> Tensor:
    too_early = rows.positions < rows.tables.min_total[rows.slots]
    banned = _bits(rows.tables.stops[rows.slots], x.shape[1]) & too_early[:, None]
    return x.masked_fill(banned, -torch.inf)


def _add_bias(x: Tensor, rows: _Rows) -> Tensor:
    vocab_size = x.shape[1]
    ids = rows.tables.bias_ids[rows.slots].long()
    # One column more, for empty entries.
    bias = x.new_zeros(len(x), vocab_size + 1)
    bias.scatter_(1, ids.masked_fill(ids < 0, vocab_size), rows.tables.bias_values[rows.slots])
    bias = bias[:, :vocab_size]
    return torch.where(bias != 0.0, x + bias, x)


def _penalize(x: Tensor, rows: _Rows) -> Tensor:
    tables, slots = rows.tables, rows.slots
    words = tables.counts[slots]
    if rows.ahead is not None:
        words.scatter_add_(1, rows.ahead.clamp(min=0), (rows.ahead >= 0).to(torch.int32))
    count = words & (IN_PROMPT - 1)
    repetition, frequency, presence = (
        table[slots][:, None] for table in (tables.repetition, tables.frequency, tables.presence)
    )
    x = torch.where(words != 0, torch.where(x > 0.0, x / repetition, x * repetition), x)
    x = x - frequency * count.to(torch.float32)
    return torch.where(count > 0, x - presence, x)


def _keep_likely(x: Tensor, rows: _Rows) -> Tensor:
    factor = rows.inverse_temperature
    largest = filters.scale_logits(x.amax(1, keepdim=True), factor)
    least = largest + rows.tables.min_p[rows.slots][:, None]
    drops = (filters.scale_logits(x, factor) < least) & (factor > 0.0)[:, None]
    return x.masked_fill(drops, -torch.inf)


_STEPS: tuple[tuple[int, Callable[[Tensor, _Rows], Tensor]], ...] = (
    (FEATURE_ALLOWED, _allow),
    (FEATURE_GUIDED, _guide),
    (FEATURE_BAD_WORDS, _ban_words),
    (FEATURE_MIN_TOKENS, _ban_stops),
    (FEATURE_BIAS, _add_bias),
    (FEATURE_PENALTIES, _penalize),
    (FEATURE_MIN_P, _keep_likely),
)
