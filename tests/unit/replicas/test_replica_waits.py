"""What waits for replicas: their readiness, their last requests, their end, and the roster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from megatron_async.errors import (
    EngineDeadError,
    EngineGivenUpError,
    EngineStalledError,
    ReplicaDiedError,
)
from megatron_async.replicas import engine_replica
from megatron_async.replicas.client import ReplicasClient
from megatron_async.replicas.engine_replica import EngineReplica, ReplicaSettings
from megatron_async.replicas.replica import Replica, sum_of
from megatron_async.replicas.roster import Listing, Member
from megatron_async.serving.messages import (
    Answer,
    Control,
    Endpoint,
    Generate,
    Kept,
    NotStarted,
    Output,
    Outputs,
)
from tests.support.scripted_engine import INFO, ScriptedEngine, link_of, snapshot
from tests.support.served_engine import checked, patience, run

PARAMS = {"num_tokens_to_generate": 5}


class Directory:
    """Says who the members are when a test does."""

    def __init__(self) -> None:
        self._listings: asyncio.Queue[Any] = asyncio.Queue()
        self.last = Listing(0, (), Kept())

    def tell(self, *members: Member) -> None:
        """These are the members now."""
        self.last = Listing(self.last.version + 1, members, Kept())
        self._listings.put_nowait(self.last)

    def fail(self, wrong: Any) -> None:
        """What is said next is no listing, or an error."""
        self._listings.put_nowait(wrong)

    async def changed(self, version: int) -> Listing:
        said = await self._listings.get()
        if isinstance(said, Exception):
            raise said
        listing: Listing = said
        return listing

    async def keep(self, kept: Kept) -> Listing:
        return self.last

    async def expel(self, name: str) -> None:
        raise AssertionError(f"{name} is expelled")


@contextlib.asynccontextmanager
async def replicas(
    *names: str,
) -> AsyncIterator[tuple[ReplicasClient, Directory, dict[str, Member]]]:
    """A client of members whose engines are scripted, and that nobody has greeted yet."""
    directory = Directory()
    members = {name: Member(name, Endpoint.private()) for name in names}
    client = ReplicasClient(directory)
    await client.connect()
    directory.tell(*members.values())
    await until(lambda: len(client._replicas) == len(members))
    try:
        yield client, directory, members
    finally:
        await client.aclose()
        for member in members.values():
            member.endpoint.remove()


async def until(holds: Any) -> None:
    async with patience():
        while not holds():
            await asyncio.sleep(0)


async def settled() -> None:
    """All that can go on without anybody's help has."""
    for _ in range(20):
        await asyncio.sleep(0)


async def generated(client: ReplicasClient, number: int = 1) -> list[Output]:
    return [output async for output in client.generate(Generate(number, [1], checked(PARAMS)))]


# --- readiness ----------------------------------------------------------------------------------


def test_a_replica_that_is_lost_between_its_readiness_and_the_look_is_waited_for_again() -> None:
    """Only its first readiness woke who waited."""

    async def test() -> None:
        async with replicas("a") as (client, _, _):
            replica = client._replicas["a"]
            waits = asyncio.create_task(client.ready())
            await asyncio.sleep(0)
            for _ in range(3):
                replica.client._receive(INFO)
                replica.client._break("it has died")  # before the waiter has looked
                await settled()
                assert not waits.done()
            replica.client._receive(INFO)
            assert (await waits).model_name == INFO.model_name

    run(test())


@pytest.mark.parametrize("is_before", (True, False))
def test_a_replica_that_is_ready_to_serve_later_than_it_answers_is_waited_for(
    is_before: bool,
) -> None:
    """Its weights were lost, and new ones have come."""

    async def test() -> None:
        async with replicas("a") as (client, _, _):
            replica = client._replicas["a"]
            replica.client._receive(msgspec.structs.replace(INFO, not_ready="no weights"))
            if is_before:
                replica.client._receive(INFO)
            waits = asyncio.create_task(client.ready())
            await settled()
            if not is_before:
                assert not waits.done()
                replica.client._receive(INFO)
            await waits

    run(test())


def test_who_waits_for_replicas_that_never_come_is_told_so() -> None:
    async def test() -> None:
        async with replicas() as (client, _, _):
            waits = asyncio.create_task(client.ready())
            await settled()
            client.give_up("Ray has ended")
            for each in (waits, client.ready()):
                with pytest.raises(EngineGivenUpError, match="Ray has ended"):
                    await each

    run(test())


