"""How requests of front ends end, and front ends that go away or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_async.errors import EngineDeadError, QueueFullError, RequestError
from megatron_async.serving.engine_side import output_socket
from megatron_async.serving.front_end.engine_client import EngineClient, gather
from megatron_async.serving.messages import Control, Dropped, Endpoint, Generate, Hello
from tests.support.served_engine import (
    checked,
    client_of,
    control,
    engine_in_thread,
    outputs_of,
    patience,
    run,
    until_idle,
)
from tests.support.small_engine import LONG, RawFrontEnd, served, small_engine


@pytest.mark.parametrize("wrong, said", (
    ({"params": {"temperature": -1}}, "temperature"),
    ({"params": {"colour": 1}}, "colour"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [10**6]}, "token id 1000000"),
    ({"prompt": [1] * 5000}, "256"),
    ({"timeout": 0.0}, "timeout"),
    ({"priority": 10**9}, "priority"),
    ({"params": {"n": "many"}}, "n="),
))  # fmt: skip
def test_a_wrong_request_is_refused_by_name_and_hurts_nobody(
    wrong: dict[str, Any], said: str
) -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            other = asyncio.create_task(outputs_of(client, [2], LONG))
            asked = {"prompt": [1], "params": {}, **wrong}
            with pytest.raises(RequestError, match=said):
                await outputs_of(client, **asked)
            ((output,),) = (await other,)
            assert output.finish_reason == "length"
            await until_idle(client)

    run(test())


def test_leaving_the_iteration_aborts_the_request() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            await control(client, "suspend")
            request = Generate(client.next_request_id(), [1], checked({**LONG, "n": 3}))
            waits = asyncio.create_task(anext(client.generate(request)))
            async with patience():
                while client.snapshot is None or not client.snapshot.gauges["requests_waiting"]:
                    await asyncio.sleep(0.01)
            waits.cancel()
            await asyncio.wait([waits])
            await until_idle(client)  # suspended as it is
            await control(client, "resume")
            async with contextlib.aclosing(client.generate(request)) as outputs:
                await anext(outputs)
            await until_idle(client)

    run(test())


def test_an_aborted_request_ends_with_what_it_has() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            request = Generate(client.next_request_id(), [1], checked({**LONG, "n": 2}))
            outputs = []
            async for output in client.generate(request):
                if not outputs:
                    await client.abort(request.request_id)
                outputs.append(output)
            assert {o.finish_reason for o in gather(outputs)} <= {"abort", "length"}
            await client.abort(request.request_id)  # it has ended
            await until_idle(client)

    run(test())


def test_a_timeout_ends_a_request_with_what_it_has() -> None:
    async def test() -> None:
        async with served(small_engine()) as client:
            await control(client, "suspend")
            late = asyncio.create_task(outputs_of(client, [1], LONG, timeout=0.01))
            ranked = {**LONG, "best_of": 3, "temperature": 1.0}
            best = asyncio.create_task(outputs_of(client, [1], ranked, timeout=0.02))
            for (output,) in (await late, await best):
                assert (output.finish_reason, output.token_ids) == ("timeout", [])
            await control(client, "resume")
            (output,) = await outputs_of(client, [1], LONG, timeout=1e6)
            assert output.finish_reason == "length"
            await until_idle(client)

    run(test())


def test_more_sequences_than_may_wait_are_refused() -> None:
    async def test() -> None:
        async with served(small_engine(), max_queue=3) as client:
            await control(client, "suspend")
            tasks = [asyncio.create_task(outputs_of(client, [1], LONG)) for _ in range(7)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="7 may"):
                await outputs_of(client, [1], LONG)
            await control(client, "resume")
            await asyncio.gather(*tasks)
            with pytest.raises(QueueFullError):
                await outputs_of(client, [1], {**LONG, "n": 8})
            assert len(await outputs_of(client, [1], {**LONG, "n": 7})) == 7
            await until_idle(client)

    run(test())


def test_a_front_end_that_does_not_read_is_dropped_and_slows_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_socket, "HIGH_WATER_MARK", 20)

    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            frozen = RawFrontEnd(endpoint)
            await asyncio.to_thread(frozen.greet)
            async with client_of(endpoint) as client:
                await control(client, "suspend")
                for number in range(4):
                    frozen.send(Generate(number, [1], checked(LONG)))
                for _ in range(60):
                    frozen.send(Control(0, "x" * 10**6))  # the answer says that there is none
                async with patience():
                    while client.snapshot is None or client.snapshot.gauges["front_ends"] != 1:
                        await asyncio.sleep(0.01)
                await until_idle(client)  # suspended as it is, so they were aborted
                await control(client, "resume")
                # Fewer tokens than may be unread: where others keep the machine busy all may be.
                (output,) = await outputs_of(client, [2], {**LONG, "num_tokens_to_generate": 10})
                assert len(output.token_ids) == 10
            async with patience():
                while not isinstance(await asyncio.to_thread(frozen.receive), Dropped):
                    pass
            frozen.close()

    run(test())


def test_requests_of_a_front_end_that_is_gone_are_aborted() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            async with client_of(endpoint) as client:
                await control(client, "suspend")
                gone = RawFrontEnd(endpoint)
                await asyncio.to_thread(gone.greet)
                gone.send(Generate(0, [1], checked({**LONG, "n": 4})))
                async with patience():
                    while client.snapshot is None or not client.snapshot.gauges["requests_waiting"]:
                        await asyncio.sleep(0.01)
                gone.close()
                await until_idle(client)

    run(test())


def test_a_front_end_without_the_secret_is_not_heard() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            assert stat.S_IMODE(Path(endpoint.directory).stat().st_mode) == 0o700
            stranger = RawFrontEnd(endpoint, b"stranger")
            stranger.send(Hello())
            async with client_of(endpoint) as client:
                await outputs_of(client, [1], LONG)
            assert stranger.outputs.poll(100) == 0
            stranger.close()

    run(test())


def test_nonsense_on_the_socket_is_ignored() -> None:
    async def test() -> None:
        with engine_in_thread(small_engine()) as endpoint:
            other = RawFrontEnd(endpoint)
            await asyncio.to_thread(other.greet)
            for frame in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Generate"})):
                other.commands.send(frame)
            other.commands.send_multipart([b"a", b"b"])
            async with client_of(endpoint) as client:
                (output,) = await outputs_of(client, [1], LONG)
                assert output.finish_reason == "length"
            other.close()

    run(test())


def test_without_an_engine_requests_fail_at_once() -> None:
    async def test() -> None:
        endpoint = Endpoint.private()
        client = EngineClient(endpoint)
        await client.connect()
        assert client.state == "starting"
        with pytest.raises(EngineDeadError, match="not started"):
            await outputs_of(client, [1], {})
        with pytest.raises(EngineDeadError):
            await control(client, "suspend")
        with pytest.raises(EngineDeadError):
            await client.info()
        await client.aclose()
        endpoint.remove()

    run(test())
