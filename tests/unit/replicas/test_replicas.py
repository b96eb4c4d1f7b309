"""Several engines behind one front end, without Ray: who gets a request, and what becomes of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.cache.block_hash import block_hash, prefix_hashes
from megatron_async.cli import serve
from megatron_async.cli.serve_replicas import check_replica_options
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    QueueFullError,
    ReplicaDiedError,
    RequestError,
)
from megatron_async.replicas.client import ReplicasClient
from megatron_async.replicas.metrics import ReplicasCollector
from megatron_async.replicas.prefix_index import PrefixIndex
from megatron_async.replicas.replica import summed
from megatron_async.replicas.roster import LAPSE_SECONDS, Listing, Member, Roster
from megatron_async.replicas.routing import BLOCK_TOKENS, PrefixRouter
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.front_end.generation import Generator
from megatron_async.serving.front_end.metrics import ServerMetrics
from megatron_async.serving.front_end.no_tokenizer import NoTokenizer
from megatron_async.serving.messages import Control, Endpoint, Generate, Kept, Output
from megatron_async.serving.page.live_feed import LiveFeed
from tests.support.engines import hash_engine
from tests.support.served import NotedMetrics
from tests.support.served_engine import checked, engine_in_thread, patience, run

LONG = {"num_tokens_to_generate": 100, "termination_id": -1, "temperature": 0.0}
SHORT = {**LONG, "num_tokens_to_generate": 3}


# --- who gets a prompt ------------------------------------------------------------------------


def test_hashes_tell_prefixes_apart_and_are_the_same_everywhere() -> None:
    tokens = list(range(10))
    hashes = prefix_hashes(tokens, 4)
    assert hashes == [block_hash(None, tokens[:4]), block_hash(hashes[0], tokens[4:8])]
    assert hashes[0] == 0x75ABE6D0191F7770
    assert prefix_hashes(tokens, 4, most=1) == hashes[:1]
    assert prefix_hashes([0, 1, 2, 3, 9, 5, 6, 7], 4)[0] == hashes[0]
    assert prefix_hashes([9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != hashes[1]


def test_the_index_knows_the_longest_prefix_of_each() -> None:
    index = PrefixIndex(100)
    index.add("a", [1, 2, 3])
    index.add("b", [1, 2])
    index.add("c", [7])
    assert index.match([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert index.match([1, 9]) == {"a": 1, "b": 1}
    assert index.match([9]) == {}
    index.keep_only(["b"])
    assert index.match([1, 2, 3]) == {"b": 2} and len(index) == 2


def test_the_index_forgets_the_end_of_what_was_used_longest_ago() -> None:
    index = PrefixIndex(4)
    index.add("a", [1, 2, 3])
    index.add("a", [7, 8])
    assert len(index) == 4
    assert index.match([1, 2, 3]) == {"a": 2} and index.match([7, 8]) == {"a": 2}


def prompt(start: int, blocks: int = 3) -> list[int]:
    return list(range(start, start + blocks * BLOCK_TOKENS))


def test_a_prefix_goes_where_it_was_until_that_has_too_much_to_do() -> None:
    router = PrefixRouter(most_extra=4, seed=1)
    idle = dict.fromkeys("abcd", 0)
    home = router.choose(prompt(0), idle)
    others = [name for name in idle if name != home]
    assert all(router.choose([*prompt(0), i], idle | {home: 4}) == home for i in range(20))
    assert router.choose([*prompt(0), 5], idle | {home: 5}) in others
    assert router.choose(prompt(0), dict.fromkeys(others, 3)) in others  # it is gone


def test_prompts_without_a_known_prefix_go_to_the_lighter_of_two() -> None:
    router = PrefixRouter(seed=2)
    loads = {"a": 0, "b": 0, "c": 50}
    for start in range(300):
        loads[router.choose(prompt(1000 * start), loads)] += 1
    assert max(loads.values()) - min(loads.values()) <= 12


def test_a_few_prefixes_end_up_at_homes_of_their_own_under_load() -> None:
    """Eight prefixes over four replicas: nearly all requests find theirs, and none is buried."""
    router, loads = PrefixRouter(most_extra=8, seed=3), dict.fromkeys("abcd", 0)
    running: list[str] = []
    given: list[tuple[int, str]] = []
    for number in range(800):
        which = number % 8
        name = router.choose([*prompt(1000 * which), number], loads)
        given.append((which, name))
        running.append(name)
        loads[name] += 1
        if len(running) > 24:
            loads[running.pop(0)] -= 1
        assert max(loads.values()) - min(loads.values()) <= 16
    homes = {which: [n for w, n in given if w == which] for which in range(8)}
    kept = sum(max(names.count(n) for n in set(names)) for names in homes.values())
    assert kept > 0.8 * len(given)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="most_extra=-1"):
        PrefixRouter(most_extra=-1)
    with pytest.raises(ConfigError, match="retries=-1"):
        ReplicasClient(Known(), retries=-1)


# --- who is there -----------------------------------------------------------------------------


def test_nobody_joins_without_the_weights_that_all_have() -> None:
    roster = Roster()
    one, two = (Member(name, Endpoint(name, b"")) for name in ("one", "two"))
    assert roster.join(one, Kept())
    new = Kept(("/new",), 1)
    assert [m.name for m in roster.keep(new).members] == ["one"]
    assert not roster.join(two, Kept())
    assert roster.join(two, new) and roster.standing("two") == "member"
    roster.expel("one")
    assert roster.standing("one") == "expelled"
    assert [m.name for m in roster.listing().members] == ["two"]
    again = Roster()  # its process has died, and members join again with what they know
    assert again.join(one, Kept())
    assert again.join(two, new) and again.kept == new and again.standing("one") == "unknown"
    assert not again.join(one, Kept())


def test_a_member_that_gives_no_sign_of_life_is_gone_until_it_joins_again() -> None:
    now = 0.0
    roster = Roster(lambda: now)
    for name in ("one", "two"):
        assert roster.join(Member(name, Endpoint(name, b"")), Kept())
    now = LAPSE_SECONDS - 1
    assert roster.standing("two") == "member"
    now = LAPSE_SECONDS + 1
    assert [m.name for m in roster.listing().members] == ["two"]
    assert roster.standing("one") == "unknown"
    assert roster.join(Member("one", Endpoint("one", b"")), Kept())
    assert len(roster.listing().members) == 2


def test_a_change_is_told_at_once_and_silence_ends() -> None:
    async def test() -> None:
        roster = Roster()
        first = await roster.changed(0, 60)
        waiting = asyncio.create_task(roster.changed(first.version, 60))
        await asyncio.sleep(0)
        assert roster.join(Member("one", Endpoint("one", b"")), Kept())
        async with patience():
            listing = await waiting
        assert [m.name for m in listing.members] == ["one"]
        assert await roster.changed(listing.version, 0.001) == listing

    run(test())


# --- one client of several engines ------------------------------------------------------------


class Known:
    """A roster in this process, old enough to know all members."""

    def __init__(self) -> None:
        times = iter([0.0])
        self.roster = Roster(lambda: next(times, LAPSE_SECONDS))

    async def changed(self, version: int) -> Listing:
        return await self.roster.changed(version, 60)

    async def keep(self, kept: Kept) -> Listing:
        return self.roster.keep(kept)

    async def expel(self, name: str) -> None:
        self.roster.expel(name)


def _takes_salts(engine: DynamicInferenceEngine, missing: str) -> None:
    """Weights of the path "salt-N"."""
    update = engine.update_weights

    def of_path(path: str, *, recompute_kv_cache: bool = True) -> None:
        if path in (missing, "salt-x"):
            raise CheckpointError(f"{path} is not there")
        update({"salt": int(path.removeprefix("salt-"))}, recompute_kv_cache=recompute_kv_cache)

    engine.update_weights = of_path  # type: ignore[method-assign, assignment]


class Fleet:
    """Hash engines in threads of this process, each with a name."""

    def __init__(self, directory: Known) -> None:
        self.directory = directory
        self.lacks: dict[str, str] = {}
        """Paths that are not there on a replica's host."""
        self._stacks: dict[str, contextlib.ExitStack] = {}

    def add(self, name: str, *, max_queue: int | None = None) -> None:
        stack = self._stacks[name] = contextlib.ExitStack()
        engine = hash_engine(1, max_requests=4, block_size_tokens=4, block_count=400, debug=False)
        _takes_salts(engine, self.lacks.get(name, ""))
        endpoint = stack.enter_context(engine_in_thread(engine, max_queue=max_queue))
        self.directory.roster.join(Member(name, endpoint), Kept())

    def end(self, name: str) -> None:
        """Its process is gone, and nobody has said so."""
        self._stacks.pop(name).close()

    def close(self) -> None:
        for name in list(self._stacks):
            self.end(name)


