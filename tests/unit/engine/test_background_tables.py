"""Tables of grammars come from a process beside the engine: when they come changes no token, what
is recorded is repeated, and whatever happens to the process concerns no request."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async.engine.commands import AddRequest
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import GuidedRow, HostMasks
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.grammar.tables import background, kept
from megatron_async.grammar.tables.background import MOST_WAITING, BackgroundMaker
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, hash_engine
from tests.support.guided_automata import ROOM, pool_of
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.leftovers import has_ended
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
REGEXES = ("([a-f][0-9]){12}", "(true|12|[x-z]){9}")
BY_HOST = {GuidedRow.TOKEN, GuidedRow.WINDOW}


def engine_with_tables(depth: int = 1, drafts: int = 0, **values: Any) -> DynamicInferenceEngine:
    if drafts:
        values |= {"num_speculative_tokens": drafts, "speculative_method": "ngram"}
    values = {"guided_automata_bytes": ROOM, "automata_at_once": False, **values}
    return hash_engine(
        depth, tokenizer=hash_tokenizer(), max_requests=3, block_size_tokens=4, block_count=90,
        **values,
    )  # fmt: skip


def asked(regex: str, number: int = 0, most: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs={"regex": regex}, num_tokens_to_generate=most, seed=number,
        temperature=(0.0, 1.2)[number % 2], **more,
    )  # fmt: skip


def add(engine: DynamicInferenceEngine, number: int, regex: str) -> Any:
    return engine.add_request(number, [3, 1, 4, number % 3], asked(regex, number))


def maker_of(engine: DynamicInferenceEngine) -> BackgroundMaker:
    maker = engine.grammars.automata.maker
    assert isinstance(maker, BackgroundMaker)
    return maker


def tables_are_there(engine: DynamicInferenceEngine) -> None:
    assert maker_of(engine).wait(PATIENCE_SECONDS)


def finish(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()


def ways(engine: DynamicInferenceEngine) -> dict[str, int]:
    """Which rows were served how since the last call."""
    found = dict(engine.counters.guided_rows)
    engine.counters.guided_rows.clear()
    return found


def before_while_and_after(engine: DynamicInferenceEngine) -> list[DynamicInferenceRequest]:
    """Requests of two grammars: two of each before its table is made, of which the second asks for
    it; the others when it is there, of which the first runs beside those. All of them end."""
    futures = [add(engine, number, REGEXES[number % 2]) for number in range(4)]
    for _ in range(3):
        engine.step_modern()
    engine.pause_request(0)  # so that it is still there, in the midst of its text
    engine.step_modern()
    tables_are_there(engine)
    futures += [add(engine, number, REGEXES[number % 2]) for number in range(4, 8)]
    engine.resume_request(0)
    finish(engine)
    return [future.result(0) for future in futures]


@pytest.fixture(scope="module")
def serial() -> list[tuple[Any, ...]]:
    """What comes of the same requests without automata, one step after the other."""
    with engine_with_tables(0, guided_automata_bytes=0) as engine:
        futures = [add(engine, number, REGEXES[number % 2]) for number in range(8)]
        finish(engine)
        return [what_came(future.result(0)) for future in futures]


def what_came(request: DynamicInferenceRequest) -> tuple[Any, ...]:
    return request.generated_tokens, request.generated_text, request.finish_reason


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("depth", DEPTHS)
def test_when_a_table_comes_changes_no_token(
    depth: int, drafts: int, serial: list[tuple[Any, ...]]
) -> None:
    with engine_with_tables(depth, drafts) as engine:
        requests = before_while_and_after(engine)
        rows = ways(engine)
    assert [what_came(request) for request in requests] == serial
    assert rows[GuidedRow.AUTOMATON] > 20 and sum(rows[way] for way in BY_HOST & set(rows)) > 20
    assert set(engine.counters.host_masks) == {HostMasks.LATER}


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_recorded_run_is_repeated_with_its_decisions(
    depth: int, drafts: int, serial: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """Where it says so the replay waits for the table, and it asks for none beside."""
    path = tmp_path / "run.jsonl"
    with engine_with_tables(depth, drafts, record=str(path)) as engine:
        before_while_and_after(engine)
        rows = ways(engine)
    run = read_run(path)
    commands = [each.command for each in run.applied]
    decisions = [each.automaton for each in commands if isinstance(each, AddRequest)]
    assert decisions == [False] * 4 + [True] * 4
    with engine_with_tables(depth, drafts) as engine:
        result = replay(run, engine)
        assert result.exact and result.differences == () and ways(engine) == rows
        assert maker_of(engine).pid is None and not maker_of(engine).waiting
    other = 0 if depth else 2
    with engine_with_tables(other, drafts) as engine:
        result = replay(run, engine)
        assert not result.exact and result.differences == ()
        assert ways(engine)[GuidedRow.AUTOMATON] > 20
    found = {each.request_id: each.tokens for each in result.endings}
    assert found == {number: tokens for number, (tokens, *_) in enumerate(serial)}


def test_a_run_of_before_makes_each_table_with_its_request(tmp_path: Path) -> None:
    """Its commands do not say what guided them."""
    path = tmp_path / "run.jsonl"
    with engine_with_tables(2, record=str(path), automata_at_once=True) as engine:
        futures = [add(engine, number, REGEXES[number % 2]) for number in range(4)]
        finish(engine)
        rows = ways(engine)
    assert rows.keys() == {GuidedRow.AUTOMATON} and len(futures) == 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    said = [line.pop("automaton") for line in lines if "automaton" in line]
    assert said == [True] * 4
    del lines[0]["config"]["testing"]["automata_at_once"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with engine_with_tables(2) as engine:
        result = replay(read_run(path), engine)
        assert result.exact and result.differences == () and ways(engine) == rows


def test_a_pool_without_room_is_recorded_as_none(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    values: dict[str, Any] = {"guided_automata_bytes": pool_of(0), "automata_at_once": True}
    with (
        pytest.MonkeyPatch.context() as patch,
        engine_with_tables(1, record=str(path), **values) as engine,
    ):
        patch.setattr(kept.KeptAutomata, "of", _of_more_room)
        add(engine, 0, REGEXES[0])
        finish(engine)
        assert engine.counters.host_masks.keys() == {HostMasks.POOL}
    assert '"automaton": false' in path.read_text()
    with engine_with_tables(1, **values) as engine:
        result = replay(read_run(path), engine)
        assert result.exact and result.differences == ()


def test_a_suspended_engine_takes_no_memory(tmp_path: Path) -> None:
    """As one that sleeps is, whose memory others have."""
    path = tmp_path / "run.jsonl"
    with engine_with_tables(2, record=str(path), automata_at_once=True) as engine:
        engine.suspend()
        add(engine, 0, REGEXES[0])
        engine.step_modern()
        engine.resume()
        finish(engine)
        assert ways(engine).keys() == {GuidedRow.TOKEN}
        engine.suspend()
        engine.resume()
        add(engine, 1, REGEXES[0])
        finish(engine)
        assert ways(engine).keys() == {GuidedRow.AUTOMATON}
    with engine_with_tables(2) as engine:
        result = replay(read_run(path), engine)
        assert result.exact and result.differences == ()


def _of_more_room(self: kept.KeptAutomata, spec: Any, grammar: Any) -> Any:
    return kept.automaton_of(spec, grammar, (), budget_bytes=ROOM)


def test_runs_whose_commands_contradict_themselves_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with engine_with_tables(1, record=str(path)) as engine:
        engine.generate([[1, 2]], SamplingParams(num_tokens_to_generate=2))
    path.write_text(path.read_text().replace('"command"', '"automaton": true, "command"'))
    with engine_with_tables(1) as engine, pytest.raises(Exception, match="automaton and params"):
        replay(read_run(path), engine)


# --- the process ----------------------------------------------------------------------------------


class Stopped:
    """Processes stand still as soon as they are ready, before they get the first grammar."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.there = threading.Event()

    def pid(self) -> int:
        assert self.there.wait(PATIENCE_SECONDS)
        return self.pids[-1]

    def go_on(self) -> None:
        os.kill(self.pid(), signal.SIGCONT)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    found = Stopped()
    set_up = background.Worker.set_up

    def set_up_and_stop(self: background.Worker, *given: Any) -> None:
        set_up(self, *given)
        if not found.pids:
            os.kill(self.child.pid, signal.SIGSTOP)
        found.pids.append(self.child.pid)
        found.there.set()

    monkeypatch.setattr(background.Worker, "set_up", set_up_and_stop)
    return found


