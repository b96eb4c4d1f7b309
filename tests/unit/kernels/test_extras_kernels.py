"""The kernels of an extended S against the torch code, bit for bit.

On a GPU they are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.kernels.pdl import uses_pdl
from megatron_async.kernels.sampling import process_logits as kernels
from megatron_async.kernels.sampling.automata import Guides, force_drafts_gpu
from megatron_async.kernels.sampling.step_kernels import StepKernels
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.memory.slot_state import SlotState
from megatron_async.sampling.automata import FORCED, advance_states, force_drafts, masks_at
from megatron_async.sampling.log_probs import pack, processed_log_probs, token_log_probs
from megatron_async.sampling.process_logits import advance, process_logits
from megatron_async.sampling.sample import SampleInputs, sample_tokens_reference
from megatron_async.step import packet
from megatron_async.step.extras import (
    LOG_PROB_WORDS,
    NO_LOG_PROBS,
    PROCESSED_LOG_PROBS,
    RAW_LOG_PROBS,
    features_of,
)
from megatron_async.step.records import FAILED, RECORD_HEAD
from megatron_async.step.slot_fields import SLOT_FIELDS
from tests.support.interpreter import compiled, interpreted, on_devices
from tests.support.random_automata import give_automata
from tests.unit.sampling.test_process_logits import Asking, snapshot, with_failures

MODES = (NO_LOG_PROBS, RAW_LOG_PROBS, PROCESSED_LOG_PROBS)
RECORD = RECORD_HEAD + 1
ENTRIES, MASK_ENTRIES = 3, 2
BEGUN = 4
STEPS = 2
SMALL_BLOCK = 64
"""Tiles of the interpreter's small vocabularies."""


