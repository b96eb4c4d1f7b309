"""The kernels of a decode step with drafts against the step program's torch code, bit for bit.

On a GPU they are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU, inside the
engine too.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.engine.metrics import GuidedRow
from megatron_async.kernels.pdl import uses_pdl
from megatron_async.kernels.sampling import process_logits as logits_kernels
from megatron_async.kernels.sampling import window_state
from megatron_async.kernels.sampling.step_kernels import StepKernels
from megatron_async.runner.drafter import SampledRows
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.masks import MaskRing
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.sampling_stage import SamplingExtras
from megatron_async.sampling.process_logits import RECENT
from megatron_async.step import packet
from megatron_async.step.extras import (
    FEATURE_BAD_WORDS,
    FEATURE_GUIDED,
    FEATURE_PENALTIES,
    NO_LOG_PROBS,
    PROCESSED_LOG_PROBS,
    RAW_LOG_PROBS,
)
from megatron_async.step.packet import PacketLayout
from megatron_async.step.plan import SampleShape
from megatron_async.step.records import ENDED, FAILED, record_width
from megatron_async.step.slot_fields import SLOT_FIELDS
from tests.support.batches import new_batch
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import hash_engine, random_ask, sampling_params
from tests.support.guided_automata import ROOM
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.interpreter import compiled, interpreted, on_devices
from tests.support.oracle import decode_alone
from tests.support.random_automata import give_automata
from tests.support.step_programs import ReferenceProgram, kernel_ring
from tests.unit.kernels.test_step_state import InterpretedDevice
from tests.unit.sampling.test_process_logits import Asking, random_masks, snapshot

BLOCK_SIZE, COLUMNS = 4, 20
ENTRIES, BEGUN = 3, 4
WIDE = (1, 18, 61, 31)
"""Rows, window, vocabulary and seed: more tokens count than are kept for bad words."""
WORDS = tuple((a, b) for a in range(61) for b in range(a % 3, 61, 16))[:200]
MODES = (NO_LOG_PROBS, RAW_LOG_PROBS, PROCESSED_LOG_PROBS)


class Case:
    """Random slots at the end of a forward, with logits of a few steps in which a drafter mostly
    guesses right; a NaN in some, lengths and stop ids that end windows anywhere, dead rows and
    padding. With ``extended`` slots ask for something."""

    def __init__(
        self,
        rows: int,
        window: int,
        vocab_size: int,
        seed: int,
        *,
        extended: bool,
        steps: int = 3,
        most: int | None = None,
        synthetic_acceptance: float | None = None,
        automata: bool = False,
    ) -> None:
        self.automata, self.seed = automata, seed
        self.most = most or window
        self.synthetic_acceptance = synthetic_acceptance
        self.rows, self.window, self.vocab_size, self.extended = rows, window, vocab_size, extended
        self.steps = steps
        rng = self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.layout = PacketLayout(rows + 1, 8, 4, rows, self.most)
        self.asking = Asking(rows, vocab_size, seed, MODES)
        self.context = self.empty_context("cpu")
        state, count = self.context.slots, rows

        def numbers(field: Tensor, low: int, high: int) -> None:
            field[:count] = torch.randint(low, high, field[:count].shape, generator=generator)

        def drawn(choices: tuple[float, ...], field: Tensor) -> None:
            values = [rng.choice(choices) for _ in range(count)]
            field[:count] = torch.tensor(values, dtype=field.dtype)

        numbers(state.last_token, 0, vocab_size)
        numbers(state.block_table, 1, self.context.cache.sizes.block_count + 1)
        numbers(state.seed, -(2**62), 2**62)
        state.kv_length[:] = self.asking.lengths
        drawn((0, 0, 0, 0, 1), state.finished)
        drawn((0.0, 1.0, 1.6), state.inverse_temperature)
        # Filters take the interpreter long, and have tests of their own.
        state.top_k[0], state.top_p[-2] = 30, 0.95
        numbers(state.max_total, 1, 3 * window)
        state.max_total[:count] += state.kv_length[:count]
        likely = [
            torch.randint(vocab_size, (rows + 1, self.most), generator=generator)
            for _ in range(steps)
        ]
        # One of what is likely is a stop id of some.
        for slot in range(4, count, 4):
            state.stop_ids[slot, 3] = likely[0][slot, slot // 4 % window]
        self.drafts = []
        for tokens in likely:
            wrong = torch.rand(rows + 1, self.most - 1, generator=generator) < 0.3
            wrong[::2] = False
            self.drafts.append(torch.where(wrong, 0, tokens[:, :-1]))
        state.drafts[:] = self.drafts[0]
        for slot in range(2, count, 4):
            self.ban(slot, int(self.drafts[0][slot, 0]), int(likely[0][slot, 1]))
        self.packets = [self.packet() for _ in range(steps)]
        slots = [p[: rows * packet.ROW_WIDTH].reshape(rows, -1)[:, 0] for p in self.packets]
        self.logits = []
        for step, tokens in enumerate(likely):
            of_rows = torch.from_numpy(slots[step - 1].astype(np.int64))
            logits = torch.randn(rows * window, vocab_size, generator=generator) * 3
            wanted = tokens[of_rows, :window].flatten()[:, None]
            # So likely that noise hardly matters, or not.
            boost = torch.where(of_rows % 2 == 0, 40.0, 9.0).repeat_interleave(window)
            logits.scatter_add_(1, wanted, boost[:, None])
            fails = torch.rand(len(logits), generator=generator) < 0.5 / window
            logits[fails, rng.randrange(vocab_size)] = torch.nan
            self.logits.append(logits)
        first = torch.from_numpy(self.packets[-1][: rows * packet.ROW_WIDTH].copy())
        self.records = first.view(rows, -1)
        self.masks = [random_masks(rows * window, vocab_size, generator) for _ in range(steps)]

    def ban(self, slot: int, draft: int, token: int) -> None:
        """If the slot has bad words: ``token``, if it comes behind ``draft``."""
        asked = self.asking.asked[slot]
        words = asked.extras.bad_words
        if words:
            words = (*words, (*asked.tokens[-3:], draft, token))
            extras = asked.extras._replace(bad_words=words)
            self.asking.asked[slot] = asked._replace(extras=extras)

    def empty_context(self, device: str) -> ForwardBatch:
        return new_batch(
            params_dtype=torch.float32,
            num_layers=1,
            kv_channels=1,
            num_attention_heads=1,
            max_sequence_length=BLOCK_SIZE * COLUMNS,
            max_requests=self.rows,
            slot_count=self.rows,
            block_size_tokens=BLOCK_SIZE,
            block_count=99,
            num_speculative_tokens=self.most - 1,
            device=device,
        )

    def packet(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Row records of all slots, some of which sample fewer tokens or none, and padding; block
        assignments where slots of other rows write next."""
        rng, count = self.random, self.rows - self.rows // 6
        words = np.full(self.layout.width, 12345, dtype=np.int32)
        records = words[: self.rows * packet.ROW_WIDTH].reshape(self.rows, -1)
        records[:, [packet.ROW_SLOT, packet.ROW_ASSIGNED_SLOT]] = self.context.null_slot
        records[:, [packet.ROW_SAMPLES, packet.ROW_ASSIGNED_COLUMN]] = 0
        records[:, packet.ROW_ASSIGNED_BLOCK] = 0
        slots = rng.sample(range(self.rows), count)
        records[:count, packet.ROW_SLOT] = slots
        samples = [0, *range(1, self.window), *[self.window] * 9]
        records[:count, packet.ROW_SAMPLES] = [rng.choice(samples) for _ in slots]
        for row, slot in enumerate(rng.sample(slots, count // 2)):
            column = (int(self.context.kv_length[slot]) + self.window) // BLOCK_SIZE
            records[row, packet.ROW_ASSIGNED_SLOT : packet.ROW_ASSIGNED_BLOCK + 1] = (
                slot, column, rng.randint(1, self.context.cache.sizes.block_count),
            )  # fmt: skip
        return words

    def context_on(self, device: str) -> ForwardBatch:
        context = self.empty_context(device)
        for field in SLOT_FIELDS:
            context.slots.tensor(field).copy_(self.context.slots.tensor(field))
        return context

    def tables(self, device: torch.device) -> ExtrasTables:
        tables = self.asking.tables(device)
        return give_automata(tables, self.seed) if self.automata else tables

    def fill_masks(self, ring: MaskRing, number: int, step: int) -> None:
        claimed = ring.claim(number, self.rows * self.window)
        for words, given in zip(claimed, self.masks[step], strict=True):
            words[:] = given.numpy()


class Guesses:
    """A drafter that knows the case, and notes what it is told."""

    wants_tokens = False

    def __init__(self, case: Case) -> None:
        self.case = case
        self.step = 0
        self.told: dict[str, Tensor] = {}

    def hidden_states(self, count: int) -> None:
        assert count == self.case.rows * self.case.window

    def draft(self, rows: SampledRows, count: int) -> Tensor:
        self.told = {f"sampled {name}": t.cpu().clone() for name, t in rows._asdict().items()}
        self.step += 1
        return self.case.drafts[self.step % self.case.steps].to(rows.slots.device)[rows.slots]


def state_of(context: ForwardBatch) -> dict[str, Tensor]:
    """Copies on the CPU. Of the null slot the last token and the drafts are anything."""
    state = {f.name: context.slots.tensor(f).cpu().clone() for f in SLOT_FIELDS}
    for name in ("last_token", "drafts"):
        state[name][context.null_slot] = 0
    return state


def reference_steps(case: Case) -> list[dict[str, Tensor]]:
    """S, H2D and the head of F, several times, by the step program's torch code."""
    context, guesses = case.context_on("cpu"), Guesses(case)
    snapshots: list[dict[str, Tensor]] = []
    extras = None
    if case.extended:
        positions = (case.rows + 1) * case.most
        masks = MaskRing(ENTRIES, positions, case.vocab_size, torch.device("cpu"))
        extras = SamplingExtras(case.tables(torch.device("cpu")), masks)
    reference = ReferenceProgram(
        context, case.layout, case.records, case.packets, case.logits, extras, guesses,
        case.synthetic_acceptance,
    )  # fmt: skip
    program = reference.program
    for step in range(case.steps):
        if extras is not None:
            case.fill_masks(extras.masks, step, step)
        program.sample(SampleShape(case.rows, case.window, case.most - 1, case.extended))
        program.load_decode(case.rows, case.window)
        program.forward_decode(case.rows, case.window)
        found = {**reference.batches[-1], **state_of(context), **guesses.told}
        found["records"] = reference.records.clone()
        found["result"] = reference.published[-1]
        if extras is not None:
            found.update(snapshot(extras.tables))
        snapshots.append(found)
    return snapshots


def kernel_steps(case: Case, device: str, pdl: bool) -> list[dict[str, Tensor]]:
    """The same by the kernels."""
    context, guesses = case.context_on(device), Guesses(case)
    on_gpu, on, rows = device == "cuda", torch.device(device), case.rows

    most = case.layout.max_rows
    fields = record_width(case.window, extended=case.extended)
    entry = record_width(case.most, extended=case.extended) * most
    packets = kernel_ring(ENTRIES, case.layout.width, BEGUN, device)
    results = kernel_ring(ENTRIES, entry, BEGUN, device)
    records = torch.zeros(most, packet.ROW_WIDTH, dtype=torch.int32, device=device)
    records[:rows] = case.records.to(device)
    tables, masks = None, MaskRing(ENTRIES, most * case.most, case.vocab_size, on)
    if case.extended:
        tables = case.tables(on)
    kernels = StepKernels(
        records, context.slots, BLOCK_SIZE, packets, results, tables, masks, window=case.most,
        synthetic_acceptance=case.synthetic_acceptance,
    )  # fmt: skip
    kernels._pdl = pdl
    snapshots = []
    for step in range(case.steps):
        number = BEGUN + step
        packets.ring[number % ENTRIES] = torch.from_numpy(case.packets[step])
        case.fill_masks(masks, number, step)
        sample = kernels.sample_extended if case.extended else kernels.sample
        sample(case.logits[step].to(device), window=case.window)
        sampled = SampledRows(*kernels.sampled(rows, case.window))
        context.slots.drafts[sampled.slots] = guesses.draft(sampled, case.most - 1)
        kernels.begin(rows, case.window)
        if on_gpu:
            torch.cuda.synchronize()
        assert int(results.sequence) == int(results.counter) == int(packets.counter) == number + 1
        assert torch.all(results.ring[number % ENTRIES, fields * rows :] == -7)
        found = {**state_of(context), **guesses.told, "records": records[:rows].cpu().clone()}
        found["result"] = results.ring[number % ENTRIES, : fields * rows].clone()
        batch = kernels.batch(rows, case.window)._asdict()
        found.update((name, t.cpu().clone()) for name, t in batch.items())
        if tables is not None:
            found.update(snapshot(tables))
        snapshots.append(found)
    return snapshots


def assert_steps_equal(case: Case, device: str, pdl: bool = False) -> list[dict[str, Tensor]]:
    steps, expected = kernel_steps(case, device, pdl), reference_steps(case)
    for step, (got, wanted) in enumerate(zip(steps, expected, strict=True)):
        assert got.keys() == wanted.keys()
        # The tokens of padding are the null slot's, which are anything.
        rows = wanted["records"][:, packet.ROW_SLOT].repeat_interleave(case.window)
        for found in (got, wanted):
            found["token_ids"] = found["token_ids"].masked_fill(rows == case.context.null_slot, 0)
        for name, value in wanted.items():
            assert torch.equal(got[name].to(value.dtype), value), (step, name)
    return expected


@on_devices
@torch.inference_mode()
@pytest.mark.parametrize(
    ("rows", "window", "most", "vocab_size"),
    [(1, 4, 4, 61), (5, 2, 2, 40), (3, 5, 5, 5), (4, 1, 3, 40), (5, 3, 5, 40)],
)
def test_steps_with_drafts_equal_the_torch_code(
    rows: int,
    window: int,
    most: int,
    vocab_size: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_state, "MAX_TOKENS_AT_ONCE", 16)
    for seed in range(4) if device == "cuda" else [window]:
        case = Case(rows, window, vocab_size, seed, extended=False, most=most)
        assert_steps_equal(case, device)


@on_devices
@torch.inference_mode()
@pytest.mark.parametrize(
    ("rows", "window", "vocab_size", "seed", "most"), [(5, 3, 70, 585, 4), (*WIDE, WIDE[1])]
)
def test_extended_steps_with_drafts_equal_the_torch_code(
    rows: int,
    window: int,
    vocab_size: int,
    seed: int,
    most: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logits_kernels, "BLOCK", 64)
    monkeypatch.setattr(logits_kernels, "ROW_BLOCK", 64)
    steps = 1 if window > RECENT else 2
    case = Case(rows, window, vocab_size, seed, extended=True, steps=steps, most=most)
    assert_steps_equal(case, device)


@on_devices
@torch.inference_mode()
@pytest.mark.parametrize(("rows", "window", "vocab_size", "seed", "most"), [(6, 3, 40, 16, 4)])
def test_windows_that_automata_guide_equal_the_torch_code(
    rows: int,
    window: int,
    vocab_size: int,
    seed: int,
    most: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logits_kernels, "BLOCK", 64)
    monkeypatch.setattr(logits_kernels, "ROW_BLOCK", 64)
    case = Case(rows, window, vocab_size, seed, extended=True, steps=1, most=most, automata=True)
    steps = assert_steps_equal(case, device)
    states = [case.tables(torch.device("cpu")).automaton, *(step["automaton"] for step in steps)]
    moved = sum(int((b != a).sum()) for a, b in itertools.pairwise(states))
    accepted = sum(int(((step["sampled last"] > 0) & (states[0][step["sampled slots"]] > 0)).sum())
                   for step in steps)  # fmt: skip
    assert moved > rows // 2 and accepted > 0


@on_devices
@torch.inference_mode()
@pytest.mark.parametrize(
    ("rate", "extended"), [(0.0, False), (0.8, False), (1.0, False), (0.8, True)]
)
def test_drafts_accepted_at_a_rate_equal_the_torch_code(
    rate: float, extended: bool, device: str
) -> None:
    case = Case(6, 4, 24, 3, extended=extended, most=5, steps=2, synthetic_acceptance=rate)
    steps = assert_steps_equal(case, device)
    accepted = sum(int(step["sampled last"].sum()) for step in steps)
    assert (accepted == 0) == (rate == 0), accepted


@pytest.mark.parametrize("pdl", (False, True))
@pytest.mark.parametrize("extended", (False, True))
@pytest.mark.parametrize(
    ("rows", "window", "vocab_size"),
    [(1, 2, 151_936), (8, 4, 5000), (32, 3, 32_000), (64, 5, 61), (300, 2, 40), (4, 20, 261)],
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
@torch.inference_mode()
def test_compiled_steps_with_drafts_equal_the_torch_code(
    rows: int, window: int, vocab_size: int, extended: bool, pdl: bool, device: str
) -> None:
    if pdl and not uses_pdl(torch.device(device)):
        pytest.skip("programmatic dependent launch needs Hopper")
    for seed in range(2):
        assert_steps_equal(Case(rows, window, vocab_size, seed, extended=extended), device, pdl)


@torch.inference_mode()
@pytest.mark.parametrize("extended", (False, True))
def test_cases_hold_what_they_are_about(extended: bool) -> None:
    seen: Counter[str] = Counter()
    window = 4
    for seed in range(20):
        case = Case(30, window, 61, seed, extended=extended)
        records = case.records
        features = case.asking.tables().features
        for step in reference_steps(case):
            counts, status, *tokens = step["result"].view(-1, case.rows)[: 2 + window]
            slots, samples = records[:, packet.ROW_SLOT].long(), records[:, packet.ROW_SAMPLES]
            ended = (status == ENDED) & (counts > 0)
            stops = case.context.slots.stop_ids[slots]
            is_stop = (torch.stack(tokens, 1)[:, :, None] == stops[:, None]).any(2)
            for place in range(window):
                there = counts == place + 1
                by_stop = there & ended & is_stop[:, place]
                seen[f"counted {place + 1}"] += int(there.sum())
                seen[f"stop at {place}"] += int(by_stop.sum())
                seen[f"length at {place}"] += int((there & ended & ~is_stop[:, place]).sum())
                seen[f"failed at {place}"] += int(((status == FAILED) & (counts == place)).sum())
                asking = there & (features[slots] & FEATURE_PENALTIES != 0)
                seen[f"penalties at {place}"] += int(asking.sum())
                asking = there & (features[slots] & FEATURE_BAD_WORDS != 0)
                seen[f"bad words at {place}"] += int(asking.sum())
            seen["guided"] += int(((counts == 1) & (features[slots] & FEATURE_GUIDED != 0)).sum())
            seen["one sample"] += int((samples == 1).sum())
            seen["dead or padding"] += int(((counts == 0) & (status == ENDED)).sum())
            seen["beyond"] += int((step["slots"] != slots_of(step, window)).sum())
            records = step["records"]
    assert all(seen.values()) and len(seen) == 28, seen
    wide = Case(*WIDE, extended=True, steps=1)
    assert max(step["result"][0] for step in reference_steps(wide)) > RECENT
    assert wide.asking.tables().features[0] & FEATURE_PENALTIES


def slots_of(step: dict[str, Tensor], window: int) -> Tensor:
    return step["records"][:, packet.ROW_SLOT].repeat_interleave(window)


@interpreted
@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("automata", (0, ROOM))
def test_engine_with_drafts_on_interpreted_kernels_equals_the_oracle(automata: int) -> None:
    """Drafts are the fake model's; one request has extras, and a grammar guides one, on the host or
    on the device."""
    rng = random.Random(1)
    asks = [random_ask(rng, max_prompt=9, max_new=5) for _ in range(3)]
    asks[0] = replace(asks[0], frequency_penalty=0.7, bad_words=WORDS, max_new=5, stop_ids=())
    asks[1] = replace(asks[1], regex="[a-f]{2}x", max_new=4)
    with hash_engine(
        1,
        device=InterpretedDevice(),
        model=DraftingHashModel(1, 0.1),
        tokenizer=hash_tokenizer(),
        max_requests=4,
        block_size_tokens=3,
        block_count=60,
        prefill_chunk_tokens=16,
        guided_automata_bytes=automata,
    ) as engine:
        requests = engine.generate(
            [list(a.prompt) for a in asks], [sampling_params(a) for a in asks]
        )
        assert (engine.counters.guided_rows[GuidedRow.AUTOMATON] > 0) == (automata > 0)
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)
    assert requests[0].counters.accepted > 0
    assert requests[1].counters.drafted > 0


def test_masks_of_a_ticket_whose_number_the_device_knows() -> None:
    ring = MaskRing(3, 2, 61, torch.device("cpu"))
    for number in range(5):
        masks, masked = ring.claim(number, 2)
        masks[:], masked[:] = number, number % 2
    for number in (2, 3, 4):
        copied, entry = ring.copied(torch.tensor([number])), ring.entry(number)
        assert all(torch.equal(*pair) for pair in zip(copied, entry, strict=True))
        assert (copied[0] == number).all()