# --- the end of a replica -----------------------------------------------------------------------


def test_a_replica_that_leaves_is_parted_from_with_the_end_of_its_last_request() -> None:
    async def test() -> None:
        async with replicas("a") as (client, directory, members):
            engine = ScriptedEngine(members["a"].endpoint)
            replica = client._replicas["a"]
            identity = await engine.meet(replica.client)
            asked = asyncio.create_task(generated(client))
            _, message = await engine.hear_after_hello()
            assert isinstance(message, Generate)
            directory.tell()
            await until(lambda: replica.leaves)
            await settled()
            assert "a" in client._replicas
            last = Output(message.request_id, 0, [9], finish_reason="stop")
            engine.say(identity, Outputs([last]))
            assert await asked == [last]
            await until(lambda: not client._replicas)
            engine.close()

    run(test())


def test_a_replica_whose_host_is_gone_keeps_nobody_waiting() -> None:
    """It leaves the roster, and its connection stays: its requests waited for ever."""

    async def test() -> None:
        async with replicas("a") as (client, directory, members):
            engine = ScriptedEngine(members["a"].endpoint)
            replica = client._replicas["a"]
            await engine.meet(replica.client)
            asked = asyncio.create_task(generated(client))
            await engine.hear_after_hello()
            directory.tell()
            await until(lambda: replica.leaves)
            link = link_of(replica.client)
            assert link._heard is not None and link._silence is not None
            link._heard -= 1e6
            link._silence._run()
            with pytest.raises(ReplicaDiedError, match="no sign of life"):
                await asked
            await until(lambda: not client._replicas)
            engine.close()

    run(test())


@pytest.mark.parametrize("is_aborted", (False, True))
def test_an_aborted_request_is_not_tried_again_by_another_replica(is_aborted: bool) -> None:
    """Its replica died before it had heard, and a server that was stopped waited for it."""

    async def test() -> None:
        async with replicas("a", "b") as (client, _, members):
            engines = {name: ScriptedEngine(member.endpoint) for name, member in members.items()}
            first, second = client._replicas["a"], client._replicas["b"]
            await engines["a"].meet(first.client)
            asked = asyncio.create_task(generated(client))
            await engines["a"].hear_after_hello()
            second.client._receive(INFO)
            if is_aborted:
                await client.abort(1)
            first.client._break("it has died")
            if is_aborted:
                with pytest.raises(ReplicaDiedError) as died:
                    await asked
                assert not died.value.may_try_again
            else:
                await until(lambda: second.own)
                asked.cancel()
            assert not client._aborted
            for engine in engines.values():
                engine.close()

    run(test())


@pytest.mark.parametrize("end", ("back", "leaves"))
def test_new_weights_wait_for_a_replica_that_comes_back_or_leaves(end: str) -> None:
    async def test() -> None:
        async with replicas("a", "b") as (client, directory, members):
            engines = {name: ScriptedEngine(member.endpoint) for name, member in members.items()}
            first, second = client._replicas["a"], client._replicas["b"]
            identity = await engines["a"].meet(first.client)
            updating = asyncio.create_task(client.command(Control(0, "weights", {"path": "x"})))
            _, message = await engines["a"].hear_after_hello()
            assert isinstance(message, Control)
            engines["a"].say(identity, Answer(message.number, {"weight_version": 1}))
            await until(lambda: client._changing_weights.locked() and not first.client._answers)
            await settled()
            assert not updating.done()
            if end == "leaves":
                directory.tell(members["a"])
                await until(lambda: second.leaves)
            else:
                identity = await engines["b"].meet(second.client)
                _, message = await engines["b"].hear_after_hello()
                assert isinstance(message, Control) and message.name == "weights"
                engines["b"].say(identity, Answer(message.number, {"weight_version": 1}))
            assert await updating == {"weight_version": 1}
            for engine in engines.values():
                engine.close()

    run(test())