@contextlib.asynccontextmanager
async def fleet(*names: str, **options: Any) -> AsyncIterator[tuple[Fleet, ReplicasClient]]:
    directory = Known()
    engines = Fleet(directory)
    with contextlib.closing(engines):
        for name in names:
            engines.add(name)
        client = ReplicasClient(directory, router=PrefixRouter(seed=5), **options)
        await client.connect()
        try:
            async with patience():
                await client.ready()
                while sum(client.states.values()) < len(names):
                    await asyncio.sleep(0.001)
            yield engines, client
        finally:
            await client.aclose()


async def asked(
    client: ReplicasClient, number: int, tokens: list[int], params: dict[str, Any]
) -> list[Output]:
    return [output async for output in client.generate(Generate(number, tokens, checked(params)))]


def test_requests_are_spread_and_bring_what_one_engine_brings() -> None:
    async def test() -> None:
        async with fleet("one", "two", "three") as (_, client):
            asking = [asked(client, i, [i, 7], LONG) for i in range(12)]
            answers = await asyncio.gather(*asking)
            totals = {n: s.counters for n, s in client.snapshots.items()}
            while sum(c["tokens_committed"] for c in totals.values()) < 1200:
                await asyncio.sleep(0.01)
                totals = {n: s.counters for n, s in client.snapshots.items()}
            assert all(c["tokens_committed"] >= 200 for c in totals.values())
            assert client.snapshot is not None
            assert client.snapshot.counters["tokens_committed"] == 1200
            page = ServerMetrics("m", ReplicasCollector("m", client)).text().decode()
            assert 'generation_tokens_total{model_name="m",replica="two"}' in page
            assert page.count("# TYPE megatron_async_generation_tokens_total") == 1
            assert 'replicas_ready{model_name="m"} 3.0' in page
            info, picture = await client.info(), await _pictured(client)
            assert (info.max_requests, info.block_count) == (3 * 4, 3 * 400)
            assert (picture["replicas"], picture["max_requests"]) == ([3, 3], 12)
            assert picture["snapshot"]["counters"]["tokens_committed"] == 1200
        async with fleet("one") as (_, client):
            for i in range(0, 12, 4):
                alone = await asked(client, i, [i, 7], LONG)
                assert _tokens(alone) == _tokens(answers[i])

    run(test())


