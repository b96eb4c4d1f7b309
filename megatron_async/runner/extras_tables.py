"""What slots ask of S besides the fields of every slot: tables by slot, filled on admission."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_async.sampling.process_logits import IN_PROMPT, RECENT, WORD_BITS, mask_words
from megatron_async.step.extras import (
    FEATURE_ALLOWED,
    FEATURE_BAD_WORDS,
    FEATURE_BIAS,
    FEATURE_MIN_TOKENS,
    FEATURE_PENALTIES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    NO_AUTOMATON,
    Extras,
    SlotExtras,
    features_of,
)

if TYPE_CHECKING:
    from megatron_async.sampling.automata import Automata

STAGED_TOKENS = 4096
"""Tokens for which each slot has pinned memory; longer histories get some when they come."""

# Words of every admission: features, log_probs, two of min_total, the four numbers, recent tokens,
# and the state of the automaton.
_NUMBERS = 4
_RECENT = 8
_STATE = _RECENT + RECENT
_HEAD = _STATE + 1

POOL_TABLES = 6
"""Tensors of ``sampling.automata.Automata``."""

Ints = npt.NDArray[np.int32]


class ExtrasTables:
    """One tensor for each thing that can be asked, ``[slots + 1, ...]``; the last slot is the null
    slot, which asks for nothing.

    ``features`` says what a slot asks for (FEATURE bits), and no other table is read, or in order,
    for a slot that does not ask for it; ``recent`` is in order for all that ask for anything.

    Attributes:
        features, log_probs: int32 ``[S + 1]``.
        min_total: int64 ``[S + 1]``.
        min_p: float32 ``[S + 1]``, the natural logarithm of the share.
        repetition, presence, frequency: float32 ``[S + 1]``.
        counts: int32 ``[S + 1, V]``: how often a token is in the output, and IN_PROMPT.
        recent: int32 ``[S + 1, RECENT]``: the token at position p is in column ``p % RECENT``; -1
            is empty.
        bias_ids: int32 ``[S + 1, MAX_LOGIT_BIASES]``, -1 is empty; ``bias_values`` float32.
        bad_words: int32 ``[S + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]``, the token that may not
            come last, -1 before the others; a row of -1 is empty.
        allowed, stops: int32 ``[S + 1, mask_words(V)]``: ids that may come; ids that may not come
            before ``min_total``, and that end a text which an automaton guides.
        automaton: int32 ``[S + 1]``: the state in the pool that guides a slot, which S advances; -1
            where none does.
        addresses: int64 ``[6]``: where the pool's tables are; None in engines without automata.
        automata: the pool's tables, once there is one.
    """

    def __init__(
        self,
        slot_count: int,
        vocab_size: int,
        max_sequence_length: int,
        device: torch.device,
        *,
        has_automata: bool = False,
    ) -> None:
        slots, self._vocab_size = slot_count + 1, vocab_size
        self._mask_words = mask_words(vocab_size)

        def table(*columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(slots, *columns, dtype=dtype, device=device)

        self.features = table()
        self.log_probs = table()
        self.min_total = table(dtype=torch.int64)
        self.min_p = table(dtype=torch.float32)
        self.repetition = table(dtype=torch.float32)
        self.presence = table(dtype=torch.float32)
        self.frequency = table(dtype=torch.float32)
        self.counts = table(vocab_size)
        self.recent = table(RECENT)
        self.bias_ids = table(MAX_LOGIT_BIASES)
        self.bias_values = table(MAX_LOGIT_BIASES, dtype=torch.float32)
        self.bad_words = table(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        self.allowed = table(self._mask_words)
        self.stops = table(self._mask_words)
        self.automaton = table()
        self.addresses: Tensor | None = None
        if has_automata:
            self.addresses = torch.zeros(POOL_TABLES, dtype=torch.int64, device=device)
        self.automata: Automata | None = None
        sections = 2 * MAX_LOGIT_BIASES + self.bad_words[0].numel() + 2 * self._mask_words
        words = _HEAD + sections + min(max_sequence_length, STAGED_TOKENS)
        self._staging: Tensor | None = None
        if device.type == "cuda":
            self._staging = torch.empty(slot_count, words, dtype=torch.int32, pin_memory=True)
        self._device = device
        self.reset()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tables on the device."""
        return sum(table.nbytes for table, _ in self._defaults())

    def reset(self) -> None:
        """All slots ask for nothing."""
        for table, default in self._defaults():
            table.fill_(default)

    def clear(self, slot: int) -> None:
        """``slot`` asks for nothing, from here on in stream order."""
        self.features[slot].zero_()
        self.log_probs[slot].zero_()
        if self.automata is not None:
            self.automaton[slot].fill_(NO_AUTOMATON)

    def admit(self, slot: int, extras: SlotExtras, state: int = NO_AUTOMATON) -> None:
        """Take what a request asks for into ``slot``, from here on in stream order. Token ids
        outside the vocabulary are left out. ``state`` is that of its automaton."""
        sections = _sections(extras.extras, self._vocab_size, self._mask_words)
        if extras.automaton is not None:
            stops = _mask(extras.automaton.stop_ids, self._vocab_size, self._mask_words)
            sections[FEATURE_MIN_TOKENS] = stops
        if extras.extras.counts_tokens:
            sections[FEATURE_PENALTIES] = np.array(extras.tokens, dtype=np.int32)
        words = self._copied(slot, np.concatenate([_head(extras, state), *sections.values()]))
        self.features[slot].copy_(words[0])
        self.log_probs[slot].copy_(words[1])
        self.min_total[slot].copy_(words[2:4].view(torch.int64)[0])
        numbers = words[_NUMBERS:_RECENT].view(torch.float32)
        for number, table in enumerate(
            (self.min_p, self.repetition, self.presence, self.frequency)
        ):
            table[slot].copy_(numbers[number])
        self.recent[slot].copy_(words[_RECENT:_STATE])
        self.automaton[slot].copy_(words[_STATE])
        at = _HEAD
        for feature, section in sections.items():
            self._take(slot, feature, words[at : at + len(section)], extras.prompt_length)
            at += len(section)

    def _copied(self, slot: int, words: Ints) -> Tensor:
        """``words`` on the device."""
        if self._staging is None:
            return torch.from_numpy(words)
        staging = self._staging[slot]
        if len(words) > len(staging):
            # From PyTorch's allocator, which gives pinned memory to nobody else before the copy has
            # been made.
            staging = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
        # No WAR hazard: a slot is not used again before its last ticket has retired, and so the
        # copy of the admission before this one, which came before that ticket's forward.
        staging[: len(words)] = torch.from_numpy(words)
        return staging[: len(words)].to(self._device, non_blocking=True)

    def _take(self, slot: int, feature: int, words: Tensor, prompt_length: int) -> None:
        """The section of one feature."""
        if feature == FEATURE_MIN_TOKENS:
            self.stops[slot].copy_(words)
        elif feature == FEATURE_ALLOWED:
            self.allowed[slot].copy_(words)
        elif feature == FEATURE_BIAS:
            self.bias_ids[slot].copy_(words[:MAX_LOGIT_BIASES])
            self.bias_values[slot].copy_(words[MAX_LOGIT_BIASES:].view(torch.float32))
        elif feature == FEATURE_BAD_WORDS:
            self.bad_words[slot].copy_(words.view(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS))
        else:
            counts, ids = self.counts[slot].zero_(), words.long()
            counts.index_fill_(0, ids[:prompt_length], IN_PROMPT)
            counts.index_add_(0, ids[prompt_length:], torch.ones_like(words[prompt_length:]))

    def _defaults(self) -> Iterable[tuple[Tensor, float]]:
        return (
            (self.features, 0),
            (self.log_probs, 0),
            (self.min_total, 0),
            (self.min_p, -math.inf),
            (self.repetition, 1.0),
            (self.presence, 0.0),
            (self.frequency, 0.0),
            (self.counts, 0),
            (self.recent, -1),
            (self.bias_ids, -1),
            (self.bias_values, 0.0),
            (self.bad_words, -1),
            (self.allowed, 0),
            (self.stops, 0),
            (self.automaton, NO_AUTOMATON),
        )


