"""What a front end waits for when it waits for the engine's process, and that none of it is lost:
events at each point between a look and the wait, and ends that nobody announces."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import (
    BusyError,
    EngineDeadError,
    EngineGivenUpError,
    EngineStoppedError,
)
from megatron_async.serving import supervisor
from megatron_async.serving.engine_side.control_threads import MOST
from megatron_async.serving.engine_side.live_requests import ConnectedFrontEnd, LiveRequests, Route
from megatron_async.serving.engine_side.output_socket import OutputSocket
from megatron_async.serving.front_end import engine_client, engine_link
from megatron_async.serving.front_end.engine_client import EngineClient, Mailbox
from megatron_async.serving.front_end.engine_link import Link
from megatron_async.serving.http.changes import Changes
from megatron_async.serving.http.http_server import connected
from megatron_async.serving.messages import (
    Answer,
    Bye,
    Endpoint,
    FromEngine,
    Generate,
    Hello,
    Launch,
    Output,
    Outputs,
)
from tests.support.engines import hash_engine
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_engine import INFO, MILLISECONDS, ScriptedEngine, link_of, snapshot
from tests.support.served_engine import (
    client_of,
    control,
    engine_in_thread,
    outputs_of,
    patience,
    run,
)

PARAMS = {"num_tokens_to_generate": 5, "termination_id": -1, "temperature": 0.0}


# --- waiting for changes ----------------------------------------------------------------------


def test_a_change_before_a_wait_or_in_it_ends_it_and_one_that_is_taken_back_does_not() -> None:
    async def test() -> None:
        changes, state = Changes(), {"holds": True}
        await changes.until(lambda: state["holds"])  # before
        state["holds"] = False
        waits = asyncio.create_task(changes.until(lambda: state["holds"]))
        state["holds"] = True  # between the call and its first look
        await asyncio.sleep(0)
        assert waits.done()
        state["holds"] = False
        waits = asyncio.create_task(changes.until(lambda: state["holds"]))
        await asyncio.sleep(0)
        state["holds"] = True
        changes.tell()
        state["holds"] = False  # before the waiter has looked again
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waits.done()
        state["holds"] = True
        changes.tell()
        await waits

    run(test())


def test_who_leaves_a_wait_does_not_take_the_change_from_others() -> None:
    async def test() -> None:
        changes, state = Changes(), {"holds": False}
        leaves, *stay = (
            asyncio.create_task(changes.until(lambda: state["holds"])) for _ in range(3)
        )
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.wait([leaves])
        state["holds"] = True
        changes.tell()
        stay[0].cancel()  # while it is being woken
        await stay[1]

    run(test())


POINTS = ("before", "at once", "waiting", "woken")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("event", ("output", "failure"))
def test_a_mailbox_hands_out_what_comes_at_any_point(point: str, event: str) -> None:
    async def test() -> None:
        mailbox, output = Mailbox(), Output(1, 0, [7])

        def happen() -> None:
            if event == "output":
                mailbox.put(output)
            else:
                mailbox.fail(EngineDeadError("it has died"))

        if point == "before":
            happen()
        takes = asyncio.create_task(mailbox.take())
        if point == "at once":
            happen()
        await asyncio.sleep(0)
        if point == "waiting":
            happen()
        if point == "woken":
            mailbox.put(output)
            happen()  # before the waiter has gone on
        if event == "output" or point == "woken":
            assert len(await takes) == 1
        if event == "failure":
            with pytest.raises(EngineDeadError):
                await (mailbox.take() if point == "woken" else takes)

    run(test())


# --- an engine process that says what a test wants --------------------------------------------


@contextlib.asynccontextmanager
async def met() -> AsyncIterator[tuple[ScriptedEngine, EngineClient, bytes]]:
    """An engine and a client that it has answered, and the client's name."""
    endpoint = Endpoint.private()
    engine, client = ScriptedEngine(endpoint), EngineClient(endpoint)
    await client.connect()
    try:
        yield engine, client, await engine.meet(client)
    finally:
        await client.aclose()
        engine.close()
        endpoint.remove()


async def generated(client: EngineClient) -> list[Output]:
    return await outputs_of(client, [1], PARAMS)