async def _pictured(client: ReplicasClient) -> dict[str, Any]:
    """What the page at ``/`` is told first."""
    generator = SimpleNamespace(client=client, draining=False, command=_nothing)
    front: Any = SimpleNamespace(generator=generator, config=SimpleNamespace(model_names=["m"]))
    async with contextlib.aclosing(LiveFeed(front).events()) as events:
        async for event in events:
            picture: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
            return picture
    raise AssertionError("no event")


async def _nothing(name: str) -> dict[str, Any]:
    return {}


def _tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def _dies_under(engines: Fleet, client: ReplicasClient, count: int) -> list[Any]:
    """Answers of requests to two replicas, one of which dies when each has sent a token."""
    begun = 0

    async def one(number: int) -> list[Output]:
        nonlocal begun
        outputs: list[Output] = []
        async for output in client.generate(Generate(number, [number], checked(LONG))):
            begun += not outputs
            outputs.append(output)
        return outputs

    tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
    while begun < count:
        await asyncio.sleep(0)
    await asyncio.to_thread(engines.end, "one")
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_requests_that_have_sent_something_fail_with_their_replica() -> None:
    async def test() -> None:
        async with fleet("one", "two", retries=5) as (engines, client):
            answers = await _dies_under(engines, client, 8)
            dead = [a for a in answers if isinstance(a, EngineDeadError)]
            assert 0 < len(dead) < 8
            assert all("the replica that served this request has died" in str(e) for e in dead)
            assert all(len(_tokens(a)) == 100 for a in answers if isinstance(a, list))
            assert client.retried == 0 and client.state == "ready"
            assert len(_tokens(await asked(client, 99, [1], LONG))) == 100

    run(test())


