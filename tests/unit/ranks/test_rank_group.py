"""Rank 0's hold on the others: who is silent is dead, who is gone is noticed, nobody is kept."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_async.build.model import load_model
from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import ConfigError, RankDiedError
from megatron_async.models import parallel
from megatron_async.processes.call import Call
from megatron_async.processes.watching.heartbeat import BEATS, PREPARING_TIMES, Heartbeats
from megatron_async.ranks import channel, group, messages, process_group, start
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.layout import Layout, unsupported
from megatron_async.ranks.messages import ANSWERS, MESSAGES, Failed, Stop
from megatron_async.ranks.rendezvous import meeting
from megatron_async.ranks.rendezvous.call import BEAT, OVER
from megatron_async.ranks.start import start_group
from tests.support.patience import PATIENCE_SECONDS

CPU = torch.device("cpu")


class Pair:
    """A group of one other rank, which is the other end of a connection, and says what it is
    told to say."""

    def __init__(self, seconds: float) -> None:
        own, other = socket.socketpair()
        self.rank = Call(other.detach())
        self.call = Call(own.detach())
        self.group = RankGroup(
            Layout(2), channel.ConnectionSender([self.call.say]), {1: self.call}, {}, seconds
        )
        self.over = threading.Event()

    def died(self, error: RankDiedError) -> None:
        self.error = str(error)
        self.over.set()

    def joins(self) -> None:
        self.group._joined = True


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process has a group of its own already, of one rank, for other tests' models."""
    monkeypatch.setattr(process_group, "leave", lambda: None)
    yield
    parallel.set_current(None)


def ask(beats: Heartbeats, times: int, *, prepares: bool = False) -> list[bool]:
    return [beats.ask(1, prepares=prepares) for _ in range(times)]


def test_a_rank_that_owes_too_many_answers_is_dead() -> None:
    beats = Heartbeats([1, 2], 8.0)
    assert all(ask(beats, BEATS)) and not beats.ask(1, prepares=False)
    assert beats.ask(2, prepares=False)
    beats.heard(1)
    assert all(ask(beats, BEATS)) and beats.interval * (BEATS + 1) < 10


def test_a_rank_that_loads_or_captures_may_be_silent_for_longer() -> None:
    beats = Heartbeats([1], 8.0)
    assert all(ask(beats, BEATS * PREPARING_TIMES, prepares=True))
    assert not beats.ask(1, prepares=True)


def test_a_pause_of_rank_0_blames_nobody() -> None:
    beats = Heartbeats([1], 8.0)
    beats.begin(100.0)
    assert beats.wait_seconds(100.2) == pytest.approx(0.6)
    assert beats.wait_seconds(5000.0) == 0  # one question is due, not thousands
    beats.begin(5000.0)
    assert beats.wait_seconds(5000.0) == pytest.approx(0.8)
    assert Heartbeats([1], 0.0).wait_seconds(5000.0) == float("inf")


def test_a_silent_rank_ends_the_group_and_wakes_who_waits_to_send() -> None:
    """It reads nothing, so that a message over its connection is stuck in the midst."""
    pair = Pair(0.5)
    pair.joins()
    pair.group.when_it_dies(1, pair.died)
    stuck = messages.Masks(1, bytes(1 << 22))
    with pytest.raises(RankDiedError, match="rank 1 of the model has not answered for rank_time"):
        while True:  # the message itself is lost without an error
            pair.group.tell(stuck)
    assert pair.over.wait(PATIENCE_SECONDS) and "has not answered" in pair.error
    pair.group.close()
    pair.group.close()


def test_a_rank_that_answers_lives() -> None:
    pair = Pair(30.0)
    pair.joins()
    pair.group._heartbeats.interval = 1e6
    for _ in range(BEATS + 2):
        pair.group._heartbeats._next = 0.0  # one question more, and no other one before the answer
        assert pair.rank.recv_bytes() == BEAT
        pair.rank.say(BEAT)
    assert pair.group.is_alive
    pair.group.close()


