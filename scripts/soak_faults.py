"""Parts of :mod:`scripts.soak_server`: what dies, stands still or is stopped beside streams."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import psutil

from tests.support.real_server import RealServer, real_server, timed

ASYNC = "--inference-async-scheduling"
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}


async def begun(server: RealServer, count: int) -> list[asyncio.Task[str]]:
    """Streams that run."""
    running = [asyncio.create_task(server.text(LONG)) for _ in range(count)]
    while (await server.values())["num_requests_running"] < count:
        await asyncio.sleep(0.05)
    return running


async def engine() -> str:
    """Killed and frozen under 64 streams"""
    said = []
    async with real_server(ASYNC) as server:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            running = await begun(server, 64)
            server.processes()[1].send_signal(number)
            ends = asyncio.gather(*running, return_exceptions=True)
            failed = await timed(ends)
            assert all(isinstance(end, InterruptedError) for end in ends.result())
            again = failed + await timed(server.until_status(200))
            await server.short()
            await server.until_idle()
            said.append(f"{number.name}: all fail after {failed:.1f} s, served after {again:.1f} s")
    return "; ".join(said)


async def stop() -> str:
    """SIGTERM under 32 streams and one that nobody reads"""
    async with real_server(ASYNC, "--shutdown-timeout", "3") as server:
        unread = await server.unread({**LONG, "logprobs": 5, "n": 4})
        running = await begun(server, 32)
        server.process.send_signal(signal.SIGTERM)
        ending = asyncio.create_task(timed(asyncio.to_thread(server.process.wait, 60)))
        streams_end = await timed(asyncio.gather(*running))
        all_end = await ending
        unread.close()
    return f"streams end after {streams_end:.1f} s of 3, the process after {all_end:.1f} s"


async def replaced(server: RealServer, process: psutil.Process, module: str, count: int) -> None:
    """Wait until it is gone and there are ``count`` of the module's again."""
    while psutil.pid_exists(process.pid) or len(server.children(module)) < count:
        await asyncio.sleep(0.02)


async def log() -> str:
    """Standard error is a pipe that nobody reads"""
    async with real_server(ASYNC, unread=True) as server:
        for _ in range(100):
            await asyncio.gather(*(server.short() for _ in range(100)))
        await server.until_status(200)
        server.process.send_signal(signal.SIGTERM)
        ends = await timed(asyncio.to_thread(server.process.wait, 60))
    return f"10,000 requests are answered; SIGTERM ends the process after {ends:.1f} s"


async def front() -> str:
    """One of two front ends frozen under 32 streams"""
    async with real_server(ASYNC, "--api-server-count", "2") as server:
        running = await begun(server, 32)
        first = server.children("front_end_process")
        first[0].suspend()
        ends = asyncio.gather(*running, return_exceptions=True)
        seconds = await timed(ends)
        failed = sum(isinstance(end, BaseException) for end in ends.result())
        again = await timed(replaced(server, first[0], "front_end_process", 2))
        await server.short()
    said = f"{failed} of 32 fail, all end after {seconds:.1f} s"
    return f"{said}; another one is there {again:.1f} s later"


async def asleep() -> str:
    """The engine is killed while it sleeps"""
    options = ("--enable-sleep-mode", "--server-dev-mode")
    async with real_server(ASYNC, *options) as server:
        awake = server.mib()[1]
        await server.control("/sleep")
        (first,) = server.children("engine_process")
        first.kill()
        await replaced(server, first, "engine_process", 1)
        await server.until_status(200)
        assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        held = server.mib()[1]
        seconds = await timed(server.control("/wake_up"))
        await server.short()
    return f"the next one sleeps with {held:.0f} MiB of {awake:.0f}; it wakes in {seconds:.1f} s"


async def pauses() -> str:
    """40 pauses wait for 8 streams, and one resume"""
    async with real_server(ASYNC) as server:
        running = await begun(server, 8)
        asked = {"mode": "wait"}
        waits = [asyncio.create_task(server.http.post("/pause", json=asked)) for _ in range(40)]
        while (await server.values())["http_requests_open"] < 48:
            await asyncio.sleep(0.05)
        seconds = await timed(server.control("/resume"))
        answers = [(await wait).status_code for wait in waits]
        unfinished = sum(not stream.done() for stream in running)
        await asyncio.gather(*running)
    assert unfinished and set(answers) == {409}, (unfinished, answers)
    return f"resumed after {seconds * 1e3:.0f} ms, while {unfinished} streams run"


FAULTS = (engine, stop, log, front, asleep, pauses)
