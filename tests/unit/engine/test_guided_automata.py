"""Guided rows whose masks come from token automata on the device: the tokens, log-probabilities and
ends of masks from the host and of serial decoding, at every depth, with every event."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import GuidedRow, HostMasks
from megatron_async.engine.recorded_config import config_of_run
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.grammar.tables import kept
from megatron_async.runner.memory import automaton_pool
from megatron_async.sampling.automata import FORCED
from megatron_async.sampling_params import SamplingParams
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import DEPTHS, hash_engine
from tests.support.guided_automata import ROOM, SCENARIOS, are_those_of_the_oracle, pool_of
from tests.support.guided_rows import WINDOW, guide
from tests.support.hash_model import VOCAB_SIZE, HashModel
from tests.support.hash_tokenizer import hash_tokenizer
from tests.unit.engine.test_guided_requests import EVENTS, ON_GPU, run, serial, what_came

pytestmark = pytest.mark.sweep

DRAFTS = WINDOW - 1
WAYS: dict[str, dict[str, Any]] = {
    "no drafts": {"model": HashModel()},
    "drafts that know": {"model": DraftingHashModel(DRAFTS, 0.3, guide=guide)},
    "prompt look-up": {
        "model": HashModel(), "num_speculative_tokens": DRAFTS, "speculative_method": "ngram",
    },
    "grammars alone": {
        "model": HashModel(), "num_speculative_tokens": DRAFTS, "speculative_method": "grammar",
    },
    "stages": {
        "model": HashModel(), "num_speculative_tokens": DRAFTS, "speculative_method": "grammar",
        "pipeline_micro_batches": 2,
    },
    "rows that sit out beside": {"model": HashModel(), "guided_rows": "sit_out"},
}  # fmt: skip


@pytest.mark.sweep(of=12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_are_those_of_the_oracle(depth: int, way: str) -> None:
    """With evictions, pauses and prefixes that are shared; in a pool that is large, and in one that
    leaves some grammars to the host."""
    pairs = are_those_of_the_oracle(depth, **WAYS[way])
    accepted = sum(request.counters.accepted for ask, request in pairs if ask.regex)
    assert accepted > 30 if way not in ("no drafts", "rows that sit out beside") else not accepted
    are_those_of_the_oracle(depth, guided_automata_bytes=pool_of(30), **WAYS[way])


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_scenarios_pass(scenario: Callable[[int], None], depth: int) -> None:
    scenario(depth)


@pytest.mark.sweep(of=12)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_events_change_no_token(depth: int, event: str) -> None:
    """Beside schemas and stop words; log-probabilities are those of masks from the host."""
    requests, counters = run(depth, event, guided_automata_bytes=ROOM)
    by_host, _ = run(0, "none")
    for name, request in requests.items():
        assert what_came(request) == serial()[name], name
        assert request.generated_log_probs == by_host[name].generated_log_probs, name
    assert counters.guided_rows[GuidedRow.AUTOMATON] > 30


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("depth", (0, 1, 2))
def test_captured_steps_change_no_token(depth: int, event: str, device: str) -> None:
    requests, counters = run(depth, event, device, guided_automata_bytes=ROOM)
    for name, request in requests.items():
        assert what_came(request) == serial()[name], name
    assert counters.guided_rows[GuidedRow.AUTOMATON] > 30


def decoded(depth: int, drafts: int, asked: list[SamplingParams], **values: Any) -> Any:
    """What comes of each, with a prompt that half of them share, and the counters."""
    if drafts:
        values |= {"num_speculative_tokens": drafts, "speculative_method": "ngram"}
    with hash_engine(
        depth, tokenizer=hash_tokenizer(), max_requests=3, block_size_tokens=4, block_count=90,
        **values,
    ) as engine:  # fmt: skip
        prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, number % 2] for number in range(len(asked))]
        requests = engine.generate(prompts, asked)
        counters = engine.counters
    return [
        (
            r.generated_tokens, r.finish_reason, r.generated_text, r.generated_log_probs,
            r.generated_top_n_logprobs, [str(e.payload) for e in r.events if e.payload],
        )
        for r in requests
    ], counters  # fmt: skip


ASKED = [
    SamplingParams(
        temperature=(0.0, 1.4)[number % 2], seed=number, num_tokens_to_generate=20,
        structured_outputs=outputs, **more,
    )
    for number, (outputs, more) in enumerate(
        (
            ({"regex": "[a-f]{2,9}(true|12)"}, {"return_log_probs": True}),
            ({"regex": "[a-f]{2,9}(true|12)"}, {"top_n_logprobs": 3, "min_tokens": 6}),
            ({"choice": ["abcabc", "null", "tru"]}, {"ignore_eos": True}),
            ({"regex": "[a-f]{3}X"}, {}),  # the vocabulary has no capitals
            ({"regex": "(é|1){9}"}, {"stop_token_ids": tuple(range(40, 61))}),
            ({"regex": "[a-z]{30}"}, {"repetition_penalty": 1.4, "bad_words": ["ab"]}),
            ({"regex": "[a-z]*"}, {"allowed_token_ids": list(range(20, 61)), "min_p": 0.05}),
            ({"regex": "[a-z1-9]{20}"}, {"n": 3, "logit_bias": {20: 3.0}}),
        )
    )
]  # fmt: skip


@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("depth", DEPTHS)
def test_what_comes_is_what_comes_of_masks_from_the_host(depth: int, drafts: int) -> None:
    """Ends, errors with their reasons, log-probabilities, and everything else that S does."""
    found, counters = decoded(depth, drafts, ASKED, guided_automata_bytes=ROOM)
    by_host, counters_by_host = decoded(0, 0, ASKED)
    for one, other in zip(found, by_host, strict=True):
        assert one == other
    assert set(counters.guided_rows) == {GuidedRow.AUTOMATON} and not counters.host_masks
    assert counters_by_host.host_masks == {HostMasks.OFF: counters_by_host.guided_rows.total()}


def test_other_rows_say_why_the_host_makes_their_masks() -> None:
    def all_of_them(tokens: list[int], logits: Any) -> Any:
        return logits

    thought = {"closing": [60], "budget": 3}
    asked = [
        SamplingParams(structured_outputs=outputs, num_tokens_to_generate=4, **more)
        for outputs, more in (
            ({"regex": "[a-f]{9}"}, {"logits_processors": [all_of_them]}),
            ({"regex": "[a-f]{9}", "thought": thought}, {}),
            ({"grammar": 'root ::= "a" root "b" | "c"'}, {}),
            ({"regex": "[a-f]{999}"}, {}),
            ({"regex": "[a-f]{9}"}, {}),
        )
    ]
    _, counters = decoded(1, 0, asked, guided_automata_bytes=pool_of(100))
    assert set(counters.guided_rows) == {
        GuidedRow.PROCESSOR, GuidedRow.TOKEN, GuidedRow.AUTOMATON
    }  # fmt: skip
    assert counters.host_masks[HostMasks.PROCESSOR] == counters.guided_rows[GuidedRow.PROCESSOR]
    by_grammar = counters.host_masks.total() - counters.host_masks[HostMasks.PROCESSOR]
    assert by_grammar == counters.guided_rows[GuidedRow.TOKEN]
    assert len(counters.host_masks) == 4


def test_requests_that_wait_keep_few_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two grammars at once the second goes by the host; when the first is over it does not."""
    outputs = [{"regex": "[a-f]{9}"}, {"regex": "[0-9]{9}"}, {"regex": "[a-f]{9}"}]
    asked = [SamplingParams(structured_outputs=each, num_tokens_to_generate=4) for each in outputs]
    of_one = 10 * (2 * 256 + 1 + 4 * 2 + 4 * FORCED)
    monkeypatch.setattr("megatron_async.engine.grammar_tables.KEPT_POOLS", of_one / ROOM)
    with hash_engine(
        1, tokenizer=hash_tokenizer(), max_requests=1, block_count=30, guided_automata_bytes=ROOM
    ) as engine:
        engine.generate([[1, 2]] * 3, asked)
        assert engine.counters.guided_rows == {GuidedRow.AUTOMATON: 8, GuidedRow.TOKEN: 4}
        assert engine.counters.host_masks == {HostMasks.MANY: 4}
        engine.generate([[1, 2]], asked[1])
        assert engine.counters.guided_rows[GuidedRow.AUTOMATON] == 12