def ask_for_tables(
    engine: DynamicInferenceEngine, *regexes: str, times: int = 2, most: int = 12
) -> None:
    """Two requests of each, one after the other, end meanwhile, by masks of the host. The second
    one asks."""
    for regex in regexes * times:
        engine.generate([[1, 2]], asked(regex, most=most))
    assert set(ways(engine)) <= BY_HOST


def test_a_process_that_is_killed_costs_its_table_alone(
    stopped: Stopped, caplog: pytest.LogCaptureFixture
) -> None:
    """Which the next process makes, when it is asked for again."""
    with engine_with_tables() as engine:
        ask_for_tables(engine, REGEXES[0])
        maker = maker_of(engine)
        os.kill(stopped.pid(), signal.SIGKILL)
        tables_are_there(engine)
        assert maker.failures == 1 and caplog.text.count("was killed by SIGKILL") == 1
        ask_for_tables(engine, REGEXES[0], times=1)
        tables_are_there(engine)
        assert maker.pid == stopped.pids[1] != stopped.pids[0]
        engine.generate([[1, 2]], asked(REGEXES[0]))
        assert ways(engine).keys() == {GuidedRow.AUTOMATON} and maker.failures == 1


def test_a_grammar_that_ends_processes_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others have their tables, and the log says it once."""
    send = background.work.send

    def kill_and_send(connection: Any, message: Any) -> None:
        if isinstance(message, background.work.Ask) and message.spec["regex"] == REGEXES[0]:
            process = psutil.Process(maker_of(engine).pid)
            process.kill()
            process.wait(PATIENCE_SECONDS)
        send(connection, message)

    with engine_with_tables() as engine:
        ask_for_tables(engine, REGEXES[1])
        tables_are_there(engine)
        monkeypatch.setattr(background.work, "send", kill_and_send)
        for _ in range(kept.TRIES + 2):
            ask_for_tables(engine, REGEXES[0], times=1)
            tables_are_there(engine)
        assert maker_of(engine).failures == kept.TRIES
        assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
        engine.generate([[1, 2]], asked(REGEXES[0]))
        assert engine.counters.host_masks[HostMasks.FAILED] > 0
        ways(engine)
        engine.generate([[1, 2]], asked(REGEXES[1]))
        assert ways(engine).keys() == {GuidedRow.AUTOMATON}


def test_a_table_that_takes_for_ever_holds_up_nobody(stopped: Stopped) -> None:
    """Requests of its grammar and of others go on and end, and an engine ends too."""
    with engine_with_tables(2) as engine:
        ask_for_tables(engine, *REGEXES)
        pid = stopped.pid()
        ask_for_tables(engine, *REGEXES)
        assert maker_of(engine).waiting == len(REGEXES)
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    assert not psutil.pid_exists(pid)


def test_few_grammars_wait_for_their_tables(stopped: Stopped) -> None:
    """The others are asked for when they come once more."""
    regexes = [f"[a-f]{{{length}}}" for length in range(1, MOST_WAITING + 9)]
    with engine_with_tables() as engine:
        ask_for_tables(engine, *regexes, most=2)
        stopped.pid()
        ask_for_tables(engine, *regexes, times=1, most=2)
        assert maker_of(engine).waiting == MOST_WAITING
        stopped.go_on()
        tables_are_there(engine)
        for regex in regexes:
            engine.generate([[1, 2]], asked(regex, most=3))
        assert ways(engine).keys() >= {GuidedRow.AUTOMATON, GuidedRow.TOKEN}
        tables_are_there(engine)
        engine.generate([[1, 2]], asked(regexes[-1], most=3))
        assert ways(engine).keys() == {GuidedRow.AUTOMATON}


def test_a_grammar_that_comes_once_has_no_process() -> None:
    with engine_with_tables() as engine:
        for regex in REGEXES:
            engine.generate([[1, 2]], asked(regex))
        assert maker_of(engine).pid is None and not maker_of(engine).waiting


def test_a_grammar_that_never_has_a_table_has_no_process() -> None:
    outputs = {"grammar": 'root ::= "a" root "b" | "c"'}
    params = SamplingParams(structured_outputs=outputs, num_tokens_to_generate=4)
    with engine_with_tables() as engine:
        for _ in range(3):
            engine.generate([[1, 2]], params)
        assert not maker_of(engine).waiting and maker_of(engine).pid is None
        assert engine.counters.host_masks.keys() == {"grammar"}


def test_a_process_without_work_ends_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)
    ended = threading.Event()
    end = background.Worker.end
    monkeypatch.setattr(background.Worker, "end", lambda self: (end(self), ended.set()))
    with engine_with_tables() as engine:
        for regex in REGEXES:
            ask_for_tables(engine, regex)
            tables_are_there(engine)
            assert ended.wait(PATIENCE_SECONDS)
            ended.clear()
            engine.generate([[1, 2]], asked(regex))
            assert ways(engine).keys() == {GuidedRow.AUTOMATON}
        assert maker_of(engine).pid is None and not maker_of(engine).failures


def test_a_process_that_cannot_start_is_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says the first failure, and that there are no more tries."""
    monkeypatch.setattr(background, "WORKER", "megatron_async.no_such_module")
    with engine_with_tables() as engine:
        for regex in ("a{2}", "b{2}", "c{2}"):
            for _ in range(kept.TRIES + 1):
                ask_for_tables(engine, regex, times=1)
                tables_are_there(engine)
        maker = maker_of(engine)
        assert maker.failures == 6 and maker.starts == background.MOST_FAILED_STARTS
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and "this engine starts no other" in said[1]