@pytest.mark.parametrize("retries", [0, 1])
def test_requests_of_which_nothing_was_sent_are_tried_again_by_option(retries: int) -> None:
    async def test() -> None:
        async with fleet("one", "two", retries=retries) as (engines, client):
            await client.command(Control(0, "suspend"))
            tasks = [asyncio.ensure_future(asked(client, i, [i], SHORT)) for i in range(6)]
            while len(client._running) < 6:
                await asyncio.sleep(0)
            await client._replicas["two"].command("resume")
            await asyncio.to_thread(engines.end, "one")
            async with patience():
                answers = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [a for a in answers if isinstance(a, BaseException)]
            if retries:
                assert not failed and 0 < client.retried < 6
                assert all(len(_tokens(a)) == 3 for a in answers)
            else:
                assert failed and all(isinstance(e, EngineDeadError) for e in failed)
                assert client.retried == 0

    run(test())


@pytest.mark.parametrize("retries", [0, 1])
def test_answers_that_are_not_streamed_begin_again_though_they_had_tokens(retries: int) -> None:
    """They failed, and their clients had seen nothing of them."""

    async def test() -> None:
        async with fleet("one", "two", retries=retries) as (engines, client):
            tokenizer: Any = NoTokenizer()
            generator = Generator(client, tokenizer, NotedMetrics())
            params = [SamplingParams(**LONG) for _ in range(6)]
            jobs = [await generator.job([i], each, names={}) for i, each in enumerate(params)]
            tasks = [asyncio.ensure_future(generator.whole(job)) for job in jobs]
            while not all(job.generated for job in jobs):
                await asyncio.sleep(0)
            await asyncio.to_thread(engines.end, "one")
            async with patience():
                answers = await asyncio.gather(*tasks, return_exceptions=True)
            if not retries:
                failed = [a for a in answers if isinstance(a, BaseException)]
                assert failed and all(isinstance(e, ReplicaDiedError) for e in failed)
                return
            assert 0 < client.retried == sum(job.deaths for job in jobs) < 6
            assert not [answer for answer in answers if isinstance(answer, BaseException)]
            assert [job.generated for job in jobs] == [100] * 6
            for number, answer in enumerate(answers):
                assert isinstance(answer, list)
                alone = await asked(client, 100 + number, [number], LONG)
                assert answer[0].token_ids == _tokens(alone)

    run(test())


def test_a_full_replica_is_passed_over_and_all_full_ones_say_so() -> None:
    async def test() -> None:
        directory = Known()
        engines = Fleet(directory)
        with contextlib.closing(engines):
            for name in ("one", "two"):
                engines.add(name, max_queue=0)
            client = ReplicasClient(directory, router=PrefixRouter(most_extra=100))
            await client.connect()
            async with patience():
                while sum(client.states.values()) < 2:
                    await asyncio.sleep(0.001)
                await client.command(Control(0, "suspend"))
                same = [i % 60 for i in range(70)]  # for which one of them is the favourite
                tasks = [asyncio.ensure_future(asked(client, i, same, SHORT)) for i in range(9)]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                with pytest.raises(QueueFullError):
                    done.pop().result()
                await client.command(Control(0, "resume"))
                answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(a, QueueFullError) for a in answers].count(True) == 1
            await client.aclose()

    run(test())


def test_replicas_come_and_go_without_a_lost_request() -> None:
    async def test() -> None:
        async with fleet("one") as (engines, client):
            running = asyncio.ensure_future(asked(client, 1, [1], LONG))
            while not client._running:
                await asyncio.sleep(0)
            await asyncio.to_thread(engines.add, "two")
            engines.directory.roster.leave("one")
            async with patience():
                while not client.states.get("two") or client.states["one"]:
                    await asyncio.sleep(0.001)
                await asked(client, 2, [2], SHORT)
                assert len(_tokens(await running)) == 100
                while "one" in client.states:
                    await asyncio.sleep(0.01)
            with pytest.raises(RequestError, match="temperature"):
                await asked(client, 3, [3], {"temperature": -1.0})

    run(test())


def test_a_new_roster_takes_nobody_away_before_it_knows_all() -> None:
    async def test() -> None:
        async with fleet("one", "two") as (engines, client):
            now = 0.0
            known = engines.directory.roster.listing().members
            engines.directory.roster = Roster(lambda: now)
            await client._take_over(engines.directory.roster.listing())
            assert list(client.states.values()) == [True, True]
            engines.directory.roster.join(known[0], Kept())
            now = LAPSE_SECONDS
            engines.directory.roster.join(known[0], Kept())
            await client._take_over(engines.directory.roster.listing())
            assert sorted(client.states.values()) == [False, True]

    run(test())