def test_a_table_that_cannot_be_made_refuses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(kept, "automaton_of", fails)
    asked = [SamplingParams(structured_outputs={"regex": "[a-f]{9}"}, num_tokens_to_generate=4)]
    found, counters = decoded(1, 0, asked, guided_automata_bytes=ROOM)
    assert re.fullmatch("[a-f]{4,9}", found[0][2]) and counters.host_masks == {HostMasks.FAILED: 4}


def test_a_lack_of_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton_of = kept.automaton_of

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    spec = StructuredOutputs(regex="[a-f]{9}")
    grammar = GrammarCompiler(hash_tokenizer(), VOCAB_SIZE).compile(spec)
    automata = kept.KeptAutomata(ROOM)
    monkeypatch.setattr(kept, "automaton_of", fails)
    assert automata.of(spec, grammar) == HostMasks.FAILED and automata.find(spec) is None
    monkeypatch.setattr(kept, "automaton_of", automaton_of)
    assert not isinstance(automata.of(spec, grammar), str)


def test_long_grammars_are_few_too() -> None:
    """Those without a table as well: they are anybody's."""
    automata = kept.KeptAutomata(1000)
    compiler = GrammarCompiler(hash_tokenizer(), VOCAB_SIZE)
    specs = [StructuredOutputs(regex="a" * 900 + rf"\w{number}") for number in range(5)]
    for spec in specs:
        assert automata.of(spec, compiler.compile(spec)) == r"regex: \w"
    assert [automata.find(spec) is not None for spec in specs] == [False] * 3 + [True] * 2


