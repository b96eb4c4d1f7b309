"""Requests that token automata guide: what they must come to, as short runs at any depth."""

from __future__ import annotations

import tempfile
from typing import Any

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import GuidedRow, HostMasks
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import IntegrityError
from megatron_async.grammar.automata.build import automaton_of
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.runner.memory.automaton_pool import state_bytes
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import drive, hash_engine, sampling_params
from tests.support.guided_rows import WINDOW, guide, play
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone

ROOM = 1 << 20
"""Bytes of a pool for more grammars than there are."""


def pool_of(states: int) -> int:
    """Bytes of a pool of the hash model's tokens that has room for so many states."""
    text = [hash_tokenizer().token_bytes(token) for token in range(VOCAB_SIZE)]
    of_tokens = 4 * (VOCAB_SIZE + 1) + sum(map(len, text))
    return of_tokens + (1 + states) * state_bytes(VOCAB_SIZE)


class TablesWhenTold:
    """In the place of an engine's process that makes tables, one that makes them when a test says.

    Args:
        engine: with automata that are not made at once, and without a request.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._grammars = engine.grammars
        self._grammars.compile({"choice": ["a"]})
        self._automata = self._grammars.automata
        self._automata.maker = self
        self._wanted: dict[StructuredOutputs, None] = {}

    def ask(self, spec: StructuredOutputs) -> None:
        self._wanted[spec] = None

    def close(self) -> None:
        self._wanted.clear()

    def make(self) -> None:
        """Make the table that was asked for first."""
        for spec in list(self._wanted)[:1]:
            del self._wanted[spec]
            _, grammar = self._grammars.compiled(spec)
            self._automata.put(spec, automaton_of(spec, grammar, (), budget_bytes=ROOM))


def are_those_of_the_oracle(depth: int, debug: bool = True, **values: Any) -> list[Any]:
    """Play the workload with automata; returns its requests."""
    values = {"guided_automata_bytes": ROOM, **values}
    try:
        asks, requests, _ = play(depth, debug, **values)
    except (IntegrityError, KeyError, IndexError) as error:
        raise AssertionError("an engine's own check has found it") from error
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask), ask
    return list(zip(asks, requests, strict=True))


def automata_guide_rows_as_the_oracle(depth: int, debug: bool = True) -> None:
    """With drafts that know the grammars and err, and where the pool is too small for all."""
    model = DraftingHashModel(WINDOW - 1, 0.3, guide=guide)
    pairs = are_those_of_the_oracle(depth, debug, model=model)
    assert sum(request.counters.accepted for ask, request in pairs if ask.regex) > 30
    are_those_of_the_oracle(depth, debug, model=model, guided_automata_bytes=pool_of(40))


def forced_stretches_are_drafted_by_automata(depth: int, debug: bool = True) -> None:
    """What drafts errs always; the automaton knows better."""
    for ask, request in are_those_of_the_oracle(
        depth, debug, model=DraftingHashModel(WINDOW - 1, 1.0)
    ):
        if ask.regex is None:
            assert request.counters.accepted == 0
        elif "y0z0" in ask.regex:
            assert request.counters.accepted > 5, request.counters


def automata_keep_their_states_until_they_retire(depth: int, debug: bool = True) -> None:
    """The one row of an engine goes from request to request, and the pool holds one grammar: who
    comes while the token of an evicted one is in flight finds no room."""
    asks = [
        Ask((number, 1), 12, stop_ids=(), temperature=1.0, seed=number, regex=regex)
        for number, regex in enumerate(("([a-f][0-9]){20}", "([0-9][a-f]){20}", "[tuvx]{40}"))
    ]
    try:
        with hash_engine(
            depth, tokenizer=hash_tokenizer(), debug=debug, max_requests=1, block_size_tokens=4,
            block_count=60, guided_automata_bytes=pool_of(42),
        ) as engine:  # fmt: skip
            futures = [
                engine.add_request(number, list(ask.prompt), sampling_params(ask))
                for number, ask in enumerate(asks)
            ]
            step = 0
            while engine.has_unfinished_requests():
                if step % 3 == 2:
                    for number in range(len(asks)):
                        engine.evict_request(number)
                engine.step_modern()
                step += 1
                assert step < 500
            rows, reasons = engine.counters.guided_rows, engine.counters.host_masks
    except (IntegrityError, KeyError, IndexError) as error:
        raise AssertionError("an engine's own check has found it") from error
    for ask, future in zip(asks, futures, strict=True):
        assert future.result(0).generated_tokens == decode_alone(ask)[0], ask
    assert rows[GuidedRow.AUTOMATON] > 0
    if depth:
        assert reasons == {HostMasks.FULL: rows[GuidedRow.TOKEN]} and reasons.total() > 0


def no_launch_waits_for_a_token(depth: int, debug: bool = True) -> None:
    """Rows that automata guide have the engine's depth, and so have others beside them."""
    asks = [Ask((number, 1), 24, regex="[a-f]{40}" if number else None) for number in range(3)]
    with hash_engine(
        depth, model=HashModel(), tokenizer=hash_tokenizer(), debug=debug, max_requests=3,
        block_count=60, guided_automata_bytes=ROOM,
    ) as engine:  # fmt: skip
        futures = [
            engine.add_request(number, list(ask.prompt), sampling_params(ask))
            for number, ask in enumerate(asks)
        ]
        while engine.has_unfinished_requests():
            engine.step_modern()
        counters = engine.counters
    requests = [future.result(0) for future in futures]
    for ask, request in zip(asks, requests, strict=True):
        assert request.generated_tokens == decode_alone(ask)[0]
        deepest = {report.effective_depth for report in request.steps[: -depth or None]}
        assert deepest == {depth}
    assert counters.guided_rows == {GuidedRow.AUTOMATON: 48} and not counters.host_masks
    assert counters.barriers == 0


def recorded_decisions_are_repeated(depth: int, debug: bool = True) -> None:
    """Two requests come before their table is there, and one behind."""
    asks = [Ask((number, 1), 12, regex="[a-f]{40}") for number in range(3)]
    values = {"guided_automata_bytes": ROOM, "automata_at_once": False, "debug": debug}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run.jsonl"
        with hash_engine(
            depth, tokenizer=hash_tokenizer(), max_requests=3, block_count=60, record=path, **values
        ) as engine:  # fmt: skip
            tables = TablesWhenTold(engine)
            for number, ask in enumerate(asks):
                engine.add_request(number, list(ask.prompt), sampling_params(ask))
                engine.step_modern()
                if number == 1:
                    tables.make()
            drive(engine)
            rows = engine.counters.guided_rows
        run = read_run(path)
    with hash_engine(
        depth, tokenizer=hash_tokenizer(), max_requests=3, block_count=60, **values
    ) as engine:  # fmt: skip
        result = replay(run, engine)
        assert result.exact and result.differences == ()
        assert engine.counters.guided_rows == rows
    assert rows == {GuidedRow.TOKEN: 24, GuidedRow.AUTOMATON: 12}


SCENARIOS = (
    automata_guide_rows_as_the_oracle,
    forced_stretches_are_drafted_by_automata,
    automata_keep_their_states_until_they_retire,
    no_launch_waits_for_a_token,
    recorded_decisions_are_repeated,
)
