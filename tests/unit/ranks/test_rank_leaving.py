"""How a process leaves torch.distributed: it destroys a group whose ranks are all there, and aborts
one of which a rank may be gone; nothing keeps it from ending."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine import rank_group
from megatron_async.engine.rank_group import StopWhenARankDies
from megatron_async.engine.step_lock import StepLock
from megatron_async.errors import RankDiedError
from megatron_async.models import parallel
from megatron_async.processes.call import Call
from megatron_async.ranks import channel, follower, group, process_group
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import ANSWERS, Done, LoadModel
from megatron_async.ranks.rendezvous.call import OVER
from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How groups are left, on a machine with GPUs."""
    found: list[str] = []
    monkeypatch.setattr(group, "_has_gpus", lambda: True)
    monkeypatch.setattr(process_group, "leave", lambda: found.append("destroyed"))
    monkeypatch.setattr(process_group, "abandon", lambda: found.append("aborted"))
    yield found
    parallel.set_current(None)


def group_of_two() -> tuple[RankGroup, Call]:
    own, other = socket.socketpair()
    rank, call = Call(other.detach()), Call(own.detach())
    made = RankGroup(Layout(2), channel.ConnectionSender([call.say]), {1: call}, {}, 0)
    made._joined = True
    return made, rank


def test_a_group_whose_ranks_are_at_rest_is_destroyed(left: list[str]) -> None:
    made, rank = group_of_two()
    made.tell(LoadModel("tiny", EngineConfig()))
    rank.say(ANSWERS.encode(Done()))
    made.await_answers()
    made.close()
    assert left == ["destroyed"]


def test_a_rank_that_has_not_answered_may_wait_for_what_failed_here(left: list[str]) -> None:
    made, _ = group_of_two()
    made.tell(LoadModel("tiny", EngineConfig()))
    made.close()
    assert left == ["aborted"]


def test_a_rank_that_leaves_as_it_is_told_has_not_died(
    left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be gone before the others have been told that all is over."""
    made, rank = group_of_two()
    (call,) = made._calls.values()
    say = call.say_at_once

    def late(data: bytes) -> None:
        if data == OVER:
            rank.hang_up()
            made._watching.join(PATIENCE_SECONDS)
            assert not made._watching.is_alive()
        say(data)

    monkeypatch.setattr(call, "say_at_once", late)
    made.close()
    assert made.failure is None and left == ["destroyed"]


def test_the_group_of_a_dead_rank_is_aborted_once(left: list[str]) -> None:
    made, rank = group_of_two()
    rank.hang_up()
    assert made._over.wait(PATIENCE_SECONDS)
    made._watching.join(PATIENCE_SECONDS)
    made.close()
    assert left == ["aborted"]


def test_a_group_that_nobody_has_closed_is_aborted(left: list[str]) -> None:
    made, _ = group_of_two()
    thread = made._watching
    del made
    thread.join(PATIENCE_SECONDS)
    assert left == ["aborted"]


def test_a_rank_that_cannot_join_aborts_what_it_has_joined(
    left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(*arguments: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(process_group, "join", join)
    said: list[bytes] = []
    line: Any = SimpleNamespace(say=said.append, wakes=None)
    device: Any = SimpleNamespace(type="cpu")
    with pytest.raises(RuntimeError, match="no memory"):
        follower.meet_rank_0(Layout(2), device, 1, line, None)
    assert left == ["aborted"] and b"no memory" in said[0]


def test_all_communicators_are_aborted_as_one_call_the_first_one_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            called.append(self.name)
            if self.name == "2":
                raise RuntimeError("it has failed before")

        def _get_backend(self, device: torch.device) -> Any:
            if self.name == "1":
                raise RuntimeError("no backend for device type cuda")
            return SimpleNamespace(
                abort=self.abort,
                _group_start=lambda: called.append("("),
                _group_end=lambda: called.append(")"),
            )

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: called.append("waits"))
    groups = [Group(name) for name in "0123"]
    world = SimpleNamespace(pg_names={each: each.name for each in groups})
    monkeypatch.setattr(distributed_c10d, "_world", world)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=groups[0]))
    process_group._abort()
    assert called == ["(", "3", "2", "0", ")", "waits"]
    assert world.pg_names, "who calls a collective meanwhile finds its group"


ENDS = """
import sys, threading
import torch.distributed as dist
from megatron_async.ranks import process_group

dist.is_initialized = lambda: True
process_group._has_nccl = lambda: True
process_group.ABORT_SECONDS = 0.2
process_group._abort = threading.Event().wait
if sys.argv[1] == "at its end":
    import atexit
    atexit.register(process_group.abandon)
else:
    process_group.abandon()
    process_group.abandon()
    assert len(process_group._aborting) == 1
print("said", flush=False)
"""


@pytest.mark.parametrize("when", ("before", "at its end"))
def test_a_process_ends_though_its_device_does_not(when: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, when],
        env=child_environment(),
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (process_group.EXIT_STUCK, "said\n"), ended.stderr


def test_an_abort_that_ends_lets_the_interpreter_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group, "_has_nccl", lambda: True)
    monkeypatch.setattr(process_group, "_abort", lambda: None)
    monkeypatch.setattr(process_group, "_aborting", [])
    process_group.abandon()
    process_group.end_if_stuck()
    assert not any(thread.is_alive() for thread in process_group._aborting)


def test_the_collectives_of_a_cpu_are_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may be in one, and gets the error of its connection."""
    monkeypatch.setattr(process_group, "_abort", lambda: pytest.fail("aborted"))
    monkeypatch.setattr(process_group, "leave", lambda: pytest.fail("left"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:megatron_async")
    process_group.abandon()
    assert not process_group._aborting


class Parts:
    """The parts of an engine over a GPU, whose step a thread is in."""

    def __init__(self) -> None:
        self.lock = StepLock(())
        self.failed: list[BaseException] = []
        device: Any = SimpleNamespace(captures=True, fail=self.failed.append)
        outputs: Any = SimpleNamespace(resolve_futures=lambda: None)
        waiters = SimpleNamespace(wake=lambda: None)
        loop: Any = SimpleNamespace(commands=SimpleNamespace(waiters=waiters))
        runner: Any = None
        group: Any = None
        self.stops = StopWhenARankDies(group, runner, device, self.lock, outputs, loop)


def test_an_engine_whose_thread_waits_in_the_driver_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EndedError(Exception):
        pass

    def end(reason: str) -> None:
        raise EndedError(reason)

    monkeypatch.setattr(process_group, "end_process", end)
    monkeypatch.setattr(rank_group, "LOCK_SECONDS", 0.05)
    parts, error = Parts(), RankDiedError("rank 1 of the model was killed by SIGKILL")
    inside, out = threading.Event(), threading.Event()

    def step() -> None:
        with parts.lock.mutex:
            inside.set()
            out.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(PATIENCE_SECONDS)
    with pytest.raises(EndedError, match="SIGKILL; the GPU waits for it"):
        parts.stops._died(error)
    out.set()
    thread.join(PATIENCE_SECONDS)
    assert parts.failed == [error]
    parts.stops._died(error)  # nobody is inside
    assert parts.lock.stopped is not None and "SIGKILL" in str(parts.lock.stopped)
