"""Logits processing in torch: against NumPy loops, against transformers, and its tables."""

from __future__ import annotations

import importlib.util
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.runner.extras_tables import STAGED_TOKENS, ExtrasTables
from megatron_async.sampling.process_logits import (
    IN_PROMPT,
    RECENT,
    advance,
    mask_words,
    process_logits,
)
from megatron_async.step import extras as step_extras
from megatron_async.step.extras import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    RAW_LOG_PROBS,
    Extras,
    SlotExtras,
    features_of,
)

VOCAB = 61
CPU = torch.device("cpu")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="compares with transformers"
)
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_gpu = pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=gpu)])

Floats = npt.NDArray[np.float32]


def random_slot(rng: random.Random, vocab_size: int, log_probs: int = 0) -> SlotExtras:
    """Each thing that can be asked in about a third of all cases."""

    def asks() -> bool:
        return rng.random() < 0.35

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(vocab_size), rng.randint(1, min(most, vocab_size))))

    tokens = tuple(rng.randrange(min(vocab_size, 12)) for _ in range(rng.randint(1, 40)))
    penalties = asks()
    words = []
    for length in range(2, rng.randint(2, MAX_BAD_WORD_TOKENS + 1)):
        before = (
            tokens[len(tokens) - length + 1 :] if len(tokens) >= length - 1 else ids(length - 1)
        )
        words.append((*before, rng.randrange(vocab_size)))
        words.append((*(rng.randrange(12) for _ in before), rng.randrange(vocab_size)))
    extras = Extras(
        log_probs=log_probs,
        min_p=rng.choice((0.01, 0.2, 1.0)) if asks() else 0.0,
        repetition_penalty=rng.choice((0.7, 1.0, 1.3)) if penalties else 1.0,
        presence_penalty=rng.choice((-0.5, 0.0, 1.5)) if penalties else 0.0,
        frequency_penalty=rng.choice((-2.0, 0.0, 0.3)) if penalties else 0.0,
        min_total=len(tokens) + rng.randint(-1, 1) if asks() else 0,
        stop_ids=(*ids(9), vocab_size + 3) if asks() else (),
        bias=tuple((i, rng.uniform(-9, 9)) for i in ids(MAX_LOGIT_BIASES)) if asks() else (),
        allowed=ids(vocab_size) if asks() else None,
        banned=ids(5) if asks() else (),
        bad_words=tuple(words) if asks() else (),
        guided=asks(),
    )
    return SlotExtras(extras, rng.randint(0, len(tokens)), tokens)