class Case:
    """Random slots that ask for something and rows of them, some without a slot, with logits of a
    few steps, some of them with NaN, infinities and zeros of both signs."""

    def __init__(self, rows: int, vocab_size: int, seed: int, dtype: torch.dtype) -> None:
        asking = self.asking = Asking(rows, vocab_size, seed, MODES)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rows, self.vocab_size = rows, vocab_size
        state = self.state = SlotState(
            rows, {"max_blocks_per_request": 1, "num_drafts": 0}, torch.device("cpu")
        )

        def drawn(choices: tuple[float, ...], field: Tensor) -> None:
            field[:-1] = torch.tensor([rng.choice(choices) for _ in range(rows)], dtype=field.dtype)

        state.kv_length[:] = asking.lengths
        drawn((0.0, 1.0, 1.6), state.inverse_temperature)
        drawn((0, 0, 3, 30), state.top_k)
        drawn((0.0, 0.0, 0.4, 0.95), state.top_p)
        drawn((0, 0, 0, 1), state.finished)
        drawn((25, 1000), state.max_total)
        state.seed[:-1] = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
        state.stop_ids[:-1, 0] = torch.randint(vocab_size, (rows,), generator=generator)
        self.records = torch.zeros(rows, packet.ROW_WIDTH, dtype=torch.int32)
        self.records[:, packet.ROW_SLOT] = asking.slots
        self.records[:, packet.ROW_SAMPLES] = (torch.rand(rows, generator=generator) < 0.9).int()
        self.logits = []
        for step in range(STEPS):
            logits = torch.randn(rows, vocab_size, generator=generator) * (3, 20)[step % 2]
            # A large logit for some, so that one tile has most of a row's likely ids.
            logits[::2, : vocab_size // 8] += 15
            marked = [(step + i) % rows for i in range(4)]
            if rows > 4:
                with_failures(logits, marked[:3])
                logits[marked[3], step % vocab_size] = torch.inf
                logits[marked[3], 3::4] = -0.0
            self.logits.append(logits.to(dtype))
        self.masks = [asking.masks.roll(step, 0) for step in range(STEPS)]
        self.masked = [asking.masked.roll(step, 0) for step in range(STEPS)]

    def state_on(self, device: torch.device) -> SlotState:
        state = SlotState(self.rows, {"max_blocks_per_request": 1, "num_drafts": 0}, device)
        for field in SLOT_FIELDS:
            state.tensor(field).copy_(self.state.tensor(field))
        return state


class Rig:
    """Step kernels with rings of their own; more rows than the case has, so that none is full."""

    def __init__(
        self,
        case: Case,
        device: torch.device,
        pdl: bool,
        *,
        extended: bool,
        automata: int | None = None,
    ) -> None:
        self.case, self.device = case, device
        on_gpu, most = device.type == "cuda", case.rows + 2
        width = (RECORD + LOG_PROB_WORDS) * most + 5

        def ring(*shape: int) -> Tensor:
            return torch.full(shape, -7, dtype=torch.int32, pin_memory=on_gpu)

        self.results: Any = SimpleNamespace(
            ring=ring(ENTRIES, width),
            sequence=torch.full((1,), BEGUN, dtype=torch.int32, pin_memory=on_gpu),
            counter=torch.full((1,), BEGUN, dtype=torch.int64, device=device),
        )
        self.masks = SimpleNamespace(
            masks=ring(MASK_ENTRIES, most, case.asking.masks.shape[1]),
            masked=ring(MASK_ENTRIES, most),
        )
        records = torch.zeros(most, packet.ROW_WIDTH, dtype=torch.int32, device=device)
        records[: case.rows] = case.records.to(device)
        self.state = case.state_on(device)
        self.tables = case.asking.tables(device)
        if automata is not None:
            give_automata(self.tables, automata)
        self.kernels = StepKernels(
            records,
            self.state,
            4,
            self.results,
            self.results,
            *((self.tables, self.masks) if extended else ()),
        )
        self.kernels._pdl = pdl

    def step(self, number: int, sample: Callable[[Tensor], None], logits: Tensor) -> Tensor:
        """The words of the step's entry in the ring of results."""
        rows, entry = self.case.rows, (BEGUN + number) % MASK_ENTRIES
        self.masks.masks[entry, :rows] = self.case.masks[number]
        self.masks.masked[entry, :rows] = self.case.masked[number].int()
        sample(logits.to(self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        assert int(self.results.sequence) == int(self.results.counter) == BEGUN + 1 + number
        words = self.results.ring[(BEGUN + number) % ENTRIES].clone()
        self.state.kv_length += (~self.state.finished).long()
        return words

    def fields(self) -> dict[str, Tensor]:
        return {f.name: self.state.tensor(f).cpu() for f in SLOT_FIELDS}


def log_prob_words(
    tables: ExtrasTables, slots: Tensor, logits: Tensor, processed: Tensor, parameters: Any,
    tokens: Tensor,
) -> Tensor:  # fmt: skip
    """What the rows' modes ask for, int32 [LOG_PROB_WORDS, R]."""
    mode = tables.log_probs[slots]
    raw = pack(*token_log_probs(logits, tokens))
    of_processed = pack(*processed_log_probs(processed, *parameters[:3], tokens))
    words = torch.where(mode == PROCESSED_LOG_PROBS, of_processed, raw)
    return torch.where(mode == NO_LOG_PROBS, 0, words)


def assert_steps_equal(
    case: Case, device: torch.device, pdl: bool = False, automata: int | None = None
) -> Counter[str]:
    """Each step's record is what the plain S gives for processed logits; and what was seen.
    ``automata`` is the seed of those that guide some slots."""
    seen: Counter[str] = Counter()
    rig = Rig(case, device, pdl, extended=True, automata=automata)
    plain = Rig(case, device, pdl, extended=False)
    tables, state, slots = (
        case.asking.tables(),
        case.state_on(torch.device("cpu")),
        case.asking.slots,
    )
    if automata is not None:
        give_automata(tables, automata)
    rows = case.rows
    for number, logits in enumerate(case.logits):
        for field in SLOT_FIELDS:
            state.tensor(field).copy_(plain.state.tensor(field))
        names = ("inverse_temperature", "top_k", "top_p", "seed", "kv_length")
        parameters = [getattr(state, name)[slots] for name in names]
        positions = parameters[-1]
        masks, masked = case.masks[number], case.masked[number]
        if tables.automata is not None:
            states, stops = tables.automaton[slots].long(), tables.stops[slots]
            of_states = masks_at(tables.automata, states.clamp(min=0), stops)
            masks = torch.where((states >= 0)[:, None], of_states, masks)
            masked = masked | (states >= 0)
            seen["guided by automata"] += int((states > 0).sum())
        processed = process_logits(logits, tables, slots, positions, parameters[0], masks, masked)
        tokens = sample_tokens_reference(processed, SampleInputs(*parameters))
        live = (case.records[:, packet.ROW_SAMPLES] != 0) & ~state.finished[slots]
        wanted = plain.step(number, plain.kernels.sample, processed)
        got = rig.step(number, rig.kernels.sample_extended, logits)
        assert torch.equal(got[: RECORD * rows], wanted[: RECORD * rows]), number
        assert torch.equal(got[2 * rows : 3 * rows].long(), tokens)
        end = (RECORD + LOG_PROB_WORDS) * rows
        words = log_prob_words(tables, slots, logits, processed, parameters, tokens)
        differing = (got[RECORD * rows : end].view(-1, rows) != words).nonzero()
        assert not len(differing), (number, differing.tolist()[:8])
        assert (got[end:] == -7).all()
        advance(tables, slots, tokens[:, None], (live & (tokens >= 0)).long(), positions)
        if tables.automata is not None:
            target = torch.where(live, slots, case.rows)
            none = torch.zeros_like(target)
            advance_states(
                tables.automata, tables.automaton, target, tokens[:, None], none, tables.stops
            )
        expected = snapshot(tables)
        for name, table in snapshot(rig.tables).items():
            assert torch.equal(table, expected[name]), (number, name)
        for name, field in rig.fields().items():
            assert torch.equal(field, plain.fields()[name]), (number, name)
        features = tables.features[slots]
        seen["changed"] += int((processed != logits.float()).any(1).sum())
        seen["failed"] += int((wanted[rows : 2 * rows] == FAILED).sum())
        seen["listed"] += int((words[1:21] > 0).sum())
        seen["not listed"] += int((words[1:21] == -1).sum())
        seen["asks for nothing"] += int((features == 0).sum())
        seen["counted"] += int((live & (features != 0)).sum())
    return seen


SMALL = [(1, 61), (3, 1), (7, 22 * SMALL_BLOCK + 3), (28, 64)]
LARGE = [(1, 151_936), (12, 128_256), (64, 32_000), (9, 1), (200, 261)]


@interpreted
@torch.inference_mode()
@pytest.mark.parametrize(("rows", "vocab_size"), SMALL)
def test_steps_equal_the_torch_code(
    rows: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(kernels, "ROW_BLOCK", 512)
    seen = assert_steps_equal(Case(rows, vocab_size, rows, torch.float32), torch.device("cpu"))
    if rows > 3:
        assert all(seen.values()), seen


@on_devices
@torch.inference_mode()
def test_steps_that_automata_guide_equal_the_torch_code(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(kernels, "ROW_BLOCK", 512)
    case = Case(6, 70, 3, torch.float32)
    seen = assert_steps_equal(case, torch.device(device), automata=3)
    assert seen["guided by automata"] > 5


@on_devices
def test_forced_drafts_equal_the_torch_code(device: str) -> None:
    tables = give_automata(Case(20, 150, 3, torch.float32).asking.tables(torch.device(device)), 3)
    assert tables.addresses is not None and tables.automata is not None
    for count in (1, 3, FORCED, 11):
        drafts = torch.arange(21 * count, device=device).view(21, count) + 1000
        wanted = drafts.clone()
        force_drafts(tables.automata, tables.automaton, wanted)
        force_drafts_gpu(Guides(tables.automaton, tables.stops, tables.addresses), drafts)
        assert torch.equal(drafts, wanted) and (drafts < 1000).any() and (drafts >= 1000).any()


@pytest.mark.parametrize("pdl", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(("rows", "vocab_size"), LARGE)
@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=compiled)])
@torch.inference_mode()
def test_compiled_steps_equal_the_torch_code(
    rows: int, vocab_size: int, dtype: torch.dtype, pdl: bool, device: torch.device
) -> None:
    if pdl and not uses_pdl(device):
        pytest.skip("programmatic dependent launch needs Hopper")
    for seed in range(2):
        assert_steps_equal(Case(rows, vocab_size, seed, dtype), device, pdl)
    assert_steps_equal(Case(rows, vocab_size, 2, dtype), device, pdl, automata=rows)


@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=compiled)])
@torch.inference_mode()
def test_a_captured_step_equals_the_torch_code(device: torch.device) -> None:
    """Replays take the state, tables and masks that are there."""
    case = Case(12, 5000, 5, torch.bfloat16)
    eager, rig = (Rig(case, device, uses_pdl(device), extended=True) for _ in range(2))
    logits = case.logits[0].to(device)
    warm = Rig(case, device, uses_pdl(device), extended=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm.kernels.sample_extended(logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.kernels.sample_extended(logits)
    for number in range(STEPS):
        wanted = eager.step(number, eager.kernels.sample_extended, case.logits[number])
        logits.copy_(case.logits[number])
        got = rig.step(number, lambda _: graph.replay(), logits)
        assert torch.equal(got, wanted)


@interpreted
@torch.inference_mode()
def test_rows_without_extras_are_those_of_the_plain_step() -> None:
    case = Case(6, 150, 2, torch.bfloat16)
    case.asking.asked = [
        slot._replace(extras=type(slot.extras)()) if number % 2 else slot
        for number, slot in enumerate(case.asking.asked)
    ]
    cpu = torch.device("cpu")
    rig, plain = (Rig(case, cpu, False, extended=extended) for extended in (True, False))
    got = rig.step(0, rig.kernels.sample_extended, case.logits[0])
    wanted = plain.step(0, plain.kernels.sample, case.logits[0])
    asks = torch.tensor([features_of(s.extras) != 0 for s in case.asking.asked] + [False])
    is_plain = ~asks[case.asking.slots]
    assert is_plain.any() and not is_plain.all()
    records = [words[: RECORD * 6].view(RECORD, 6)[:, is_plain] for words in (got, wanted)]
    assert torch.equal(*records)


@interpreted
def test_an_entry_without_room_for_log_probabilities_is_refused() -> None:
    case = Case(2, 61, 0, torch.float32)
    rig = Rig(case, torch.device("cpu"), False, extended=True)
    rig.results.ring = rig.results.ring[:, : RECORD * 4]
    with pytest.raises(ValueError, match="extended records of 2 rows"):
        StepKernels(case.records, rig.state, 4, rig.results, rig.results, rig.tables)


@interpreted
def test_the_memory_of_an_extended_step_is_known() -> None:
    case = Case(2, 61, 0, torch.float32)
    rig = Rig(case, torch.device("cpu"), False, extended=True)
    # Four rows of one tile: logits up to a multiple of 32, and what rows and tiles leave.
    of_row = 64 * 4 + (3 * 4 + 8) + (2 * 4 + 8 + 20 * 8)
    assert rig.kernels.extended_bytes == 4 * of_row


@interpreted
def test_an_extended_step_needs_tables() -> None:
    case = Case(2, 61, 0, torch.float32)
    rig = Rig(case, torch.device("cpu"), False, extended=False)
    assert rig.kernels.extended_bytes == 0
    with pytest.raises(ValueError, match="no tables of extras"):
        rig.kernels.sample_extended(case.logits[0])


@interpreted
def test_logits_of_another_vocabulary_are_refused() -> None:
    case = Case(2, 61, 0, torch.float32)
    rig = Rig(case, torch.device("cpu"), False, extended=True)
    with pytest.raises(ValueError, match="tables of 61 token ids, logits of 60"):
        rig.kernels.sample_extended(case.logits[0][:, :60])