def test_reasons_that_users_can_make_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_async.engine.grammar_tables.MOST_REASONS", 2)
    regexes = (r"\d{2}", r"(?i)ab", r"\w{2}", r"\d{2}")
    asked = [
        SamplingParams(structured_outputs={"regex": each}, num_tokens_to_generate=2)
        for each in regexes
    ]
    _, counters = decoded(1, 0, asked, guided_automata_bytes=ROOM)
    assert len(counters.host_masks) == 3 and HostMasks.OTHER in counters.host_masks


def test_automata_are_kept_up_to_some_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    automaton_of = kept.automaton_of

    def counted(spec: Any, *given: Any, **values: Any) -> Any:
        made.append(spec.regex)
        return automaton_of(spec, *given, **values)

    monkeypatch.setattr(kept, "automaton_of", counted)
    compiler = GrammarCompiler(hash_tokenizer(), VOCAB_SIZE)
    specs = [StructuredOutputs(regex=f"[a-f]{{{length}}}") for length in (19, 18, 17)]
    grammars = [compiler.compile(spec) for spec in specs]
    first = automaton_of(specs[0], grammars[0], (), budget_bytes=ROOM)
    assert not isinstance(first, str)
    automata = kept.KeptAutomata(first.byte_size)
    for number in (0, 1, 0, 1, 2, 1, 0):
        found = automata.of(specs[number], grammars[number])
        assert not isinstance(found, str) and len(found.accepting) == 20 - number
    # Two pools hold two of them, and the third takes the place of the first.
    assert made == [specs[n].regex for n in (0, 1, 2, 0)]


def test_a_pool_without_room_is_no_pool() -> None:
    asked = [SamplingParams(structured_outputs={"regex": "[a-f]{9}"}, num_tokens_to_generate=4)]
    _, counters = decoded(1, 0, asked, guided_automata_bytes=pool_of(0))
    assert counters.host_masks.total() == 4


def test_a_pool_that_the_memory_does_not_hold_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU too, whose allocator raises another error than a GPU's."""
    monkeypatch.setattr(automaton_pool, "MOST_STATES", 1 << 30)
    asked = [SamplingParams(structured_outputs={"regex": "[a-f]{9}"}, num_tokens_to_generate=4)]
    with hash_engine(
        1, tokenizer=hash_tokenizer(), max_requests=1, block_count=30,
        guided_automata_bytes=1 << 32,
    ) as engine:  # fmt: skip
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 31), limits[1]))
        try:
            (request,) = engine.generate([[1, 2]], asked)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert re.fullmatch("[a-f]{4,9}", request.generated_text or "")
        assert engine.counters.host_masks.keys() == {HostMasks.POOL}