def random_masks(rows: int, vocab_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks of nine ids in ten, and which rows have one."""
    shape = (rows, mask_words(vocab_size), 32)
    bits = torch.rand(shape, generator=generator) < 0.9
    words = (bits.long() << torch.arange(32)).sum(2).to(torch.int32)
    return words, torch.rand(rows, generator=generator) < 0.7


def with_failures(x: Tensor, rows: Sequence[int] = (0, 1, 2)) -> Tensor:
    """One row with a NaN, one of minus infinity, one with some."""
    nan, empty, some = rows
    x[nan, x.shape[1] // 2] = torch.nan
    x[empty] = -torch.inf
    x[some, ::3] = -torch.inf
    return x


class Asking:
    """Rows of random extras, and of slots that ask for nothing, before a random step."""

    def __init__(
        self, rows: int, vocab_size: int, seed: int, modes: Sequence[int] = (0,), scale: float = 3.0
    ) -> None:
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.asked = [random_slot(rng, vocab_size, rng.choice(modes)) for _ in range(rows)]
        self.slots = torch.tensor(rng.sample(range(rows), rows))
        self.slots[rows // 2 :: 5] = rows  # the null slot
        self.lengths = torch.tensor([*(len(asked.tokens) for asked in self.asked), 7])
        self.positions = self.lengths[self.slots]
        self.inverse_temperature = torch.tensor([rng.choice((0.0, 1.0, 1.6)) for _ in range(rows)])
        self.masks, self.masked = random_masks(rows, vocab_size, generator)
        self.logits = torch.randn(rows, vocab_size, generator=generator) * scale
        self.vocab_size = vocab_size

    def tables(self, device: torch.device = CPU) -> ExtrasTables:
        tables = ExtrasTables(len(self.asked), self.vocab_size, 4096, device)
        for slot, asked in enumerate(self.asked):
            tables.admit(slot, asked)
        return tables

    def processed(self, tables: ExtrasTables, logits: Tensor, device: torch.device = CPU) -> Tensor:
        rows = (self.slots, self.positions, self.inverse_temperature, self.masks, self.masked)
        slots, positions, temperatures, masks, masked = (t.to(device) for t in rows)
        return process_logits(logits, tables, slots, positions, temperatures, masks, masked)


# --- the plain reference ----------------------------------------------------------------------


def is_set(mask: Tensor, token: int) -> bool:
    return bool((int(mask[token // 32]) >> token % 32) & 1)


def may_end(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    """The sequence ends as the bad word begins."""
    before = word[:-1]
    return len(tokens) >= len(before) and tokens[len(tokens) - len(before) :] == before


def plain_row(
    logits: Floats, slot: SlotExtras, inverse_temperature: float, mask: Tensor | None
) -> Floats:
    """One row, one id after the other, in float32."""
    extras, f32 = slot.extras, np.float32
    tokens, output = slot.tokens, Counter(slot.tokens[slot.prompt_length :])
    prompt, bias = set(tokens[: slot.prompt_length]), dict(extras.bias)
    ended = {word[-1] for word in extras.bad_words if may_end(tokens, word)}
    x = logits.copy()
    for token in range(len(x)):
        if np.isnan(x[token]):
            continue
        is_banned = (
            (extras.allowed is not None and token not in extras.allowed)
            or token in extras.banned
            or token in ended
            or (token in extras.stop_ids and len(tokens) < extras.min_total)
            or (extras.guided and mask is not None and not is_set(mask, token))
        )
        if is_banned:
            x[token] = -np.inf
        x[token] += f32(bias.get(token, 0.0))
        if token in prompt or token in output:
            penalty = f32(extras.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= f32(extras.frequency_penalty) * f32(output[token])
        x[token] -= f32(extras.presence_penalty) if output[token] else f32(0.0)
    if extras.min_p and inverse_temperature and not np.isnan(x).any() and (x > -np.inf).any():
        factor = f32(inverse_temperature)
        x[x * factor < x.max() * factor + f32(math.log(extras.min_p))] = -np.inf
    if (x == -np.inf).all() and features_of(extras._replace(log_probs=0)):
        x[0] = np.nan
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32).cpu(), b.view(torch.int32).cpu())


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from((1, 5, VOCAB, 100)))
def test_rows_equal_the_plain_reference(seed: int, vocab_size: int) -> None:
    case = Asking(8, vocab_size, seed)
    logits = with_failures(case.logits)
    got = case.processed(case.tables(), logits).numpy()
    for row, slot in enumerate(case.slots.tolist()):
        wanted = logits[row].numpy()
        if slot < len(case.asked):
            mask = case.masks[row] if case.masked[row] else None
            temperature = float(case.inverse_temperature[row])
            wanted = plain_row(wanted, case.asked[slot], temperature, mask)
        np.testing.assert_array_equal(got[row], wanted)


def test_cases_hold_what_they_are_about() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        case = Asking(8, VOCAB, seed)
        logits = with_failures(case.logits)
        got = case.processed(case.tables(), logits)
        for row, slot in enumerate(case.slots.tolist()):
            if slot == len(case.asked):
                seen["null slot"] += 1
                continue
            asked = case.asked[slot]
            extras, tokens = asked.extras, asked.tokens
            without = Extras()._asdict()
            for name, value in extras._asdict().items():
                seen[name] += value != without[name]
            seen["words match"] += any(may_end(tokens, word) for word in extras.bad_words)
            seen["ends too early"] += bool(extras.stop_ids) and len(tokens) < extras.min_total
            seen["masked"] += extras.guided and bool(case.masked[row])
            seen["no candidate"] += bool(got[row].isnan().any() & (row > 0))
    del seen["log_probs"]
    assert all(seen.values()) and len(seen) == 16, seen


@on_gpu
def test_cuda_equals_the_cpu(device: torch.device) -> None:
    for seed, vocab_size in enumerate((1, VOCAB, 5000)):
        case = Asking(16, vocab_size, seed)
        logits = with_failures(case.logits)
        got = case.processed(case.tables(device), logits.to(device), device)
        np.testing.assert_array_equal(got.cpu(), case.processed(case.tables(), logits))


ASKED = {
    step_extras.FEATURE_PENALTIES: Extras(frequency_penalty=-0.1),
    step_extras.FEATURE_MIN_P: Extras(min_p=0.1),
    step_extras.FEATURE_MIN_TOKENS: Extras(min_total=3, stop_ids=(1,)),
    step_extras.FEATURE_BIAS: Extras(bias=((1, 1.0),)),
    step_extras.FEATURE_ALLOWED: Extras(banned=(1,)),
    step_extras.FEATURE_BAD_WORDS: Extras(bad_words=((1, 2),)),
    step_extras.FEATURE_GUIDED: Extras(guided=True),
    step_extras.FEATURE_LOG_PROBS: Extras(log_probs=RAW_LOG_PROBS),
}


def test_each_thing_that_can_be_asked_has_a_bit() -> None:
    assert [features_of(extras) for extras in ASKED.values()] == list(ASKED)
    assert sorted(ASKED) == [1 << bit for bit in range(8)]
    for nothing in (Extras(), Extras(min_total=3), Extras(stop_ids=(1,))):
        assert features_of(nothing) == 0
    assert features_of(Extras(allowed=())) == step_extras.FEATURE_ALLOWED


# --- rules ------------------------------------------------------------------------------------


def processed_by(slot: SlotExtras, logits: Tensor, inverse_temperature: float = 1.0) -> Tensor:
    """One row of a slot of its own."""
    tables = ExtrasTables(1, len(logits), 100, CPU)
    tables.admit(0, slot)
    at = torch.tensor([0]), torch.tensor([len(slot.tokens)]), torch.tensor([inverse_temperature])
    return process_logits(logits[None], tables, *at)[0]


def test_logits_are_never_changed_in_place() -> None:
    case = Asking(8, VOCAB, 3)
    before = case.logits.clone()
    case.processed(case.tables(), case.logits)
    assert torch.equal(case.logits, before)


def test_a_row_that_asks_for_log_probabilities_alone_is_copied() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    got = processed_by(SlotExtras(Extras(log_probs=RAW_LOG_PROBS), 1, (1,)), logits)
    assert torch.equal(got, logits)


def test_a_row_without_candidates_fails() -> None:
    got = processed_by(SlotExtras(Extras(allowed=()), 1, (1,)), torch.zeros(VOCAB))
    assert got[0].isnan() and (got[1:] == -torch.inf).all()


def test_min_p_leaves_greedy_rows_as_they_are() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    slot = SlotExtras(Extras(min_p=0.5), 1, (1,))
    assert torch.equal(processed_by(slot, logits, 0.0), logits)
    assert (processed_by(slot, logits, 1.0) == -torch.inf).any()


def test_min_p_looks_at_the_rows_temperature() -> None:
    logits = torch.tensor([0.0, -1.0, -2.0, -4.0])
    slot = SlotExtras(Extras(min_p=math.exp(-2.5)), 1, (1,))
    for inverse_temperature, kept in ((1.0, 3), (0.5, 4), (2.0, 2), (100.0, 1)):
        got = processed_by(slot, logits, inverse_temperature)
        assert int((got > -torch.inf).sum()) == kept


def test_halves_are_widened() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    slot = SlotExtras(Extras(presence_penalty=0.3), 0, (4,))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = logits.to(dtype)
        assert torch.equal(processed_by(slot, narrow), processed_by(slot, narrow.float()))


@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(0, 3))
@settings(max_examples=40)
def test_tokens_ahead_count_as_if_they_had_been_sampled(seed: int, count: int, absent: int) -> None:
    """The window of drafts: what lies between the tables and the position."""
    rng = random.Random(seed)
    slot = random_slot(rng, VOCAB)
    slot = slot._replace(extras=slot.extras._replace(guided=False))
    ahead = [rng.randrange(12) for _ in range(count)]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    wanted = processed_by(slot._replace(tokens=(*slot.tokens, *ahead)), logits)
    tables = ExtrasTables(1, VOCAB, 100, CPU)
    tables.admit(0, slot)
    for _ in range(absent):
        ahead.insert(rng.randint(0, len(ahead)), -1)
    got = process_logits(
        logits[None],
        tables,
        torch.tensor([0]),
        torch.tensor([len(slot.tokens) + count]),
        torch.tensor([1.0]),
        ahead=torch.tensor([ahead], dtype=torch.int64),
    )
    np.testing.assert_array_equal(got[0], wanted)


# --- transformers' processors -----------------------------------------------------------------


def transformers_processor(name: str, *args: Any, **kwargs: Any) -> Any:
    from transformers.generation import logits_process

    return getattr(logits_process, name)(*args, **kwargs)


TOKENS = (3, 9, 3, 4, 3, 17, 4, 5, 9, 3, 4)
BAD_WORDS = ((9, 3, 4, 50), (4, 51), (3, 3, 52), (17, 4, 5, 9, 3, 4, 53), (3, 54), (9, 3, 4, 4))
BIAS = ((2, 1.5), (40, -3.0), (60, 10.0))
COMPARED: dict[str, tuple[Extras, tuple[Any, ...]]] = {
    "RepetitionPenaltyLogitsProcessor": (Extras(repetition_penalty=1.3), (1.3,)),
    "NoBadWordsLogitsProcessor": (Extras(bad_words=BAD_WORDS), ([[*w] for w in BAD_WORDS],)),
    "MinPLogitsWarper": (Extras(min_p=0.07), (0.07,)),
    "SuppressTokensLogitsProcessor": (Extras(banned=(1, 5, 60)), ([1, 5, 60],)),
    "MinNewTokensLengthLogitsProcessor": (
        Extras(min_total=len(TOKENS) + 1, stop_ids=(7, 8)),
        (4, len(TOKENS) - 3, [7, 8]),
    ),
    "SequenceBiasLogitsProcessor": (Extras(bias=BIAS), ([[[i], v] for i, v in BIAS],)),
}


@needs_transformers
@pytest.mark.parametrize("name", COMPARED)
def test_rows_equal_transformers_processors(name: str) -> None:
    extras, args = COMPARED[name]
    processor = transformers_processor(name, *args)
    for seed in range(5):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        wanted = processor(torch.tensor([TOKENS]), logits[None].clone())[0]
        assert not torch.equal(wanted, logits)
        assert torch.equal(processed_by(SlotExtras(extras, 4, TOKENS), logits), wanted)


@needs_transformers
def test_end_tokens_may_come_when_there_are_enough() -> None:
    processor = transformers_processor(
        "MinNewTokensLengthLogitsProcessor", 4, len(TOKENS) - 4, [7, 8]
    )
    logits = torch.zeros(VOCAB)
    wanted = processor(torch.tensor([TOKENS]), logits[None])[0]
    extras = Extras(min_total=len(TOKENS), stop_ids=(7, 8))
    assert torch.equal(processed_by(SlotExtras(extras, 4, TOKENS), logits), wanted)
    assert torch.equal(wanted, logits)


# --- tables -----------------------------------------------------------------------------------


def snapshot(tables: ExtrasTables) -> dict[str, Tensor]:
    return {
        name: value.cpu().clone()
        for name, value in vars(tables).items()
        if isinstance(value, Tensor) and not name.startswith("_") and name != "addresses"
    }


def assert_tables_equal(got: ExtrasTables, wanted: ExtrasTables) -> None:
    wanted_tables = snapshot(wanted)
    for name, table in snapshot(got).items():
        assert torch.equal(table, wanted_tables[name]), name


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_sampled_tokens_leave_the_tables_that_a_new_admission_would(seed: int, window: int) -> None:
    rng = random.Random(seed)
    asked = [random_slot(rng, VOCAB) for _ in range(5)]
    tables, wanted = (ExtrasTables(5, VOCAB, 100, CPU) for _ in range(2))
    for slot, each in enumerate(asked):
        tables.admit(slot, each)
    slots = torch.tensor([4, 0, 5, 2, 5, 1])  # 5: the null slot; 3 has no row
    tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(window)] for _ in slots])
    counts = torch.tensor([rng.randint(0, window) for _ in slots])
    positions = torch.tensor([len(asked[s].tokens) if s < 5 else 3 for s in slots.tolist()])
    advance(tables, slots, tokens, counts, positions)
    for slot, new, count in zip(slots.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        if slot < 5:
            asked[slot] = asked[slot]._replace(tokens=(*asked[slot].tokens, *new[:count]))
    for slot, each in enumerate(asked):
        # What was admitted without asking for anything is not told of its tokens.
        wanted.admit(slot, each if features_of(each.extras) else each._replace(tokens=()))
        if not features_of(each.extras):
            tables.admit(slot, each._replace(tokens=()))
    assert_tables_equal(tables, wanted)


def test_an_admission_replaces_what_the_slot_held() -> None:
    rng = random.Random(1)
    tables = ExtrasTables(2, VOCAB, 100, CPU)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    for _ in range(30):
        slot = random_slot(rng, VOCAB)
        tables.admit(0, slot)
        at = torch.tensor([0]), torch.tensor([len(slot.tokens)]), torch.tensor([1.0])
        got = process_logits(logits[None], tables, *at)[0]
        np.testing.assert_array_equal(got, processed_by(slot, logits))


def test_a_full_slot_is_taken_whole() -> None:
    vocab_size = 3000
    words = tuple((1,) * 15 + (1000 + i,) for i in range(MAX_BAD_WORDS))
    bias = tuple((i, 1.0 + i) for i in range(MAX_LOGIT_BIASES))
    slot = SlotExtras(Extras(bias=bias, bad_words=words), 20, (1,) * 20)
    got = processed_by(slot, torch.zeros(vocab_size))
    assert got[: MAX_LOGIT_BIASES - 24].tolist() == [1.0 + i for i in range(1000)]
    assert (got[1000 : 1000 + MAX_BAD_WORDS] == -torch.inf).all()
    assert not got[1000 + MAX_BAD_WORDS :].any()


def test_counts_tell_the_prompt_from_the_output() -> None:
    tables = ExtrasTables(1, VOCAB, 100, CPU)
    tables.admit(0, SlotExtras(Extras(presence_penalty=1.0), 3, (5, 6, 5, 6, 6, 7)))
    assert tables.counts[0, 5:9].tolist() == [IN_PROMPT, IN_PROMPT + 2, 1, 0]
    assert tables.recent[0].tolist() == [5, 6, 5, 6, 6, 7] + [-1] * (RECENT - 6)


def test_a_cleared_slot_asks_for_nothing() -> None:
    case = Asking(4, VOCAB, 11)
    tables = case.tables()
    for slot in range(4):
        tables.clear(slot)
    assert torch.equal(case.processed(tables, case.logits), case.logits)
    tables.reset()
    assert_tables_equal(tables, ExtrasTables(4, VOCAB, 4096, CPU))


def test_the_memory_of_the_tables_is_known() -> None:
    small, large = (ExtrasTables(slots, VOCAB, 100, CPU).memory_bytes for slots in (3, 7))
    assert (
        large
        == 2 * small
        == sum(t.nbytes for t in snapshot(ExtrasTables(7, VOCAB, 9, CPU)).values())
    )


@on_gpu
def test_an_admission_does_not_synchronise(device: torch.device) -> None:
    rng = random.Random(0)
    tables, wanted = (ExtrasTables(8, VOCAB, 100, on) for on in (device, CPU))
    asked = [random_slot(rng, VOCAB) for _ in range(8)]
    long = tuple(rng.randrange(VOCAB) for _ in range(2 * STAGED_TOKENS))
    asked[3] = SlotExtras(Extras(repetition_penalty=2.0), 4000, long)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot, each in enumerate(asked):
            tables.admit(slot, each)
        tables.clear(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slot, each in enumerate(asked):
        wanted.admit(slot, each)
    wanted.clear(2)
    assert_tables_equal(tables, wanted)


def test_a_window_of_many_tokens_is_noted_like_one_after_the_other() -> None:
    slot = SlotExtras(Extras(bad_words=((1, 2),), frequency_penalty=0.1), 1, (5, 6))
    at_once, singly = (ExtrasTables(1, VOCAB, 100, CPU) for _ in range(2))
    tokens = torch.arange(20, 20 + 2 * RECENT)[None]
    count, slots = RECENT + 3, torch.zeros(1, dtype=torch.int64)
    for tables in (at_once, singly):
        tables.admit(0, slot)
    advance(at_once, slots, tokens, torch.tensor([count]), torch.tensor([2]))
    for place in range(count):
        one = tokens[:, place : place + 1]
        advance(singly, slots, one, torch.tensor([1]), torch.tensor([2 + place]))
    assert_tables_equal(at_once, singly)
