"""The kernels around the model in a decode step, against the torch code of the step program.

On a GPU the kernels are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU, inside
the engine too.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.device.cpu import CpuDevice
from megatron_async.device.cuda import CudaPacketRing, CudaResultRing
from megatron_async.kernels.pdl import uses_pdl
from megatron_async.kernels.sampling import sample_triton as sample_kernel
from megatron_async.kernels.sampling import step_state
from megatron_async.kernels.sampling.step_kernels import StepKernels
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.step import packet
from megatron_async.step.packet import PacketLayout
from megatron_async.step.plan import SampleShape
from megatron_async.step.records import ENDED, FAILED, RECORD_HEAD, RUNNING
from megatron_async.step.slot_fields import SLOT_FIELDS
from tests.support.batches import new_batch
from tests.support.engines import hash_engine, random_ask, sampling_params
from tests.support.interpreter import compiled, interpreted, on_devices
from tests.support.oracle import decode_alone
from tests.support.step_programs import ReferenceProgram, kernel_ring
from tests.unit.engine.test_nan_logits import FailsAt, check_failed, failing, others

ENTRIES = 3
BLOCK_SIZE = 4
COLUMNS = 6
STEPS = 4
RECORD_FIELDS = RECORD_HEAD + 1


class Case:
    """A random device state at the end of a forward; ``rows`` rows, a third of them padding, and a
    NaN in the logits of a tenth."""

    def __init__(self, rows: int, vocab_size: int, seed: int) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.random = random.Random(seed)
        self.layout = PacketLayout(rows + 2, 8, 4, 2 * rows)
        rng = self.random
        context = self.context = self.empty_context("cpu")
        state = context.slots
        generator = torch.Generator().manual_seed(seed)
        slots = context.null_slot

        def numbers(field: torch.Tensor, low: int, high: int) -> None:
            field[:slots] = torch.randint(low, high, field[:slots].shape, generator=generator)

        numbers(state.last_token, 0, vocab_size)
        numbers(state.kv_length, 0, BLOCK_SIZE * COLUMNS - STEPS)
        numbers(state.finished, 0, 2)
        numbers(state.block_table, 1, context.cache.sizes.block_count + 1)
        numbers(state.top_k, 0, 9)
        numbers(state.seed, -(2**62), 2**62)
        numbers(state.max_total, 1, BLOCK_SIZE * COLUMNS)
        numbers(state.stop_ids, -1, min(vocab_size, 61))
        for slot in range(slots):
            state.inverse_temperature[slot] = rng.choice((0.0, 1.0, 1.5))
            state.top_p[slot] = rng.choice((0.0, 0.9))
        self.records = torch.from_numpy(self.packet())[: rows * packet.ROW_WIDTH].view(rows, -1)
        self.packets = [self.packet() for _ in range(STEPS)]
        self.logits = [torch.randn(rows, vocab_size, generator=generator) * 3 for _ in range(STEPS)]
        for logits in self.logits:
            fails = torch.rand(rows, generator=generator) < 0.1
            logits[fails, rng.randrange(vocab_size)] = torch.nan

    def empty_context(self, device: str) -> ForwardBatch:
        return new_batch(
            params_dtype=torch.float32,
            num_layers=1,
            kv_channels=1,
            num_attention_heads=1,
            max_sequence_length=BLOCK_SIZE * COLUMNS,
            max_requests=self.rows,
            block_size_tokens=BLOCK_SIZE,
            block_count=500,
            device=device,
        )

    def copied_context(self, device: str) -> ForwardBatch:
        context = self.empty_context(device)
        for field in SLOT_FIELDS:
            context.slots.tensor(field).copy_(self.context.slots.tensor(field))
        return context

    def packet(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Row records of distinct slots, block assignments to slots of any row, padding."""
        rng = self.random
        null_slot = self.context.null_slot
        words = np.full(self.layout.width, 12345, dtype=np.int32)
        records = words[: self.rows * packet.ROW_WIDTH].reshape(self.rows, -1)
        live = self.rows - self.rows // 3
        slots = rng.sample(range(null_slot), live)
        records[:, packet.ROW_SLOT] = null_slot
        records[:live, packet.ROW_SLOT] = slots
        records[:, packet.ROW_SAMPLES] = 0
        records[:live, packet.ROW_SAMPLES] = [rng.random() < 0.9 for _ in slots]
        records[:, packet.ROW_ASSIGNED_SLOT] = null_slot
        records[:, packet.ROW_ASSIGNED_COLUMN : packet.ROW_ASSIGNED_BLOCK + 1] = 0
        for row, slot in enumerate(rng.sample(slots, live // 2)):
            # Where the slot writes next, which is another row's business.
            column = int(self.context.kv_length[slot]) // BLOCK_SIZE
            records[row, packet.ROW_ASSIGNED_SLOT : packet.ROW_ASSIGNED_BLOCK + 1] = (
                slot,
                column,
                rng.randint(1, self.context.cache.sizes.block_count),
            )
        return words


def state_of(context: ForwardBatch) -> dict[str, torch.Tensor]:
    """Copies on the CPU. The reference leaves anything as the null slot's last token."""
    state = {f.name: context.slots.tensor(f).cpu().clone() for f in SLOT_FIELDS}
    state["last_token"][context.null_slot] = 0
    return state


def reference_steps(case: Case) -> list[dict[str, torch.Tensor]]:
    """S, H2D and the head of F, several times, by the step program's torch code."""
    context, snapshots = case.copied_context("cpu"), []
    reference = ReferenceProgram(context, case.layout, case.records, case.packets, case.logits)
    program = reference.program
    for _ in range(STEPS):
        program.sample(SampleShape(case.rows))
        program.load_decode(case.rows)
        program.forward_decode(case.rows)
        found = {**reference.batches[-1], **state_of(context)}
        found["records"] = reference.records.clone()
        found["result"] = reference.published[-1]
        snapshots.append(found)
    return snapshots


def kernel_steps(case: Case, device: str, pdl: bool) -> list[dict[str, torch.Tensor]]:
    """The same by the kernels."""
    context = case.copied_context(device)
    on_gpu = device == "cuda"

    packets = kernel_ring(ENTRIES, case.layout.width, 4, device)
    results = kernel_ring(ENTRIES, RECORD_FIELDS * case.layout.max_rows, 4, device)
    records = torch.zeros(case.layout.max_rows, packet.ROW_WIDTH, dtype=torch.int32, device=device)
    records[: case.rows] = case.records.to(device)
    kernels = StepKernels(records, context.slots, BLOCK_SIZE, packets, results)
    kernels._pdl = pdl
    snapshots = []
    for step in range(STEPS):
        entry = (4 + step) % ENTRIES
        packets.ring[entry] = torch.from_numpy(case.packets[step])
        kernels.sample(case.logits[step].to(device))
        kernels.begin(case.rows)
        if on_gpu:
            torch.cuda.synchronize()
        assert int(results.sequence) == int(results.counter) == int(packets.counter) == 5 + step
        width = RECORD_FIELDS * case.rows
        assert torch.all(results.ring[entry, width:] == -7)
        snapshot = state_of(context)
        snapshot["result"] = results.ring[entry, :width].clone()
        snapshot["records"] = records[: case.rows].cpu().clone()
        for name, value in kernels.batch(case.rows)._asdict().items():
            snapshot[name] = value.cpu().clone()
        assert not torch.any(records[case.rows :])
        snapshots.append(snapshot)
    return snapshots


def assert_steps_equal(case: Case, device: str, pdl: bool = False) -> None:
    steps, expected = kernel_steps(case, device, pdl), reference_steps(case)
    for step, (got, wanted) in enumerate(zip(steps, expected, strict=True)):
        assert got.keys() == wanted.keys()
        # The token of padding rows is the null slot's last one, which is anything.
        is_padding = wanted["slots"] == case.context.null_slot
        for snapshot in (got, wanted):
            snapshot["token_ids"] = snapshot["token_ids"].masked_fill(is_padding, 0)
        for name, value in wanted.items():
            assert torch.equal(got[name].to(value.dtype), value), (step, name)


@on_devices
@torch.inference_mode()
@pytest.mark.parametrize("at_once", (4, step_state.MAX_ROWS_AT_ONCE))
@pytest.mark.parametrize(
    ("rows", "vocab_size"), [(1, 61), (3, 2 * sample_kernel.BLOCK + 17), (8, 1), (9, 61)]
)
def test_steps_equal_the_torch_code(
    rows: int, vocab_size: int, at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_state, "MAX_ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(step_state, "MAX_WORDS_AT_ONCE", 16 * at_once)
    for seed in range(2) if device == "cuda" else [at_once]:
        assert_steps_equal(Case(rows, vocab_size, seed), device)


@pytest.mark.parametrize("pdl", (False, True))
@pytest.mark.parametrize(
    ("rows", "vocab_size"), [(1, 151_936), (8, 61), (64, 32_000), (300, 5), (1024, 61)]
)
@torch.inference_mode()
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
def test_compiled_steps_equal_the_torch_code(
    rows: int, vocab_size: int, pdl: bool, device: str
) -> None:
    if pdl and not uses_pdl(torch.device(device)):
        pytest.skip("programmatic dependent launch needs Hopper")
    for seed in range(3):
        assert_steps_equal(Case(rows, vocab_size, seed), device, pdl)


@torch.inference_mode()
def test_cases_hold_what_they_are_about() -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        case = Case(12, 61, seed)
        context = case.context
        steps = reference_steps(case)
        records_of_s = [case.records, *(step["records"] for step in steps)]
        for step, records in zip(steps, records_of_s, strict=False):
            counts, status, tokens = step["result"].view(RECORD_FIELDS, -1)
            slots, samples = records[:, packet.ROW_SLOT], records[:, packet.ROW_SAMPLES]
            is_stop = (tokens[:, None] == context.slots.stop_ids[slots]).any(1)
            brings, ended, failed = counts == 1, status == ENDED, status == FAILED
            assert torch.equal(brings & ~ended, status == RUNNING)
            assert torch.equal(tokens[failed], torch.full_like(tokens[failed], -1))
            assert not torch.any(counts[failed])
            seen["live"] += int((brings & ~ended).sum())
            seen["ended by a stop id"] += int((brings & is_stop).sum())
            seen["ended by its length"] += int((brings & ended & ~is_stop).sum())
            seen["failed"] += int(failed.sum())
            seen["had ended"] += int(((samples != 0) & ~brings & ~failed).sum())
            seen["padding"] += int((step["slots"] == context.null_slot).sum())
            blocks = step["slot_mapping"] // BLOCK_SIZE
            assigned = slice(packet.ROW_ASSIGNED_SLOT, packet.ROW_ASSIGNED_BLOCK + 1)
            for row, (slot, _, block) in enumerate(step["records"][:, assigned].tolist()):
                written = (step["slots"] == slot) & (blocks == block) & (block > 0)
                seen["assigned in another row's record"] += int(written.sum() - written[row].int())
    assert all(seen.values()) and len(seen) == 7, seen


class InterpretedDevice(CpuDevice):
    """The CPU's stream with a GPU's rings: the step program takes the kernels."""

    def __init__(self) -> None:
        super().__init__(jitter_seed=1)
        self.stream = SimpleNamespace(query=self.raise_failure)
        self.results_taken = 0

    def packet_ring(self, entries: int, width: int) -> Any:
        return CudaPacketRing(self, entries, width)  # type: ignore[arg-type]

    def result_ring(self, entries: int, width: int, *, of_steps: bool = True) -> Any:
        return CudaResultRing(self, entries, width, of_steps=of_steps)  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize("depth", (0, 2))
def test_engine_on_interpreted_kernels_equals_the_oracle(depth: int) -> None:
    rng = random.Random(depth)
    asks = [random_ask(rng, max_new=12) for _ in range(7)]
    with hash_engine(
        depth,
        device=InterpretedDevice(),
        max_requests=5,
        block_size_tokens=4,
        block_count=60,
        prefill_chunk_tokens=16,
    ) as engine:
        requests = engine.generate(
            [list(a.prompt) for a in asks], [sampling_params(a) for a in asks]
        )
    for ask, request in zip(asks, requests, strict=True):
        assert request.generated_tokens == decode_alone(ask)[0]
    assert (engine.counters.tokens_discarded > 0) == (depth > 0)


@interpreted
def test_a_nan_on_interpreted_kernels_ends_its_request_alone() -> None:
    depth, model = 2, FailsAt()
    asks = [failing(), failing(kind="top-p"), *others(2)]
    with hash_engine(
        depth,
        device=InterpretedDevice(),
        model=model,
        max_requests=5,
        block_size_tokens=4,
        block_count=60,
    ) as engine:
        requests = engine.generate(
            [list(a.prompt) for a in asks], [sampling_params(a) for a in asks]
        )
    for ask, request in zip(asks[:2], requests[:2], strict=True):
        check_failed(request, ask, model.position)
        assert request.counters.discarded == 1 + depth
    for ask, request in zip(asks[2:], requests[2:], strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)
