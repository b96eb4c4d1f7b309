"""The server under load and under faults, on the loopback alone.

    python -m scripts.soak_server [PART ...]

Each part starts ``megatron-async serve --model tiny`` anew, prints a line with what it measured,
and raises an error where the server does not do what it should. All take some 15 minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
from pathlib import Path

from scripts.soak_faults import ASYNC, FAULTS, LONG
from tests.support.real_server import ended, real_server, timed

GET = "GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
POST = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


async def streams() -> str:
    """200 at once are those of serial decoding"""
    chance = random.Random(1)
    ask = {"stream": True, "max_tokens": 20, "temperature": 0.8}
    bodies = [{**ask, "prompt": "ab" * chance.randint(1, 50), "seed": n} for n in range(200)]
    async with real_server("--batch-invariant") as server:
        serial = [await server.text(body) for body in bodies]
        assert await asyncio.gather(*map(server.text, bodies)) == serial
    async with real_server("--batch-invariant", ASYNC) as server:
        assert await asyncio.gather(*map(server.text, bodies)) == serial
    return "scheduling off and depth 1: the texts of all are those of serial decoding"


async def requests() -> str:
    """Memory after 2,000 and after 10,000"""
    async with real_server(ASYNC) as server:
        seconds, memory = 0.0, []
        for _ in range(100):
            seconds += await timed(asyncio.gather(*(server.short() for _ in range(100))))
            memory.append(server.mib())
    grown = [after - then for then, after in zip(memory[19], memory[-1], strict=True)]
    assert max(grown) < 16, memory
    said = f"front end {grown[0]:+.1f} MiB, engine {grown[1]:+.1f} MiB"
    return f"{1e4 / seconds:.0f}/s; from 2,000 to 10,000: {said}"


async def idle() -> str:
    """10,000 connections that have asked once"""
    async with real_server(ASYNC) as server:
        before, held = (await server.latency(), server.mib()[0]), []
        for _ in range(100):
            held += await asyncio.gather(*(server.connect(GET) for _ in range(100)))
            await asyncio.gather(*(reader.readuntil(b"}") for reader, _ in held[-100:]))
        after = (await server.latency(), server.mib()[0])
        seconds = await timed(asyncio.gather(*(ended(reader) for reader, _ in held)))
    said = f"a short request takes {after[0]:.0f} ms, without them {before[0]:.0f}; "
    return said + f"{after[1] - before[1]:.0f} MiB; the last is closed after {seconds:.0f} s"


async def files() -> str:
    """400 connections to 256 descriptors, and the engine is killed"""
    async with real_server(ASYNC, files=256) as server:
        await server.short()
        held = [await server.connect() for _ in range(400)]
        front, engine = server.processes()
        busy, used = front.cpu_percent(2), front.num_fds()
        engine.kill()
        await server.until_status(503)
        seconds = await timed(server.until_status(200))
        await server.short()
        lines = Path(server.log).read_text().count("further ones are refused")
    assert len(held) == 400 and used < 256 and busy < 20 and lines == 1, (used, busy, lines)
    return f"{used} in use, {lines} line in the log; it serves again after {seconds:.1f} s"


async def slow() -> str:
    """A byte a second"""
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
    """Bodies of 100 MB"""

    def send(said: str, chunk: bytes) -> str:  # asyncio's gives up at a write's error
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{POST}{said}\r\n\r\n".encode())
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 10**8:
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
    """Eight streams beside eight others that read, and that do not"""
    body = {**LONG, "max_tokens": 400, "logprobs": 5}
    found = []
    for reads in (True, False):
        async with real_server(ASYNC) as server:
            await server.short()
            before, other = server.mib()[0], server.text if reads else server.unread
            others = asyncio.gather(*(other(body) for _ in range(8)))  # type: ignore[operator]
            seconds = await timed(asyncio.gather(*(server.text(body) for _ in range(8))))
            found.append(f"{8 * 400 / seconds:.0f} tokens/s and {server.mib()[0] - before:.0f} MiB")
            await others
    return f"{found[0]} beside those that read, {found[1]} beside those that do not"


async def cuts() -> str:
    """500 streams left at random points"""
    chance = random.Random(2)
    async with real_server(ASYNC) as server:
        for _ in range(5):
            cut = ({**LONG, "n": 1 + number % 2} for number in range(100))
            await asyncio.gather(*(server.text(body, chance.randrange(40)) for body in cut))
        seconds = await timed(server.until_idle())
    return f"no request and no block is held {seconds:.1f} s later"


PARTS = (streams, requests, idle, files, slow, bodies, readers, cuts, *FAULTS)


def main() -> None:
    """Run the parts that are asked for, or all."""
    for part in PARTS:
        if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
            print(f"{part.__name__:9} {part.__doc__}: {asyncio.run(part())}", flush=True)


if __name__ == "__main__":
    main()
