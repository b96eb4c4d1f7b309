"""A parameter of a request costs three lines: a slot field, an attribute, and its use in S."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_async.errors import RequestError
from megatron_async.runner import sampling_stage
from megatron_async.runner.memory.slot_state import SlotState
from megatron_async.runner.sampler import sample_tokens
from megatron_async.sampling.sample import SampleInputs
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from megatron_async.step import slot_fields
from megatron_async.step.packet import PacketLayout
from megatron_async.step.slot_fields import SLOT_FIELDS, SlotField, Source, fields_from, words_of
from tests.support.engines import DEPTHS, drive, engine_at
from tests.support.hash_model import VOCAB_SIZE, HashModel, hash_history, hash_logits
from tests.support.oracle import Ask, decode_alone


@dataclass(kw_only=True)
class LiftedParams(SamplingParams):
    """One token is likelier by a bias."""

    lift: float = 0.0  # line one


class Lifts(HashModel):
    """Adds a request's ``lift`` to the logit of token 0: what S samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()

    def forward(self, token_ids: torch.Tensor, position_ids: torch.Tensor, context: Any) -> Any:
        logits = super().forward(token_ids, position_ids, context)
        slots = context.token_slots
        if context.last_token_index is not None:
            slots = slots[context.last_token_index]
        logits[:, 0] += context.slots.lift[slots]  # line three
        self.seen.update(context.slots.lift[slots][~context.finished[slots]].tolist())
        return logits


@pytest.fixture
def lift_field(monkeypatch: pytest.MonkeyPatch) -> SlotField:
    field = SlotField("lift", "float32", Source.REQUEST)  # line two
    monkeypatch.setattr(slot_fields, "SLOT_FIELDS", (*SLOT_FIELDS, field))
    return field


def lifted(max_new: int, lift: float, **values: Any) -> LiftedParams:
    return LiftedParams(
        lift=lift, temperature=0.0, num_tokens_to_generate=max_new, termination_id=-1, **values
    )


def decode_lifted(prompt: int, max_new: int, lift: float) -> list[int]:
    def logits_of(tokens: list[int]) -> list[float]:
        row = hash_logits(hash_history(tokens))
        return [row[0] + lift, *row[1:]]

    return decode_alone(Ask((prompt,), max_new), logits_of)[0]


LIFTS = (0.0, 1.5, 3.25, 100.0, -100.0, 0.0, 2.5, 1.5)


@pytest.mark.usefixtures("lift_field")
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_slot_field_of_three_lines_arrives_in_s(depth: int) -> None:
    """Each request's own value, in rows that close up and slots that are given on."""
    model = Lifts()
    with engine_at(depth, model=model) as engine:
        requests = engine.generate(
            [[i + 1] for i in range(len(LIFTS))],
            [lifted(6 + 3 * i, lift) for i, lift in enumerate(LIFTS)],
        )
    for i, (lift, request) in enumerate(zip(LIFTS, requests, strict=True)):
        assert request.generated_tokens == decode_lifted(i + 1, 6 + 3 * i, lift)
    assert model.seen == set(LIFTS)
    assert requests[3].generated_tokens == [0] * 15 and 0 not in requests[4].generated_tokens


@pytest.mark.usefixtures("lift_field")
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_slot_field_comes_back_with_its_request_after_an_eviction(depth: int) -> None:
    """Others hold the slots meanwhile; they have values of their own."""
    with engine_at(depth, model=Lifts()) as engine:
        futures = [
            engine.add_request(i, [i + 1], lifted(30, lift)) for i, lift in enumerate(LIFTS[:6])
        ]
        for evicted in (0, 1, 2):
            while engine.get_request(evicted).counters.launched < 8:
                engine.step_modern()
            engine.evict_request(evicted)
            engine.step_modern()
        drive(engine)
        assert engine.counters.evictions == 3
    for i, future in enumerate(futures):
        assert future.result(timeout=0).generated_tokens == decode_lifted(i + 1, 30, LIFTS[i])


@pytest.mark.usefixtures("lift_field")
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_slot_field_stays_when_other_parameters_change(depth: int) -> None:
    """Control brings all REQUEST fields of a slot."""
    with engine_at(depth, model=Lifts()) as engine:
        future = engine.add_request(0, [1], lifted(20, 100.0))
        other = engine.add_request(1, [2], lifted(20, 1.5))
        for _ in range(6):
            engine.step_modern()
        engine.update_sampling_params(0, temperature=1.0, seed=5)
        drive(engine)
        request = future.result(timeout=0)
    assert request.generated_tokens == [0] * 20
    assert isinstance(request.sampling_params, LiftedParams)
    assert (request.sampling_params.lift, request.sampling_params.temperature) == (100.0, 1.0)
    assert other.result(timeout=0).generated_tokens == decode_lifted(2, 20, 1.5)