@pytest.mark.parametrize("order", ("end first", "words first", "end alone"))
def test_an_engine_that_dies_as_it_answers_is_not_taken_for_one_that_serves(order: str) -> None:
    """The client counted it as ready, and the next process does not know that client."""

    async def test() -> None:
        endpoint = Endpoint.private()
        engine, client = ScriptedEngine(endpoint), EngineClient(endpoint)
        await client.connect()
        identity = await engine.greeted(client)
        link = link_of(client)
        # From here to the order in question the event loop does nothing.
        if order != "end alone":
            engine.say(identity, INFO)
            while not link._outputs.poll(MILLISECONDS):
                pass
        engine.close()
        assert any(monitor.poll(MILLISECONDS) for monitor in link._monitors)
        readable, changed = link._readable, link._changed
        for look in (readable, changed) if order == "words first" else (changed, readable):
            look()
        assert client.state != "ready"
        engine = ScriptedEngine(endpoint)
        assert await engine.meet(client) != identity
        asked = asyncio.create_task(generated(client))
        identity, message = await engine.hear_after_hello()
        assert isinstance(message, Generate)
        engine.say(identity, Outputs([Output(message.request_id, 0, [9], finish_reason="stop")]))
        (output,) = await asked
        assert output.token_ids == [9]
        await client.aclose()
        engine.close()
        endpoint.remove()

    run(test())


def test_what_an_engine_says_before_it_dies_is_heard() -> None:
    async def test() -> None:
        async with met() as (engine, client, identity):
            asked = asyncio.create_task(generated(client))
            _, message = await engine.hear_after_hello()
            assert isinstance(message, Generate)
            link, last = link_of(client), Output(message.request_id, 0, [9], finish_reason="stop")
            engine.say(identity, Outputs([last]))
            while not link._outputs.poll(MILLISECONDS):
                pass
            engine.close()
            assert any(monitor.poll(MILLISECONDS) for monitor in link._monitors)
            link._changed()
            assert client.state == "dead"
            (output,) = await asked
            assert output.token_ids == [9]

    run(test())


@pytest.mark.parametrize("half", ("commands", "outputs"))
def test_half_a_connection_is_none(half: str) -> None:
    async def test() -> None:
        async with met() as (engine, client, _):
            asked = asyncio.create_task(generated(client))
            await engine.hear_after_hello()
            getattr(engine, half).close(0)
            with pytest.raises(EngineDeadError, match="has died"):
                await asked

    run(test())


def pass_silence(client: EngineClient) -> None:
    """Long after the last message the timer runs."""
    link = link_of(client)
    timer = link._silence
    assert timer is not None and not timer.cancelled() and link._heard is not None
    assert 0 <= timer.when() - link._heard <= 2 * engine_link.SILENCE_SECONDS
    link._heard -= 1e6
    timer._run()


def test_an_engine_that_falls_silent_is_noticed() -> None:
    """Its host is gone: no connection breaks."""

    async def test() -> None:
        async with met() as (engine, client, identity):
            for ask in (generated, lambda client: control(client, "state")):
                asked = asyncio.create_task(ask(client))
                await engine.hear_after_hello()
                pass_silence(client)
                with pytest.raises(EngineDeadError, match="sign of life"):
                    await asked
                assert identity != (identity := await engine.meet(client))

    run(test())


def test_a_front_end_that_stood_still_itself_reads_before_it_judges() -> None:
    async def test() -> None:
        async with met() as (engine, client, identity):
            engine.say(identity, snapshot("of late"))
            while not link_of(client)._outputs.poll(MILLISECONDS):
                pass
            pass_silence(client)
            assert client.state == "ready" and client.snapshot == snapshot("of late")
            pass_silence(client)
            assert client.state == "dead"

    run(test())


@pytest.mark.parametrize("frame", (b"\xc1", b"\x80", b""))
def test_what_is_behind_a_message_that_is_not_understood_is_not_waited_for(frame: bytes) -> None:
    """It lay in the socket, which tells of changes only."""

    async def test() -> None:
        async with met() as (engine, client, identity):
            asked = asyncio.create_task(generated(client))
            _, message = await engine.hear_after_hello()
            assert isinstance(message, Generate)
            last = Output(message.request_id, 0, [9], finish_reason="stop")
            engine.say(identity, frame, Outputs([last]))
            with pytest.raises(EngineDeadError, match="not understand"):
                await asked
            await engine.meet(client)

    run(test())


def test_who_waits_for_an_engine_that_is_given_up_is_told_so() -> None:
    async def test() -> None:
        endpoint = Endpoint.private()
        for is_early in (False, True):
            client = EngineClient(endpoint)
            await client.connect()
            if is_early:
                client.give_up("too often")
            waits = asyncio.create_task(client.ready())
            await asyncio.sleep(0)
            client.give_up("too often")
            with pytest.raises(EngineGivenUpError, match="too often"):
                await waits
            app: Any = None
            async with connected(client, waits=True)(app):  # and serves, to say so
                pass
        endpoint.remove()

    run(test())