def test_a_rank_that_dies_while_the_others_meet_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(8.0)
    over = threading.Event()

    def meet(*args: object) -> int:
        pair.rank.say(ANSWERS.encode(Failed("failed: OutOfMemoryError: too little")))
        over.wait(PATIENCE_SECONDS)
        return 0

    monkeypatch.setattr(process_group, "join", meet)
    monkeypatch.setattr(group, "_unfinished", [])
    with pytest.raises(RankDiedError, match="rank 1 of the model failed: OutOfMemoryError: too"):
        pair.group.join(CPU, dist.HashStore())
    with pytest.raises(ConfigError, match="cannot begin again"):
        start_group(Layout(2), "cpu", 8.0)
    over.set()
    pair.group.close()


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not answered")],
)
def test_a_rank_is_watched_from_its_first_line_on(
    number: signal.Signals, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has imported anything, it has no more than been started."""
    spawn, over = start._spawn, threading.Event()
    pids: list[int] = []

    def spawn_and_signal(*args: Any) -> Any:
        process, call = spawn(*args)
        os.kill(process.pid, number)
        pids.append(process.pid)
        return process, call

    monkeypatch.setattr(start, "_spawn", spawn_and_signal)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(process_group, "join", lambda *args: over.wait(PATIENCE_SECONDS))
    monkeypatch.setattr(group, "_unfinished", [])
    before = set(Path(tempfile.gettempdir()).glob("megatron-async-*"))
    with pytest.raises(RankDiedError, match=f"rank 1 of the model {says}"):
        start_group(Layout(2), "cpu", 0.01 if number == signal.SIGSTOP else 0)
    over.set()
    assert len(pids) == 1 and not psutil.pid_exists(pids[0])
    assert set(Path(tempfile.gettempdir()).glob("megatron-async-*")) <= before


def test_a_group_that_nobody_has_any_more_ends() -> None:
    pair = Pair(0.5)
    gone = weakref.ref(pair.group)
    pair.joins()
    thread = pair.group._watching
    del pair.group
    gc.collect()
    thread.join(PATIENCE_SECONDS)
    assert gone() is None and not thread.is_alive()
    with pytest.raises(EOFError):  # so that the rank ends too
        while True:
            assert pair.rank.recv_bytes() == BEAT


def test_a_group_that_is_closed_says_so_before_it_hangs_up() -> None:
    """So that no rank which is slow to read takes rank 0 for dead."""
    pair = Pair(0)
    pair.joins()
    pair.group.close()
    assert [pair.rank.recv_bytes() for _ in range(2)] == [MESSAGES.encode(Stop()), OVER]
    with pytest.raises(EOFError):
        pair.rank.recv_bytes()


def test_a_second_group_is_refused_and_the_first_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_spawn", lambda *args: pytest.fail("started"))
    monkeypatch.setattr(parallel, "current", lambda: object())
    with pytest.raises(ConfigError, match="leads the ranks of a model already"):
        start_group(Layout(2), "cpu", 8.0)
    monkeypatch.setattr(parallel, "current", lambda: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="initialised in this process already"):
        start_group(Layout(2), "cpu", 8.0)


def test_ranks_of_another_version_are_refused() -> None:
    store = dist.HashStore()
    store.set("version 1", "0.0.1")
    store.set("host 1", meeting.host_identity())
    with pytest.raises(ConfigError, match=r"rank 1 runs megatron-async 0\.0\.1 and rank 0 "):
        meeting.accept_all(store, 2, lambda: pytest.fail("share"), lambda: None)


class Changing(np.ndarray[Any, Any]):
    """Words that others write while they are looked at: numpy counts and then finds, and raises
    where both differ, once in some thousand messages on a busy machine."""

    def nonzero(self) -> Any:
        raise RuntimeError("number of non-zero array elements changed during function execution")


def test_a_follower_may_fall_asleep_while_others_are_woken() -> None:
    woken: list[int] = []
    sender = channel.RingSender(3, woken.append, lambda: None, size=1 << 10)
    sender._ring.asleep[1:] = 1
    sender._ring.asleep = sender._ring.asleep.view(Changing)
    sender.send(b"message")
    sender.send(b"message")
    assert woken == [1, 2]


def test_rank_timeout() -> None:
    assert EngineConfig(rank_timeout_seconds=0).rank_timeout_seconds == 0
    for wrong in (-1, 0.5, float("nan"), "8", True, 10**9):
        with pytest.raises(ConfigError, match="rank_timeout_seconds"):
            EngineConfig(rank_timeout_seconds=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3"}, "RANK=1 and WORLD_SIZE=3 are set.*those of TP2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2 are set"),
        ({"RANK": "0", "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is set, but not as a launcher"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is set, but not as a launcher"),
        ({"RANK": "1"}, "not set as a launcher does .*WORLD_SIZE expected"),
    ],
)
def test_an_environment_left_over_is_refused_before_anybody_is_waited_for(
    found: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if "WORLD_SIZE" in found:
        monkeypatch.setattr(dist, "rendezvous", lambda *args: pytest.fail("waits"))
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        meeting.environment_store(Layout(2))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    (
        ("tiny", {"tensor": 64}, r"num_attention_heads=\d+ does not divide by .* 64"),
        ("tiny", {"tensor": 3}, r"num_attention_heads=\d+ does not divide by .* 3"),
        ("tiny", {"pipeline": 900}, r"num_layers=.* too few for pipeline_model_parallel_size=900"),
        ("tiny", {"expert": 300}, "expert_model_parallel_size=300, but the model has no experts"),
        ("tiny-moe", {"expert": 300}, r"num_moe_experts=.*expert_model_parallel_size=300"),
        ("random:tiny-nemotron-h", {"tensor": 2}, "hybrid_override_pattern"),
    ),
)
def test_sizes_that_do_not_suit_the_model_start_no_process(
    model: str, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_spawn", starts_nothing)
    names = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    with pytest.raises(ConfigError, match=message):
        load_model(model, EngineConfig(device="cpu", **names))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", (Layout(64), Layout(1, 5, 100), Layout(1, 1, 1024)))
def test_more_ranks_than_the_machine_has_room_for_are_not_started(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_spawn", starts_nothing)
    monkeypatch.setattr(start.os, "cpu_count", lambda: 24)
    with pytest.raises(ConfigError, match=f"{layout.world_size} processes, .* the most is 24"):
        start_group(layout, "cpu", 8.0)
    with pytest.raises(ConfigError, match=f"{layout.world_size} GPUs and there are"):
        start_group(layout, "cuda", 8.0)


def starts_nothing(*arguments: object) -> None:
    raise AssertionError("a process was started")


def test_as_many_ranks_as_cores_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_spawn", starts_nothing)
    monkeypatch.setattr(start.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(start.os, "cpu_count", lambda: 24)
    with pytest.raises(AssertionError, match="a process was started"):
        start_group(Layout(24), "cpu", 8.0)


def test_more_micro_batches_than_stages_have_messages_for_are_refused() -> None:
    for count, reasons in ((16, []), (17, ["pipeline_micro_batches=17 is more than 16"])):
        config = EngineConfig(pipeline_model_parallel_size=2, pipeline_micro_batches=count)
        said = list(unsupported(Layout(pipeline=2), config))
        assert len(said) == len(reasons)
        assert all(each.startswith(reason) for each, reason in zip(said, reasons, strict=True))