@pytest.mark.parametrize("wrong", (None, RuntimeError("Ray is busy"), "no listing"))
def test_a_roster_that_says_something_wrong_is_asked_again(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who followed it ended, and saw no replica come or go any more."""
    monkeypatch.setattr("megatron_async.replicas.client.ASK_AGAIN_SECONDS", 0.0)

    async def test() -> None:
        async with replicas() as (client, directory, _):
            directory.fail(wrong)
            member = Member("late", Endpoint.private())
            directory.tell(member)
            await until(lambda: "late" in client._replicas)
            member.endpoint.remove()

    run(test())


# --- requests that stall ------------------------------------------------------------------------


def test_a_replica_that_stalls_gets_requests_only_where_all_do() -> None:
    async def test() -> None:
        async with replicas("a", "b") as (client, _, _):
            first, second = client._replicas["a"], client._replicas["b"]
            for replica in (first, second):
                replica.client._receive(INFO)
                replica.client._receive(snapshot())
            assert set(client._candidates(())) == {"a", "b"}
            first.client._receive(snapshot("it sleeps"))
            assert set(client._candidates(())) == {"b"}
            assert set(client._candidates({"b"})) == {"a"}
            assert client.snapshot is not None and client.snapshot.stalled is None
            second.client._receive(snapshot("it sleeps too"))
            assert set(client._candidates(())) == {"a", "b"}
            assert client.snapshot.stalled == "it sleeps"
            assert sum_of([snapshot(), snapshot("it sleeps")]).stalled is None

    run(test())


# --- one replica --------------------------------------------------------------------------------


class Supervised:
    """A supervisor whose process has started, and does not answer."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.gave_up = False
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        supervisors.append(self)

    async def start(self) -> None:
        """It has."""

    async def given_up(self) -> str:
        return await self._over

    def give_up(self) -> None:
        self.gave_up = True
        self._over.set_result("the engine process has died too often")

    async def stop(self) -> None:
        """It has ended."""


supervisors: list[Supervised] = []


class Registrar:
    """Takes what a replica says."""

    def __init__(self) -> None:
        self.failures: list[NotStarted] = []

    async def kept(self) -> Kept:
        return Kept()

    async def join(self, member: Member, kept: Kept) -> bool:
        return True

    async def standing(self, name: str) -> str:
        return "member"

    async def leave(self, name: str) -> None:
        """It may."""

    async def fail(self, failure: NotStarted) -> None:
        self.failures.append(failure)


def test_a_replica_whose_engine_dies_before_it_answers_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for an answer for ever, and Ray for the replica."""
    monkeypatch.setattr(engine_replica, "Supervisor", Supervised)

    async def test() -> None:
        supervisors.clear()
        registrar = Registrar()
        replica = EngineReplica("r", ReplicaSettings(model="", config={}), registrar, host="::1")
        starts = asyncio.create_task(replica.start())
        await until(lambda: supervisors)
        await settled()
        assert not starts.done()
        supervisors[0].give_up()
        with pytest.raises(EngineGivenUpError, match="too often"):
            await starts
        assert "too often" in registrar.failures[0].message

    run(test())


def test_a_replica_that_stalls_is_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_replica, "Supervisor", Supervised)

    async def test() -> None:
        supervisors.clear()
        replica = EngineReplica("r", ReplicaSettings(model="", config={}), Registrar(), host="::1")
        starts = asyncio.create_task(replica.start())
        await until(lambda: replica._client is not None and supervisors)
        client = replica._client
        assert client is not None
        client._receive(INFO)
        await starts
        client._receive(snapshot())
        await replica.check()
        client._receive(snapshot("it sleeps"))
        with pytest.raises(EngineStalledError, match="it sleeps"):
            await replica.check()
        supervisors[0].give_up()
        await settled()
        with pytest.raises(EngineDeadError, match="too often"):
            await replica.check()
        await replica.leave()

    run(test())


def test_a_replicas_own_sequences_are_counted_until_they_end() -> None:
    async def test() -> None:
        async with replicas("a") as (client, _, _):
            replica: Replica = client._replicas["a"]
            replica.client._receive(INFO)
            assert replica.is_over
            with replica.carries(2), replica.carries(1):
                assert (replica.own, replica.is_over) == (3, False)
                waits = asyncio.create_task(client._changes.until(lambda: replica.is_over))
                await settled()
                assert not waits.done()
            await waits
            waits = asyncio.create_task(client._changes.until(lambda: replica.leaves))
            await settled()
            replica.leave()
            await waits

    run(test())