def _head(slot_extras: SlotExtras, state: int) -> Ints:
    extras, tokens = slot_extras.extras, slot_extras.tokens
    head = np.full(_HEAD, -1, dtype=np.int32)
    head[:2] = features_of(extras), extras.log_probs
    head[2:_NUMBERS].view(np.int64)[0] = extras.min_total
    head[_NUMBERS:_RECENT].view(np.float32)[:] = (
        math.log(extras.min_p) if extras.min_p > 0.0 else -math.inf,
        extras.repetition_penalty,
        extras.presence_penalty,
        extras.frequency_penalty,
    )
    for position in range(max(0, len(tokens) - RECENT), len(tokens)):
        head[_RECENT + position % RECENT] = tokens[position]
    head[_STATE] = state
    return head


def _sections(extras: Extras, vocab_size: int, words: int) -> dict[int, Ints]:
    """The words of the tables that are asked for, by feature."""
    features = features_of(extras)
    sections: dict[int, Ints] = {}
    if features & FEATURE_MIN_TOKENS:
        sections[FEATURE_MIN_TOKENS] = _mask(extras.stop_ids, vocab_size, words)
    if features & FEATURE_ALLOWED:
        mask = ~_mask(extras.banned, vocab_size, words)
        if extras.allowed is not None:
            mask &= _mask(extras.allowed, vocab_size, words)
        sections[FEATURE_ALLOWED] = mask
    if features & FEATURE_BIAS:
        bias = [each for each in extras.bias if 0 <= each[0] < vocab_size]
        section = np.full(2 * MAX_LOGIT_BIASES, -1, dtype=np.int32)
        section[: len(bias)] = [token for token, _ in bias]
        values = section[MAX_LOGIT_BIASES:].view(np.float32)
        values[:] = 0.0
        values[: len(bias)] = [value for _, value in bias]
        sections[FEATURE_BIAS] = section
    if features & FEATURE_BAD_WORDS:
        table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=np.int32)
        for row, word in zip(table, extras.bad_words, strict=False):
            if all(0 <= token < vocab_size for token in word):
                row[-len(word) :] = word
        sections[FEATURE_BAD_WORDS] = table.ravel()
    return sections


def _mask(ids: Iterable[int], vocab_size: int, words: int) -> Ints:
    """The bits of ``ids``."""
    chosen = np.fromiter(ids, dtype=np.int64)
    bits = np.zeros(words * WORD_BITS, dtype=np.bool_)
    bits[chosen[(chosen >= 0) & (chosen < vocab_size)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