def test_a_slot_field_may_be_read_by_the_sampler_too(
    lift_field: SlotField, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S itself: the sampler is given rows whose slots it is told by the state it reads."""
    sampled: list[torch.Tensor] = []

    def lifting(logits: torch.Tensor, inputs: SampleInputs, *, vocab_size: int) -> Any:
        state = engine.cache.slots
        records = engine.runner._program._row_records[: len(logits)]
        lift = state.tensor(lift_field)[records[:, 0].long()]
        sampled.append(lift.clone())
        logits = logits.clone()
        logits[:, 0] += lift
        return sample_tokens(logits, inputs, vocab_size=vocab_size)

    monkeypatch.setattr(sampling_stage, "sample_tokens", lifting)
    with engine_at(1) as engine:
        (one, other) = engine.generate([[1], [2]], [lifted(9, 2.5), lifted(9, -1.5)])
    assert one.generated_tokens == decode_lifted(1, 9, 2.5)
    assert other.generated_tokens == decode_lifted(2, 9, -1.5)
    assert any({2.5, -1.5} <= set(lift.tolist()) for lift in sampled)


# --- the table --------------------------------------------------------------------------------


VALUES = {
    "kv_length": 2**40 + 3,
    "max_total": 2**31,
    "long_rotation": 1,
    "stop_ids": (5, 2**31 - 1),
    "inverse_temperature": 1.25,
    "top_k": 2**31 - 1,
    "top_p": 0.8125,
    "seed": -(2**63),
}


def state_of_four() -> SlotState:
    sizes = {"max_blocks_per_request": 3, "num_drafts": 2}
    return SlotState(4, sizes, torch.device("cpu"))


def test_values_come_out_of_their_words_as_they_were() -> None:
    sources = (Source.ADMISSION, Source.REQUEST)
    fields = fields_from(*sources)
    values = tuple(VALUES[field.name] for field in fields)
    words = words_of(fields, values)
    assert all(-(2**31) <= word < 2**31 for word in words)
    state = state_of_four()
    state.write(torch.tensor([2]), torch.tensor([words], dtype=torch.int32), *sources)
    for field in fields:
        got = state.tensor(field)[2].tolist()
        value = VALUES[field.name]
        if isinstance(value, tuple):
            assert got == [*value, *[-1] * (MAX_STOP_TOKEN_IDS - len(value))]
        else:
            assert got == value
        for slot in (0, 1, 3, 4):  # the others keep their defaults
            assert bool((state.tensor(field)[slot] == field.default).all())


def test_widths_of_packets_follow_from_the_table(
    lift_field: SlotField, monkeypatch: pytest.MonkeyPatch
) -> None:
    def widths() -> tuple[int, ...]:
        layout = PacketLayout(4, 8, 6, 5)
        return layout.admit_width, layout.control_width, layout.width, layout.control_size

    before = widths()
    fields = (*slot_fields.SLOT_FIELDS, SlotField("x", "int64", Source.ADMISSION))
    monkeypatch.setattr(slot_fields, "SLOT_FIELDS", fields)
    assert [b - a for a, b in zip(before, widths(), strict=True)] == [2, 0, 4 * 2, 0]
    assert words_of((lift_field,), (1.0,)) == [0x3F800000]


def test_a_reset_gives_every_field_its_default() -> None:
    state = state_of_four()
    for field in SLOT_FIELDS:
        state.tensor(field).fill_(7)
    state.reset()
    for field in SLOT_FIELDS:
        assert bool((state.tensor(field) == field.default).all()), field.name
    assert bool(state.finished.all()) and state.block_table.shape == (5, 3)


def test_changed_parameters_are_of_the_requests_own_kind() -> None:
    """A subclass of the sampling parameters stays one through validation and updates."""
    params = lifted(4, 2.5)
    assert dataclasses.replace(params.checked(), seed=1).lift == 2.5
    with engine_at(1) as engine, pytest.raises(RequestError, match="lift of a running request"):
        engine.add_request(0, [VOCAB_SIZE - 1], params)
        engine.update_sampling_params(0, lift=1.0)
