"""One process kit: who starts processes, and what becomes of those that die, freeze or refuse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_async.errors import ConfigError
from megatron_async.processes.child import Child, how_ended
from megatron_async.processes.child_process import ChildProcess
from megatron_async.processes.messages import Beat, NotStarted, Started, Stop
from megatron_async.processes.watching.supervision import (
    SHOWN_SECONDS,
    Restarts,
    Start,
    Supervision,
)
from tests.support.patience import PATIENCE_SECONDS
from tests.unit.test_architecture import PACKAGE, imports_of

OF_PROCESSES = {"subprocess", "multiprocessing", "multiprocessing.connection"}
Said = Started | Beat | NotStarted


class Task(msgspec.Struct, frozen=True, tag=True):
    """What a child does, in Python: it has ``parent``."""

    code: str


CHILD = """
import os, signal, sys, time
import msgspec
from megatron_async.errors import ConfigError
from megatron_async.processes.messages import Preparing, Started, Stop
from megatron_async.processes.parent import Parent

class Task(msgspec.Struct, frozen=True, tag=True):
    code: str

parent = Parent(int(sys.argv[1]), Task | Stop)
exec(parent.receive().code)
"""


class Kept:
    """A supervision over children of one kind, and what it has heard."""

    def __init__(self, code: str, most: int = 0, **options: Any) -> None:
        self.heard: list[Said] = []
        self.pids: list[int] = []
        self._code = code
        self.supervision: Supervision[Said] = Supervision(
            "the child", self._start, self.heard.append, Restarts(most, 0.001), **options
        )

    def _start(self) -> ChildProcess[Said]:
        process: ChildProcess[Said] = ChildProcess("a_child", Said, Task(self._code))
        self.pids.append(process.pid)
        return process


@pytest.fixture(autouse=True)
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_SECONDS))


def test_processes_are_started_in_the_kit_alone() -> None:
    """But for what outlives its parent to clean up behind Ray, the wait for several ranks, what is
    measured, and servers that trainers start as their users do."""
    others = {
        path.relative_to(PACKAGE).as_posix(): sorted(imports_of(path) & OF_PROCESSES)
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE / "processes" and imports_of(path) & OF_PROCESSES
    }
    assert others == {
        "replicas/aftermath.py": ["subprocess"],
        "benchmark/measuring/one_rank.py": ["subprocess"],
        "ranks/group.py": ["multiprocessing.connection"],
        "benchmark/measuring/server_load.py": ["multiprocessing"],
        "contrib/transformers/benchmarks/rows.py": ["subprocess"],
        "contrib/trainers/server_process.py": ["subprocess"],
    }
    assert len(list((PACKAGE / "processes").glob("*.py"))) <= 14


def test_one_that_dies_is_started_again_until_it_is_once_too_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept("parent.send(Started()); os._exit(7)", most=2)

    async def test() -> None:
        with caplog.at_level(logging.ERROR):
            said = await kept.supervision.run()
        assert said == "the child has ended with status 7; it is not started again"

    run(test())
    assert kept.heard == [Started()] * 3 == [Started()] * kept.supervision.starts
    assert len(set(kept.pids)) == 3 and kept.supervision.state == "dead"
    assert caplog.messages == ["the child has ended with status 7; it is started again"] * 2


def test_one_that_never_served_is_not_started_again() -> None:
    kept = Kept("os._exit(7)", most=5)

    async def test() -> None:
        assert "it is not started again" in await kept.supervision.run()

    run(test())
    assert kept.supervision.starts == 1 and kept.supervision.process is None


def test_one_that_freezes_once_it_has_served_is_killed() -> None:
    code = "time.sleep(0.3); parent.send(Started()); time.sleep(3600)"
    kept = Kept(code, heartbeat_timeout=0.2)

    async def test() -> None:
        said = await kept.supervision.run()
        assert said.startswith("the child gave no sign of life for 0.2 seconds; it is not")

    run(test())


def test_one_that_freezes_before_it_serves_is_killed() -> None:
    kept = Kept("os.kill(os.getpid(), signal.SIGSTOP)", start_timeout=0.2)

    async def test() -> None:
        said = await kept.supervision.run()
        assert said.startswith("the child gave no sign of life for 0.2 seconds while it started")

    run(test())


def test_one_that_takes_long_to_start_gives_signs_of_life() -> None:
    kept = Kept("parent.doing('waits'); parent.receive(); parent.send(Started()); os._exit(0)")

    async def test() -> None:
        process = kept._start()
        while await process.receive() != Beat("waits"):
            """It imports what it needs."""
        process.send(Stop())
        while (said := await process.receive()) != Started():
            assert said == Beat("waits")
        assert await process.receive() is None
        await process.kill()

    run(test())


def test_one_that_serves_may_prepare_something_for_as_long_as_a_start() -> None:
    code = "parent.send(Started()); parent.send(Preparing()); time.sleep(1); os._exit(7)"
    kept = Kept(code, heartbeat_timeout=0.2)

    async def test() -> None:
        assert "ended with status 7" in await kept.supervision.run()

    run(test())


def test_a_start_that_takes_long_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    start = Start("the child", lambda: now[0])
    with caplog.at_level(logging.INFO):
        for seconds in (0.0, SHOWN_SECONDS - 0.1, SHOWN_SECONDS, SHOWN_SECONDS + 1, 11.0):
            now[0] = 100.0 + seconds
            start.show("loads")
    assert caplog.messages == [
        f"the child starts, for {seconds} seconds now: it loads" for seconds in (5, 11)
    ]


def test_what_keeps_it_from_starting_is_raised_here() -> None:
    kept = Kept("with parent.starting():\n    raise ConfigError('depth=-1; raise it')", most=5)

    async def test() -> None:
        with pytest.raises(ConfigError, match="depth=-1; raise it"):
            await kept.supervision.run()

    run(test())
    assert kept.supervision.starts == 1


def test_one_that_is_told_to_end_is_not_started_again() -> None:
    async def test() -> None:
        ending = asyncio.Event()
        code = "os.kill(os.getpid(), signal.SIGTERM); parent.send(Started()); parent.receive()"
        kept = Kept(code, most=5, ending=ending)
        running = asyncio.create_task(kept.supervision.run())
        while not kept.heard:
            await asyncio.sleep(0.01)
        assert kept.supervision.state == "ready" and kept.supervision.process is not None
        ending.set()
        kept.supervision.process.send(Stop())
        assert await running == "the child was told to end"
        assert kept.supervision.starts == 1

    run(test())


def test_a_child_that_is_killed_is_told_from_one_that_ends() -> None:
    killed = Child("a_child")
    killed.kill()
    assert how_ended(killed) == "was killed by SIGKILL"
    ended = Child("a_child", prepare=lambda own: own.close())  # there is no parent from the start
    assert how_ended(ended) == "ended with status 1" and how_ended(None) == "has hung up"