def test_processes_end_with_their_automata(stopped: Stopped) -> None:
    """Of an engine that nobody closes, too."""
    with engine_with_tables() as engine:
        ask_for_tables(engine, REGEXES[0])
        pid, automata = stopped.pid(), weakref.ref(engine.grammars.automata)
        engine.grammars._automata.clear()
        gc.collect()
        assert automata() is None and not psutil.pid_exists(pid)


PARENT = """
import time
from megatron_async.grammar.tables.background import make_in_background
from megatron_async.grammar.tables.kept import KeptAutomata
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from tests.support.hash_tokenizer import hash_tokenizer

compiler, kept = GrammarCompiler(hash_tokenizer(), 61), KeptAutomata(1 << 20)
make_in_background(kept, compiler, 1 << 20)
spec = StructuredOutputs(regex="[a-f]{9}")
kept.maker.ask(spec)
assert kept.maker.wait(900)
print(kept.maker.pid, len(kept.find(spec).accepting), flush=True)
time.sleep(900)
"""


def test_a_process_ends_with_an_engine_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, states = map(int, parent.stdout.readline().split())
        worker = psutil.Process(pid)
        parent.kill()
    assert states == 10
    psutil.wait_procs([worker], timeout=PATIENCE_SECONDS)
    assert has_ended(worker)


def test_the_process_has_low_priority_and_no_torch() -> None:
    code = (
        "import sys, megatron_async.grammar.tables.worker as worker\n"
        "import os\n"
        "worker.stand_back()\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0), 'torch' in sys.modules)\n"
        "worker.limit_next_work(0)\n"
        "while True:\n"
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.stdout == "19 False\n" and done.returncode == -signal.SIGXCPU
