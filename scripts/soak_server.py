"""The server under load and under faults, on the loopback alone.

    python -m scripts.soak_server [PART ...]

Each part starts ``megatron-async serve --model tiny`` anew, prints a line with what it measured,
and raises AssertionError where the server does not do what it should. All take about fifteen
minutes on two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.real_server import ended, real_server, timed

ASYNC = "--inference-async-scheduling"
GET = "GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
POST = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}


async def streams() -> str:
    """200 at once are those of serial decoding."""
    chance = random.Random(1)
    asked: list[dict[str, Any]] = [
        {"prompt": f"def f{chance.randrange(99)}(", "max_tokens": chance.randint(1, 32), "seed": n}
        for n in range(200)
    ]
    bodies = [{**one, "stream": True} for one in asked]
    async with real_server("--batch-invariant") as server:
        serial = [await server.text(body) for body in bodies]
        assert await asyncio.gather(*map(server.text, bodies)) == serial
    async with real_server("--batch-invariant", ASYNC) as server:
        assert await asyncio.gather(*map(server.text, bodies)) == serial
    return "scheduling off and depth 1: the texts of all are those of serial decoding"


async def requests() -> str:
    """Memory after 2,000 and after 10,000."""
    async with real_server(ASYNC) as server:
        at_once = asyncio.Semaphore(64)

        async def one() -> None:
            async with at_once:
                await server.short()

        seconds, memory = 0.0, []
        for _ in range(10):
            seconds += await timed(asyncio.gather(*(one() for _ in range(1000))))
            memory.append(server.mib())
    grown = [after - then for then, after in zip(memory[1], memory[-1], strict=True)]
    assert max(grown) < 16, memory
    said = f"front end {grown[0]:+.1f} MiB, engine {grown[1]:+.1f} MiB"
    return f"{1e4 / seconds:.0f}/s; from 2,000 to 10,000: {said}"


async def idle() -> str:
    """10,000 connections that have asked once."""
    async with real_server(ASYNC) as server:
        before, memory, held = await server.latency(), server.mib()[0], []
        for _ in range(100):
            held += await asyncio.gather(*(server.connect(GET) for _ in range(100)))
            await asyncio.gather(*(reader.readuntil(b"}") for reader, _ in held[-100:]))
        after, memory = await server.latency(), server.mib()[0] - memory
        seconds = await timed(asyncio.gather(*(ended(reader) for reader, _ in held)))
    said = f"a short request takes {after:.0f} ms, without them {before:.0f}; {memory:.0f} MiB"
    return f"{said}; the last is closed after {seconds:.0f} s"


async def files() -> str:
    """400 connections to 256 descriptors, and the engine is killed."""
    async with real_server(ASYNC, files=256) as server:
        await server.short()
        held = [await server.connect() for _ in range(400)]
        front, engine = server.processes()
        await asyncio.sleep(1)
        used, busy = front.num_fds(), front.cpu_percent(2)
        engine.kill()
        await server.until_status(503)
        seconds = await timed(server.until_status(200))
        await server.short()
        lines = Path(server.log).read_text().count("further ones are refused")
        assert used < 256 and busy < 20 and lines == 1, (used, busy, lines)
        for _, writer in held:
            writer.close()
    return f"{used} in use, {lines} line in the log; it serves again after {seconds:.1f} s"


async def slow() -> str:
    """A byte a second."""
    async with real_server() as server:

        async def lives(said: str, more: bytes = b"x") -> float:
            reader, writer = await server.connect(said)
            end = asyncio.create_task(timed(ended(reader)))
            while not end.done():
                writer.write(more)
                await asyncio.sleep(1)
            return end.result()

        body = f"{POST}content-length: 9999\r\n\r\n"
        parts = (lives("GET / HTTP/1.1\r\nx: "), lives(body), lives("", b""))
        headers, of_body, silent = await asyncio.gather(*parts)
    assert max(headers, of_body, silent) < 90
    return f"headers end after {headers:.0f} s, a body {of_body:.0f}, a silent one {silent:.0f}"


async def bodies() -> str:
    """Of 100 MB."""

    def send(said: str, chunk: bytes) -> str:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{POST}{said}\r\n\r\n".encode())
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 100 * 10**6:
                    sent += connection.send(chunk)
            return f"{connection.recv(4096)[9:12].decode()} after {sent / 1e6:.0f} MB"

    async with real_server() as server:
        await server.short()
        before, block = server.mib()[0], b" " * 65536
        declared = await asyncio.to_thread(send, "content-length: 100000000", block)
        chunk = b"10000\r\n%b\r\n" % block
        chunked = await asyncio.to_thread(send, "transfer-encoding: chunked", chunk)
        grown = server.mib()[0] - before
    assert declared.startswith("413") and chunked.startswith("413") and grown < 64, grown
    return f"{declared}, chunked {chunked}; front end {grown:+.0f} MiB"


async def readers() -> str:
    """Eight streams beside eight others that read, and that do not."""
    body = {**LONG, "max_tokens": 300, "logprobs": 5}
    seconds, memory = [], 0.0
    for reads in (True, False):
        async with real_server(ASYNC) as server:
            await server.short()
            before, others = server.mib()[0], list[Any]()
            for _ in range(8):
                others.append(server.text(body) if reads else server.unread(body))
            waiting = asyncio.gather(*others)
            seconds.append(await timed(asyncio.gather(*(server.text(body) for _ in range(8)))))
            memory = server.mib()[0] - before
            await waiting
    rates = [8 * 300 / each for each in seconds]
    said = f"{rates[0]:.0f} tokens/s beside readers, {rates[1]:.0f} beside those that read nothing"
    return f"{said}; {memory:.0f} MiB"


async def engine() -> str:
    """Killed and frozen under 64 streams."""
    said = []
    async with real_server(ASYNC) as server:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            running = [asyncio.create_task(server.text(LONG)) for _ in range(64)]
            while (await server.values())["num_requests_running"] < 64:
                await asyncio.sleep(0.05)
            server.processes()[1].send_signal(number)
            started = time.monotonic()
            ends = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(end, InterruptedError) for end in ends), ends
            failed = time.monotonic() - started
            await server.until_status(200)
            again = time.monotonic() - started
            await server.short()
            await server.until_idle()
            said.append(f"{number.name}: all fail after {failed:.1f} s, served after {again:.1f} s")
    return "; ".join(said)


async def stop() -> str:
    """SIGTERM under 64 streams and one that nobody reads."""
    async with real_server(ASYNC, "--shutdown-timeout", "3") as server:
        writer = await server.unread({**LONG, "logprobs": 5, "n": 4})
        running = [asyncio.create_task(server.text(LONG)) for _ in range(64)]
        while (await server.values())["num_requests_running"] < 68:
            await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert all(await asyncio.gather(*running))
        streams_end = time.monotonic() - started
        status = await asyncio.to_thread(server.process.wait, 60)
        writer.close()
    return f"status {status}; streams end after {streams_end:.1f} s of 3, the process after " + (
        f"{time.monotonic() - started:.1f} s"
    )


async def cuts() -> str:
    """500 streams left at random points."""
    chance = random.Random(2)
    async with real_server(ASYNC) as server:
        for start in range(0, 500, 100):
            await asyncio.gather(
                *(
                    server.text({**LONG, "n": 1 + number % 2}, chance.randrange(40))
                    for number in range(start, start + 100)
                )
            )
        seconds = await timed(server.until_idle())
    return f"no request and no block is held {seconds:.1f} s later"


PARTS = (streams, requests, idle, files, slow, bodies, readers, engine, stop, cuts)


def main() -> None:
    """Run the parts that are asked for, or all."""
    for part in PARTS:
        if part.__name__ in (sys.argv[1:] or [each.__name__ for each in PARTS]):
            said = asyncio.run(part())
            print(f"{part.__name__:9} {(part.__doc__ or '').rstrip('.')}: {said}", flush=True)


if __name__ == "__main__":
    main()
