"""Recurrent state with the life of a request: snapshots in the scheduler, the pool, and engines.

What can go wrong with steps in flight is in ``test_state_machine.py`` and ``test_mutants.py``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async.cache.state_snapshots import StateSnapshots
from megatron_async.cli import info
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import memory
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CacheTooLargeError, ConfigError, IntegrityError
from megatron_async.models.description.recurrent_state_spec import (
    RecurrentStateSpec,
    StateTensor,
    recurrent_state_spec,
)
from megatron_async.models.served import ServedModel
from megatron_async.runner.memory.recurrent_states import ZEROS, RecurrentStates
from megatron_async.scheduler.request_state import Sequence
from megatron_async.step.plan import StateCopy
from tests.support.engines import (
    DEPTHS,
    config_at,
    greedy,
    hash_engine,
    random_ask,
    sampling_params,
)
from tests.support.hash_model import HashModel
from tests.support.hybrid_hash_model import (
    HybridDraftingHashModel,
    HybridHashModel,
    hybrid_history,
)
from tests.support.oracle import Ask, decode_with_salts
from tests.unit.scheduler.test_scheduler import Chain

# --- what the scheduler plans, with blocks of 4 tokens and chunks of 8 ----------------------------


def chain(count: int | None = 8, **values: Any) -> Chain:
    return Chain(state_snapshots=count, block_count=40, **values)


def prefill(chain: Chain, key: int, prompt: tuple[int, ...]) -> tuple[list[Any], list[Any], int]:
    """Run a request to its end: its (restored, snapshot) copies as (place, length), and how many
    chunks it took."""
    chain.add(Sequence(key, prompt, 1, (), ()))
    restores: list[Any] = []
    snapshots: list[Any] = []
    chunks = 0
    while chain.scheduler.has_unfinished:
        plan = chain.step()
        if plan is not None:
            restores += [copy[1:] for copy in plan.restores]
            snapshots += [copy[1:] for copy in plan.snapshots]
            chunks += len(plan.prefills)
    return restores, snapshots, chunks


PROMPT = tuple(range(19))


def test_snapshots_are_taken_at_chunk_ends_and_the_last_full_block() -> None:
    assert prefill(chain(), 1, PROMPT) == ([], [(0, 8), (1, 16)], 3)
    # A prompt of whole blocks: an equal one must compute its last token, a longer one need not.
    assert prefill(chain(), 1, PROMPT[:12]) == ([], [(0, 8), (1, 12)], 2)
    assert prefill(chain(), 1, PROMPT[:3]) == ([], [], 1)


def test_a_hit_goes_on_from_the_longest_prefix_that_has_a_snapshot() -> None:
    made = chain()
    prefill(made, 1, PROMPT)
    assert prefill(made, 2, PROMPT) == ([(1, 16)], [], 1)
    assert prefill(made, 3, (*PROMPT[:11], 99, 98)) == ([(0, 8)], [(2, 12)], 2)


def test_a_prefix_that_is_asked_for_again_gets_a_snapshot_of_its_own() -> None:
    made = chain(prefill_chunk_tokens=64)
    assert prefill(made, 1, PROMPT) == ([], [(0, 16)], 2)
    others = [(*PROMPT[:10], *range(50 * n, 50 * n + 5)) for n in (1, 2, 3)]
    # Its first 8 tokens are in the cache, without a snapshot: computed, in a chunk of their own.
    assert prefill(made, 2, others[0]) == ([], [(1, 8), (2, 12)], 3)
    assert prefill(made, 3, others[1]) == ([(1, 8)], [(3, 12)], 2)


def test_the_least_recently_used_snapshot_is_given_up_and_those_nobody_wants_first() -> None:
    made = chain(2)
    prefill(made, 1, PROMPT)
    assert prefill(made, 2, tuple(range(100, 106))) == ([], [(0, 4)], 2)
    assert prefill(made, 1, PROMPT) == ([(1, 16)], [], 1)
    assert prefill(made, 3, tuple(range(200, 206))) == ([], [(0, 4)], 2)
    assert prefill(made, 1, PROMPT) == ([(1, 16)], [], 1)


@pytest.mark.parametrize("depth", (0, 1, 2))
def test_generated_tokens_get_one_snapshot_which_goes_on_with_the_request(depth: int) -> None:
    made = chain(depth=depth)
    made.add(Sequence(1, PROMPT[:6], 11, (), ()))
    taken = []
    while made.scheduler.has_unfinished:
        plan = made.step()
        taken += [] if plan is None else [copy[1:] for copy in plan.snapshots]
    # The place of the one before is taken again where that is known by then.
    assert taken == [(0, 4), (1, 8), (1, 12), (1, 16)]
    restores, _, _ = prefill(made, 2, (*PROMPT[:6], *(7,) * 11, 1, 2))
    assert restores == [(1, 16)]
    made.finish()


@pytest.mark.parametrize("end", ["abort", "evict", "forget"])
def test_a_snapshot_in_flight_comes_back_with_its_request(end: str) -> None:
    made = chain(depth=2)
    made.add(Sequence(1, PROMPT[:7], 11, (), ()))
    while not (plan := made.launch()) or not any(copy.length == 8 for copy in plan.snapshots):
        pass
    if end == "forget":
        made.scheduler.table.forget_prefixes()
    else:
        getattr(made.scheduler, end)(1)
    made.finish()


def test_decode_rows_take_the_places_of_no_prompt() -> None:
    made = chain(1)
    made.add(Sequence(1, PROMPT[:6], 11, (), ()))
    taken = []
    while made.scheduler.has_unfinished:
        plan = made.step()
        taken += [] if plan is None else [copy[1:] for copy in plan.snapshots]
    assert taken == [(0, 4)]


def test_without_recurrent_layers_or_places_prompts_are_cut_nowhere_else() -> None:
    for count, restores in ((None, []), (0, [])):
        made = chain(count)
        assert prefill(made, 1, PROMPT) == ([], [], 3)
        assert prefill(made, 2, PROMPT)[:2] == (restores, [])
        assert (prefill(made, 3, PROMPT)[2] == 1) == (count is None)


def test_snapshots_go_with_the_block_of_their_prefix() -> None:
    made = Chain(state_snapshots=8, block_count=5)
    prefill(made, 1, PROMPT)
    assert len(made.scheduler.table.prefixes.snapshots or ()) == 2
    prefill(made, 2, tuple(range(100, 119)))
    # Those of the first prompt went with its blocks.
    assert len(made.scheduler.table.prefixes.snapshots or ()) == 2
    assert prefill(made, 1, PROMPT)[0] == []
    made.scheduler.table.forget_prefixes()
    assert len(made.scheduler.table.prefixes.snapshots or ()) == 0


def test_a_lost_place_and_a_snapshot_of_nothing_are_found() -> None:
    snapshots = StateSnapshots(2)
    snapshots.take(7, is_wanted=True)
    snapshots.check([7])
    with pytest.raises(IntegrityError, match="no known prefix"):
        snapshots.check([8])
    snapshots._free.append(1)
    with pytest.raises(IntegrityError, match="lost or held twice"):
        snapshots.check([7])


# --- the pool -------------------------------------------------------------------------------------

SPEC = RecurrentStateSpec(
    2,
    (StateTensor("conv", (3,), torch.bfloat16), StateTensor("sum", (2, 2), torch.float32, True)),
)


def pool(entries: int = 1, snapshots: int = 2) -> RecurrentStates:
    return RecurrentStates(
        SPEC, 3, entries=entries, snapshot_count=snapshots, device=torch.device("cpu")
    )


def test_shapes_and_bytes() -> None:
    made = pool(entries=4)
    assert SPEC.state_bytes == 2 * (3 * 2 + 4 * 4)
    assert {name: tuple(t.shape) for name, t in made.layer(1).items()} == {
        "conv": (4, 4, 3),
        "sum": (4, 4, 2, 2),
    }
    assert made.state_bytes == 4 * 4 * SPEC.state_bytes
    assert made.snapshot_bytes == 2 * SPEC.state_bytes
    assert SPEC.with_dtype("bfloat16").state_bytes == 2 * (3 * 2 + 4 * 2)


def test_rows_find_the_state_behind_the_tokens_that_were_accepted() -> None:
    made, finished = pool(entries=4), torch.tensor([False, True, False, True])
    slots = torch.tensor([0, 2])
    nothing = torch.zeros(2, dtype=torch.int64)
    chunks = made.chunks(slots, nothing, nothing, torch.tensor([5, 7]), finished)
    assert chunks.slots.tolist() == [0, 2] and chunks.first.tolist() == [ZEROS, ZEROS]
    decode = made.decode_rows(torch.tensor([0, 2, 1, 3]), torch.tensor([5, 7, 9, 0]), finished, 4)
    # A row that has ended and padding take the null slot, and begin from zeros.
    assert decode.slots.tolist() == [0, 2, 3, 3]
    assert decode.first.tolist() == [0, 0, ZEROS, ZEROS]
    # Slot 0 accepted two drafts, slot 2 none.
    again = made.decode_rows(slots, torch.tensor([8, 8]), finished, 4)
    assert again.first.tolist() == [2, 0]
    # Slot 2 is paused meanwhile, and goes on from where it was.
    made.decode_rows(slots[:1], torch.tensor([9]), finished, 1)
    assert made.decode_rows(slots[1:], torch.tensor([11]), finished, 4).first.tolist() == [2]


def test_a_snapshot_is_what_it_was_when_it_was_taken() -> None:
    made = pool(entries=2)
    for layer in (0, 1):
        for name, states in made.layer(layer).items():
            states[0, 0] = layer + len(name)
    made.take_snapshot(0, 1, 6)
    made.poison([0])
    made.restore(2, 1, 6)
    for layer in (0, 1):
        for name, states in made.layer(layer).items():
            assert (states[2, 0] == layer + len(name)).all() and states[0].isnan().all()
            assert (states[1] == 0).all()
    rows = made.decode_rows(
        torch.tensor([2]), torch.tensor([6]), torch.zeros(4, dtype=torch.bool), 1
    )
    assert rows.first.tolist() == [0]


def test_layers_that_differ_are_refused_and_others_numbered() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.state_tensors = (StateTensor("sum", (size,), torch.float32),)

    alike = torch.nn.Sequential(Layer(3), torch.nn.Linear(1, 1), Layer(3))
    spec = recurrent_state_spec(alike)
    assert spec is not None and spec.num_layers == 2 and alike[2].state_layer == 1
    assert recurrent_state_spec(torch.nn.Linear(1, 1)) is None
    with pytest.raises(ConfigError, match="recurrent layers differ in their state"):
        recurrent_state_spec(torch.nn.Sequential(Layer(3), Layer(4)))


# --- engines --------------------------------------------------------------------------------------


def alone(ask: Ask) -> tuple[list[int], str]:
    return decode_with_salts(ask, [(0, 0)], history=hybrid_history)


@pytest.mark.parametrize(("depth", "window", "size"), [
    (0, 1, 4), (1, 1, 1), (2, 1, 3), (4, 1, 16), (0, 4, 2), (1, 2, 4), (2, 3, 16), (4, 4, 1),
])  # fmt: skip
def test_tokens_equal_the_oracle(depth: int, window: int, size: int) -> None:
    rng = random.Random(10 * depth + window)
    head = tuple(rng.randrange(61) for _ in range(20))
    asks = []
    for number in range(8):
        ask = random_ask(rng, max_prompt=8, max_new=14)
        prompt = (*head[: (5, 12, 20)[number % 3]], *ask.prompt)
        asks.append(Ask(**{**vars(ask), "prompt": prompt}))
    with hash_engine(
        depth,
        model=HybridDraftingHashModel(window - 1, 0.3),
        max_requests=3,
        block_size_tokens=size,
        block_count=3 * -(-42 // size),
        prefill_chunk_tokens=8,
        jitter_seed=depth,
    ) as engine:
        requests = engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
        counters = engine.counters
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == alone(ask)
    assert (counters.tokens_accepted > 0) == (window > 1)
    assert counters.state_snapshots_taken > 0 or size == 16
    assert (counters.states_restored > 0) == (counters.tokens_cached > 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_siblings_go_on_from_the_snapshot_of_their_prompt(depth: int) -> None:
    prompt = tuple(range(1, 12))
    with hash_engine(
        depth, model=HybridHashModel(), max_requests=4, block_size_tokens=4, block_count=40
    ) as engine:
        params = greedy(6, n=3)
        (request,) = engine.generate([list(prompt)], params)
        counters = engine.counters
    expected = alone(Ask(prompt, 6))[0]
    assert [choice.generated_tokens for choice in request.choices] == [expected] * 3
    assert counters.states_restored == 2 and counters.tokens_cached == 16


@pytest.mark.parametrize(
    ("forget", "hits"),
    [
        (lambda engine: None, 1),
        (lambda engine: engine.reset_prefix_cache(), 0),
        (lambda engine: engine.reset(), 0),
        (lambda engine: engine.update_weights({"salt": 5}), 0),
    ],
)
def test_what_was_forgotten_is_not_restored(forget: Callable[[Any], Any], hits: int) -> None:
    ask = Ask(tuple(range(1, 12)), 6)
    sizes = {"max_requests": 2, "block_size_tokens": 4, "block_count": 40}
    with hash_engine(1, model=HybridHashModel(), **sizes) as engine:
        engine.generate([list(ask.prompt)], greedy(6))
        salt = 5 if forget(engine) == 1 else 0
        (request,) = engine.generate([list(ask.prompt)], greedy(6))
        assert engine.counters.states_restored == hits
    expected = decode_with_salts(ask, [(0, salt)], (), hybrid_history)[0]
    assert request.generated_tokens == expected


def test_the_pool_is_named_at_the_start_and_in_errors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        caplog.at_level(logging.INFO, "megatron_async"),
        hash_engine(1, model=HybridHashModel(), max_requests=2, block_count=8) as engine,
    ):
        states = engine.cache.states
        assert states is not None and states.snapshot_count == 8
    assert "recurrent state takes" in caplog.text and "for 8 snapshots of it" in caplog.text
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 100_000)
    with pytest.raises(CacheTooLargeError, match=r"snapshots of recurrent state.*state_snapsho"):
        hash_engine(
            1, model=HybridHashModel(), max_requests=2, block_count=8, state_snapshot_count=10_000
        )
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 2_000)
    with pytest.raises(CacheTooLargeError, match=r"the recurrent state of 41 slots.*max_requests"):
        RecurrentStates(SPEC, 40, entries=4, snapshot_count=0, device=torch.device("cpu"))


def test_info_says_what_a_request_takes() -> None:
    found = info._recurrent_state(SPEC)
    assert found is not None and found["request_bytes"] == SPEC.state_bytes
    assert info._state_line(found) == (
        "44 bytes a request: 2 layers of conv 3 bfloat16, sum 2x2 float32"
    )
    assert info._recurrent_state(None) is None


def test_models_without_recurrent_layers_have_no_pool() -> None:
    with hash_engine(1, model=HashModel(), max_requests=2, block_count=8) as engine:
        assert engine.cache.states is None
        assert engine.scheduler.table.prefixes.snapshots is None


def test_a_model_with_recurrent_layers_does_not_draft_for_another() -> None:
    model = ServedModel(network=HashModel(), draft=HybridHashModel())
    with pytest.raises(ConfigError, match="draft_model has recurrent layers"):
        DynamicInferenceEngine(model, config_at(1, max_requests=2, block_count=8))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_snapshot_count": -1}, "state_snapshot_count=-1 must be an integer of at least 0"),
        ({"recurrent_state_dtype": "float16"}, "must be float32 or bfloat16"),
    ],
)
def test_wrong_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


def test_a_copy_is_for_the_slot_of_its_request() -> None:
    made = chain()
    made.add(Sequence(1, PROMPT, 1, (), ()))
    first, second = made.step(), made.step()
    assert first is not None and second is not None
    assert first.snapshots == (StateCopy(0, 0, 8),) and second.snapshots == (StateCopy(0, 1, 16),)
