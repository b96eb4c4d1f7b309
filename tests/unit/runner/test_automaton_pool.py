"""The pool of token automata: what is loaded is the table, whatever the memory is like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.device.cpu import CpuDevice
from megatron_async.grammar.automata.build import automaton_of
from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.memory import automaton_pool
from megatron_async.runner.memory.automaton_pool import LEFT_FREE, AutomatonPool, open_pool
from megatron_async.sampling.automata import DEAD, Automata
from tests.support.guided_automata import ROOM
from tests.support.hash_model import VOCAB_SIZE
from tests.support.hash_tokenizer import hash_tokenizer

BASE = 7


@pytest.fixture(scope="module")
def automaton() -> TokenAutomaton:
    spec = StructuredOutputs(regex="([a-f][0-9]{2}){4}(true|12)")
    compiler = GrammarCompiler(hash_tokenizer(), VOCAB_SIZE)
    made = automaton_of(spec, compiler.compile(spec), (), budget_bytes=ROOM)
    assert isinstance(made, TokenAutomaton)
    return made


@pytest.fixture
def pool() -> AutomatonPool:
    text = [hash_tokenizer().token_bytes(token) for token in range(VOCAB_SIZE)]
    made = AutomatonPool(text, ROOM, torch.zeros(6, dtype=torch.int64))
    made.begin()
    return made


def tables_of(pool: AutomatonPool) -> Automata:
    assert pool.tables is not None
    return pool.tables


def check_loaded(pool: AutomatonPool, automaton: TokenAutomaton) -> None:
    """What is there is the automaton from BASE on, and nothing else."""
    tables, states = tables_of(pool), len(automaton.accepting)
    own = slice(BASE, BASE + states)
    moves = torch.from_numpy(automaton.transitions).int()
    assert torch.equal(tables.transitions[own], torch.where(moves < 0, DEAD, moves + BASE))
    assert torch.equal(tables.text[own], torch.from_numpy(automaton.text))
    assert torch.equal(tables.accepting[own], torch.from_numpy(automaton.accepting).int())
    assert torch.equal(tables.forced[own], torch.from_numpy(automaton.forced))
    for outside in (slice(0, BASE), slice(BASE + states, None)):
        assert (tables.transitions[outside] == DEAD).all() and not tables.text[outside].any()
        assert not tables.accepting[outside].any() and (tables.forced[outside] == -1).all()


@pytest.mark.parametrize("loaded_bytes", (1, 5000, 1 << 30))
def test_a_table_is_loaded_in_parts(
    pool: AutomatonPool,
    automaton: TokenAutomaton,
    loaded_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automaton_pool, "LOADED_BYTES", loaded_bytes)
    pool.load(BASE, automaton)
    check_loaded(pool, automaton)


class Allocations(TorchDispatchMode):
    """Counts the results of operations that lie in no memory of before, beside numpy's arrays."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._known = {table.untyped_storage().data_ptr() for table in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor) and func is not torch.ops.aten.lift_fresh.default:
                self.count += each.untyped_storage().data_ptr() not in self._known
        return result


def test_to_load_a_table_allocates_nothing_on_the_device(
    pool: AutomatonPool, automaton: TokenAutomaton
) -> None:
    with Allocations(iter(tables_of(pool))) as seen:
        tables_of(pool).text + 1  # the counter sees what it is for
        assert seen.count == 1
        pool.load(BASE, automaton)
    assert seen.count == 1
    check_loaded(pool, automaton)


def test_a_lack_of_pinned_memory_ends_no_step(
    pool: AutomatonPool, automaton: TokenAutomaton, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fails(self: Tensor) -> Tensor:
        asked.append(self.nbytes)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Tensor, "pin_memory", fails)
    pool._pinned = True
    pool.load(BASE, automaton)
    check_loaded(pool, automaton)
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("free", "opens"), [(None, True), (ROOM + LEFT_FREE, True), (ROOM + LEFT_FREE - 1, False)]
)
def test_a_pool_leaves_memory_to_steps(free: int | None, opens: bool) -> None:
    text = [hash_tokenizer().token_bytes(token) for token in range(VOCAB_SIZE)]
    on = torch.device("cpu")
    tables = ExtrasTables(4, VOCAB_SIZE, 64, on, has_automata=True)
    device = CpuDevice()
    try:
        found = open_pool(text, ROOM, tables, device, free)
        device.synchronize()
    finally:
        device.close()
    assert (found is not None) == opens == (tables.automata is not None)
    assert tables.addresses is not None and bool(tables.addresses.any()) == opens


def test_a_small_vocabulary_needs_no_large_pool() -> None:
    addresses = torch.zeros(6, dtype=torch.int64)
    pool = AutomatonPool([b"a", b"b"], 256 << 20, addresses)
    assert pool.capacity == automaton_pool.MOST_STATES and pool.memory_bytes < 128 << 20