# --- the engine's process ---------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[DynamicInferenceEngine]:
    with hash_engine(1, max_requests=4, block_size_tokens=4, block_count=300) as engine:
        yield engine


def test_a_front_end_that_was_forgotten_is_told_so_when_it_asks(
    engine: DynamicInferenceEngine,
) -> None:
    """What it asked was passed over, and it waited for ever."""

    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                for ask in (generated, lambda client: control(client, "state")):
                    client._send(Bye())  # nobody has told the client
                    with pytest.raises(EngineDeadError, match="dropped"):
                        await ask(client)
                    await client.ready()
                    assert len((await generated(client))[0].token_ids) == 5

    run(test())


@pytest.mark.parametrize("lost", (Answer, Outputs))
def test_a_front_end_that_misses_a_message_does_not_wait_for_it(
    lost: type[FromEngine], engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, missed = OutputSocket.send, []

    def losing(outputs: OutputSocket, identity: bytes, message: FromEngine) -> bool:
        if isinstance(message, lost) and not missed:
            missed.append(message)
            return False  # it has left too many unread
        return send(outputs, identity, message)

    monkeypatch.setattr(OutputSocket, "send", losing)

    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                ask = control(client, "state") if lost is Answer else generated(client)
                with pytest.raises(EngineDeadError, match="dropped"):
                    await ask
                await client.ready()
                assert len((await generated(client))[0].token_ids) == 5
                assert await control(client, "state")

    run(test())


def live_requests(engine: Any = None) -> LiveRequests:
    """With a request that will not end."""
    outputs: Any = None
    requests = LiveRequests(engine, outputs, None, lambda _: None)
    front_end = ConnectedFrontEnd(b"")
    front_end.is_gone = True  # nothing is sent
    live: Any = type("Live", (), {"front_end": front_end, "request_id": 1})()
    requests._routes[1] = Route(live, 0)
    return requests


@pytest.mark.parametrize("is_before", (True, False))
def test_who_waits_for_requests_hears_that_the_engine_has_stopped(is_before: bool) -> None:
    requests, ends = live_requests(), []

    def wait() -> None:
        try:
            requests.wait_until_empty(None)
        except EngineStoppedError as error:
            ends.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    if is_before:
        requests.fail(EngineStoppedError("it has failed"))
    waiter.start()
    if not is_before:
        while not requests._emptied._waiters:  # type: ignore[attr-defined]
            pass
        requests.fail(EngineStoppedError("it has failed"))
    waiter.join(PATIENCE_SECONDS)
    assert [str(error) for error in ends] == ["it has failed"]


def test_a_control_that_waits_does_not_outlive_the_engine(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process could not end before its supervisor killed it."""
    monkeypatch.setattr(engine.loop, "is_idle", lambda: True)
    known = set(threading.enumerate())

    def controls() -> list[threading.Thread]:
        new = set(threading.enumerate()) - known
        return [each for each in new if each.name.startswith("control")]

    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                asked = asyncio.create_task(generated(client))
                waits = asyncio.create_task(control(client, "pause", mode="wait"))
                async with patience():
                    while not controls():
                        await asyncio.sleep(0.001)
                assert not waits.done()
                asked.cancel()
                waits.cancel()
                await asyncio.wait([asked, waits])

    run(test())
    for thread in controls():
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_controls_that_wait_do_not_hold_up_what_ends_their_wait(
    engine: DynamicInferenceEngine,
) -> None:
    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "suspend")
                asked = asyncio.create_task(generated(client))
                await asyncio.sleep(0)
                waits = [
                    asyncio.create_task(control(client, "drain", timeout=1e5)) for _ in range(6)
                ]
                await asyncio.sleep(0)
                await control(client, "resume")
                (output,) = await asked
                assert len(output.token_ids) == 5
                await asyncio.gather(*waits)

    run(test())


def test_resume_ends_the_waits_of_those_that_would_stop_the_engine(
    engine: DynamicInferenceEngine,
) -> None:
    """And no control waits for a thread behind theirs."""

    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "suspend")  # so that the request does not end
                asked = asyncio.create_task(generated(client))
                await asyncio.sleep(0)
                stops = [
                    asyncio.create_task(control(client, "pause", mode="wait", timeout=1e5))
                    for _ in range(40)
                ]
                await control(client, "reset_prefix_cache")
                await control(client, "resume")
                ends = await asyncio.gather(*stops, return_exceptions=True)
                assert all("was resumed" in str(end) for end in ends)
                assert {type(end) for end in ends} == {BusyError}
                (output,) = await asked
                assert len(output.token_ids) == 5
                assert not (await control(client, "state"))["is_paused"]
                await generated(client)

    run(test())


def test_metrics_are_there_as_soon_as_the_engine_is(engine: DynamicInferenceEngine) -> None:
    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            client = EngineClient(endpoint)
            seen: list[bool] = []
            ready = asyncio.create_task(client.changes.until(lambda: client.state == "ready"))
            ready.add_done_callback(lambda _: seen.append(client.snapshot is not None))
            await client.connect()
            await ready
            await client.aclose()
            assert seen == [True]

    run(test())


def test_more_controls_than_may_wait_are_refused(engine: DynamicInferenceEngine) -> None:
    async def test() -> None:
        with engine_in_thread(engine) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "suspend")
                asked = asyncio.create_task(generated(client))
                await asyncio.sleep(0)
                waits = [
                    asyncio.create_task(control(client, "drain", timeout=1e5)) for _ in range(MOST)
                ]
                await asyncio.sleep(0)
                with pytest.raises(BusyError, match=f"{MOST} controls wait already"):
                    await control(client, "check_idle")
                await control(client, "resume")
                await asyncio.gather(asked, *waits)

    run(test())


# --- mutants ----------------------------------------------------------------------------------


def silent(*_: Any) -> None:
    """Wakes nobody."""


async def _waits_for_an_engine(client: EngineClient, engine: ScriptedEngine) -> None:
    await engine.meet(client)


async def _waits_for_its_end(client: EngineClient, engine: ScriptedEngine) -> None:
    waits = asyncio.create_task(client.ready())
    await engine.greeted(client)
    client.give_up("over")
    with contextlib.suppress(EngineGivenUpError):
        await waits


WAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "changes": (Changes, "tell", _waits_for_an_engine),
    "given up": (EngineClient, "_break", _waits_for_its_end),
}


@pytest.mark.parametrize("name", WAKES)
def test_a_wake_up_that_is_left_out_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, waits = WAKES[name]
    monkeypatch.setattr(owner, method, silent)

    async def test() -> None:
        endpoint = Endpoint.private()
        engine, client = ScriptedEngine(endpoint), EngineClient(endpoint)
        await client.connect()
        waiting = asyncio.create_task(waits(client, engine))
        while True:
            await asyncio.sleep(0)
            link = client._link
            if client.state == "ready" or client._given_up:
                break
            if link is not None:
                link._readable()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert client._greeter is not None
        for task in (waiting, client._greeter):
            task.cancel()
        await asyncio.wait([waiting, client._greeter])
        if client._link is not None:
            client._link.close(0)
        engine.close()
        endpoint.remove()

    run(test())


def test_a_front_end_that_cannot_open_a_socket_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never looked for the engine again: it had no free descriptor when that was restarted."""
    failures = [zmq.ZMQError(errno.EMFILE), OSError(errno.EMFILE, "too many open files")]

    def opened(*given: Any) -> Link:
        if failures:
            raise failures.pop()
        return Link(*given)

    monkeypatch.setattr(engine_client, "Link", opened)
    monkeypatch.setattr(engine_client, "RETRY_SECONDS", 0.0)

    async def test() -> None:
        async with met() as (engine, client, identity):
            failures.append(OSError(errno.EMFILE, "too many open files"))
            client._break("it has died")
            assert await engine.meet(client) != identity

    run(test())


def test_who_waits_for_the_start_of_an_engine_hears_of_any_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("of a kind that nobody has thought of")

    monkeypatch.setattr(supervisor, "ChildProcess", fails)

    async def test() -> None:
        supervised = supervisor.Supervisor(Launch("", {}, Endpoint.private()))
        with pytest.raises(EngineDeadError, match="nobody has thought of"):
            await supervised.start()
        await supervised.stop()

    run(test())


def test_hello_is_said_until_it_is_answered() -> None:
    """An answer may be lost before both connections are there."""

    async def test() -> None:
        endpoint = Endpoint.private()
        engine, client = ScriptedEngine(endpoint), EngineClient(endpoint)
        await client.connect()
        for _ in range(3):
            _, message = await engine.hear()
            assert isinstance(message, Hello)
        await engine.meet(client)
        await client.aclose()
        engine.close()
        endpoint.remove()

    run(test())