def test_weights_change_one_replica_after_the_other_without_a_lost_request() -> None:
    async def test() -> None:
        async with fleet("one", "two", "three") as (engines, client):
            before = await asked(client, 0, [5, 6], SHORT)
            tasks = [asyncio.ensure_future(asked(client, i, [i], LONG)) for i in range(1, 13)]
            while len(client._running) < 12:
                await asyncio.sleep(0)
            change = client.command(Control(0, "weights", {"path": "salt-3"}))
            again = client.command(Control(0, "weights", {"path": "salt-4"}))
            changed, refused = await asyncio.gather(change, again, return_exceptions=True)
            assert changed == {"weight_version": 1} and isinstance(refused, BusyError)
            answers = await asyncio.gather(*tasks)
            assert all(len(_tokens(answer)) == 100 for answer in answers)
            new = [
                _tokens([o async for o in r.client.generate(Generate(99, [5, 6], checked(SHORT)))])
                for r in client._replicas.values()
            ]
            assert new[0] == new[1] == new[2] != _tokens(before)
            kept = engines.directory.roster.kept
            assert kept == Kept(("salt-3",), 1)
            with pytest.raises(RequestError, match="salt-x"):
                await client.command(Control(0, "weights", {"path": "salt-x"}))
            assert engines.directory.roster.kept == kept and client.state == "ready"

    run(test())


def test_a_replica_that_cannot_have_new_weights_is_replaced() -> None:
    async def test() -> None:
        async with fleet("one") as (engines, client):
            engines.lacks["two"] = "salt-2"
            await asyncio.to_thread(engines.add, "two")
            async with patience():
                while sum(client.states.values()) < 2:
                    await asyncio.sleep(0.001)
            with pytest.raises(RequestError, match=r"1 of 2 replicas .* two: salt-2 is not there"):
                await client.command(Control(0, "weights", {"path": "salt-2"}))
            assert engines.directory.roster.standing("two") == "expelled"
            async with patience():
                while client.states.get("two"):
                    await asyncio.sleep(0.001)
            assert len(_tokens(await asked(client, 1, [1], SHORT))) == 3

    run(test())


def test_without_replicas_it_is_said_what_is_missing() -> None:
    async def test() -> None:
        client = ReplicasClient(Known())
        await client.connect()
        assert client.state == "starting" and client.snapshot is None
        with pytest.raises(EngineDeadError, match="no replica serves now"):
            client.check_ready()
        with pytest.raises(EngineDeadError, match="no replica has started"):
            await client.info()
        client.give_up("it is over")
        with pytest.raises(EngineDeadError, match="it is over"):
            await asked(client, 0, [1], SHORT)
        await client.aclose()

    run(test())


def test_sums_are_by_name_and_place() -> None:
    one = {"a": 1, "by": {"x": 1}, "places": [1]}
    assert summed([one, {"a": 2, "by": {"y": 2}, "places": [1, 5]}]) == {
        "a": 3,
        "by": {"x": 1, "y": 2},
        "places": [2, 5],
    }


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--max-replicas 3", "--max-replicas does nothing without --replicas"),
        ("--ray-address auto", "--ray-address does nothing without --replicas"),
        ("--replicas 3 --max-replicas 2", "--max-replicas 2 is below --replicas 3"),
        ("--replicas 2 --replica-target-requests 4", "does nothing without --max-replicas"),
        ("--replicas 2 --api-server-count 2", "api-server-count 2 is for one engine.*leave it out"),
        ("--replicas 2 --server-dev-mode", "server-dev-mode is for one engine.*leave it out"),
        ("--replicas 2 --enable-sleep-mode", "enable-sleep-mode is for one engine"),
        ("--replicas 2 --device cuda:1", "--device cuda:1 is one GPU"),
    ],
)
def test_options_that_contradict_each_other(options: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_command(parser.add_subparsers())
    args = parser.parse_args(["serve", "--model", "tiny", *options.split()])
    with pytest.raises(ConfigError, match=said):
        check_replica_options(args)


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parser = argparse.ArgumentParser()
    serve.add_command(parser.add_subparsers())
    args = parser.parse_args(["serve", "--model", "tiny", "--replicas", "2"])
    with pytest.raises(ConfigError, match=r"install megatron-async\[replicas\]"):
        check_replica_options(args)