def test_what_is_asked_of_one_engine_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that nobody uses any more stays in the pool, and gives way."""
    loads: list[int] = []
    from megatron_async.runner.memory.automaton_pool import AutomatonPool

    load = AutomatonPool.load
    monkeypatch.setattr(
        AutomatonPool, "load", lambda self, base, of: (loads.append(base), load(self, base, of))
    )
    with hash_engine(
        1, tokenizer=hash_tokenizer(), max_requests=2, block_count=30,
        guided_automata_bytes=pool_of(25),
    ) as engine:  # fmt: skip
        for regex in ("[a-f]{9}", "[0-9]{9}", "[a-f]{9}", "[ab]{19}", "[0-9]{9}", "[a-f]{9}"):
            asked = SamplingParams(structured_outputs={"regex": regex}, num_tokens_to_generate=12)
            engine.generate([[1, 2]], asked)
        assert not engine.counters.host_masks
    assert loads == [1, 11, 1, 1, 11]


@pytest.mark.parametrize("recorded", (0, 2))
@pytest.mark.parametrize("replayed", (0, 2))
def test_a_recorded_run_is_repeated(recorded: int, replayed: int, tmp_path: Path) -> None:
    """With the plans of its depth, where grammars give way to each other in the pool; a run of
    before there were automata has none."""
    sizes: dict[str, Any] = {
        "max_requests": 2, "block_size_tokens": 4, "block_count": 40,
        "guided_automata_bytes": pool_of(25),
    }  # fmt: skip
    path = tmp_path / "run.jsonl"
    regexes = ("[a-f]{9}", "[0-9]{19}", "[a-f]{9}", "[ab]{19}", "[0-9]{19}", "(ab|c)*")
    asked = [
        SamplingParams(structured_outputs={"regex": each}, num_tokens_to_generate=12)
        for each in regexes
    ]
    prompts = [[number, 1] for number in range(len(asked))]
    with hash_engine(recorded, tokenizer=hash_tokenizer(), record=str(path), **sizes) as engine:
        tokens = [request.generated_tokens for request in engine.generate(prompts, asked)]
        assert engine.counters.guided_rows[GuidedRow.AUTOMATON] > 20
        assert engine.counters.host_masks[HostMasks.FULL] > 0
    run = read_run(path)
    with hash_engine(replayed, tokenizer=hash_tokenizer(), **sizes) as engine:
        result = replay(run, engine)
    assert result.exact == (recorded == replayed) and result.differences == ()
    assert {e.request_id: e.tokens for e in result.endings} == dict(enumerate(tokens))
    assert config_of_run({}).guided_automata_bytes == 0


@pytest.mark.parametrize("recorded", (False, True))
def test_an_engine_without_automata_repeats_other_plans(
    recorded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one over ranks is: it gives the tokens of a run that had some, and the other way round,
    and a replay does not say that it is exact."""

    def engine(has_some: bool, **values: Any) -> DynamicInferenceEngine:
        with monkeypatch.context() as patch:
            if not has_some:
                for module in ("spec", "runner"):
                    patch.setattr(f"megatron_async.build.{module}.has_automata", lambda *_: False)
            return hash_engine(
                2, tokenizer=hash_tokenizer(), max_requests=2, block_count=40,
                guided_automata_bytes=ROOM, **values,
            )  # fmt: skip

    asked = [
        SamplingParams(structured_outputs=each, num_tokens_to_generate=9, ignore_eos=True)
        for each in ({"regex": "[a-f]{20}"}, None)
    ]
    path = tmp_path / "run.jsonl"
    with engine(recorded, record=str(path)) as made:
        made.generate([[1], [2]], asked)
        assert made.config.guided_automata_bytes == (ROOM if recorded else 0)
        assert made.counters.host_masks.keys() == (set() if recorded else {HostMasks.DEVICE})
    for has_some in (recorded, not recorded):
        with engine(has_some) as made:
            result = replay(read_run(path), made)
        assert result.exact == (has_some == recorded) and result.differences == ()


def test_graphs_and_their_memory_are_those_of_the_engine() -> None:
    """The pool comes behind the capture, and a reset leaves it."""
    with hash_engine(
        1, tokenizer=hash_tokenizer(), max_requests=2, block_count=40, audit_graphs=True,
        guided_automata_bytes=ROOM,
    ) as engine:  # fmt: skip
        for _ in range(2):
            asked = SamplingParams(structured_outputs={"regex": "[a-f]{9}"})
            (request,) = engine.generate([[1, 2]], asked)
            assert re.fullmatch("[a-f]{9}", request.generated_text or "")
            assert engine.counters.guided_rows.keys() == {GuidedRow.AUTOMATON}
            engine.reset()
