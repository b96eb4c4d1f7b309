"""Hostile requests beside a stream, on the loopback alone, and a table of what they do to it.

    python -m scripts.attack_server [--seconds S] [ATTACK ...]

Each attack starts ``megatron-async serve --model tiny`` anew and repeats itself for some seconds,
while another client reads streams. The exit status is 1 if the streams fall below a third of their
pace, stand for a second, or do not come back, or the front end takes 512 MiB more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.real_server import RealServer, real_server

MOST_GAP_SECONDS = 1.0
LEAST_SHARE = 1 / 3
MOST_MIB = 512
KEY = "secret"
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
HEAD = LINE + b"content-type: application/json\r\nauthorization: Bearer secret\r\n"
Attack = Callable[[RealServer], Awaitable[None]]


@dataclasses.dataclass
class Found:
    """What one attack did."""

    name: str
    pace: float
    under_attack: float
    afterwards: float
    gap: float
    mib: float
    turns: int

    def faults(self) -> list[str]:
        """What is worse than it may be."""
        found = []
        if self.under_attack < LEAST_SHARE * self.pace:
            found.append("pace")
        if self.gap > MOST_GAP_SECONDS:
            found.append("gap")
        if self.mib > MOST_MIB:
            found.append("memory")
        if self.afterwards < LEAST_SHARE * self.pace:
            found.append("afterwards")
        return found

    def line(self) -> str:
        """A line of the table."""
        share = self.under_attack / self.pace if self.pace else 0.0
        faults = ", ".join(self.faults()) or "ok"
        return (
            f"| {self.name} | {self.turns} | {self.pace:.0f} | {self.under_attack:.0f} "
            f"({share:.0%}) | {self.afterwards:.0f} | {self.gap:.2f} | {self.mib:+.0f} | {faults} |"
        )


TITLE = (
    "| attack | times | tokens/s before | meanwhile | afterwards | longest gap, s | MiB | |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Victim:
    """One stream after the other."""

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self.tokens = 0
        self.gap = 0.0
        self._last = time.monotonic()

    async def run(self) -> None:
        """Read for ever."""
        body = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        while True:
            stream = self._server.http.stream("POST", "/v1/completions", json=body, headers=headers)
            async with stream as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        self.gap, self._last = max(self.gap, now - self._last), now
                        self.tokens += 1

    def begin(self) -> None:
        """Count from here on."""
        self.tokens, self.gap, self._last = 0, 0.0, time.monotonic()

    def longest(self) -> float:
        """Seconds of the longest gap, one that has not ended included."""
        return max(self.gap, time.monotonic() - self._last)


async def measure(name: str, attack: Attack, seconds: float, options: tuple[str, ...]) -> Found:
    """Run one attack, again and again."""
    asked = ("--inference-async-scheduling", "--api-key", KEY, *options)
    async with real_server(*asked) as server:
        victim = Victim(server)
        reading = asyncio.create_task(victim.run())
        while not victim.tokens:
            await asyncio.sleep(0.01)
        victim.begin()
        await asyncio.sleep(max(1.0, seconds / 6))
        pace = victim.tokens / max(1.0, seconds / 6)
        before = most = server.mib()[0]
        turns = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, server.mib()[0])
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        victim.begin()
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            # The server may hang up at any time.
            with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(seconds):
                    await attack(server)
            turns += 1
        meanwhile = victim.tokens / (time.monotonic() - started)
        gap = victim.longest()
        victim.begin()
        await asyncio.sleep(max(1.0, seconds / 6))
        afterwards = victim.tokens / max(1.0, seconds / 6)
        for task in (watching, reading):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return Found(name, pace, meanwhile, afterwards, gap, most - before, turns)


# --- attacks --------------------------------------------------------------------------------------


async def send(server: RealServer, data: bytes) -> bytes:
    """What comes back on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def posts(path: str, body: str) -> Attack:
    """The same body again and again."""
    line = HEAD.replace(b"/v1/completions", path.encode())
    data = line + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()

    async def attack(server: RealServer) -> None:
        await send(server, data)

    return attack


def floods(first: bytes, more: bytes, parts: int = 200) -> Attack:
    """A connection that goes on and on."""

    async def attack(server: RealServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(first)
            for _ in range(parts):
                writer.write(more)
                await writer.drain()
        finally:
            writer.close()

    return attack


async def pipelines(server: RealServer) -> None:
    """GETs without end, whose answers nobody reads."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(3):
            while True:
                writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n" * 100)
                await writer.drain()
    finally:
        writer.transport.abort()


async def bodies_together(server: RealServer) -> None:
    """40 bodies of 15 MB, of which the last bytes do not come."""
    size = 15 * 10**6
    head = HEAD + f"content-length: {size}\r\n\r\n".encode()
    held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(40)]

    async def fill(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            for _ in range(14):
                writer.write(b" " * 10**6)
                await writer.drain()

    try:
        async with asyncio.timeout(3):
            await asyncio.gather(*(fill(writer) for _, writer in held))
            await asyncio.sleep(3)
    finally:
        for _, writer in held:
            writer.transport.abort()


def completion(**fields: Any) -> str:
    """The JSON of a completion of one token."""
    return json.dumps({"max_tokens": 1, **fields}, separators=(",", ":"))


def chat(content: str = "x") -> str:
    """The JSON of a chat."""
    return json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": content}]})


COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPLATES = {
    "template: lipsum": "{{ lipsum(n=100000000) }}",
    "template: sum of lists": "{{ ([[1]*1000]*40000)|sum(start=[])|length }}",
    "template: center": "{{ 'a'.center(3*10**9) }}",
}


ITEM = '{"role":"user","content":"a"}'
TRAILER = LINE + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
ATTACKS: dict[str, Callable[[], Attack]] = {
    "nulls as prompt": lambda: posts(COMPLETIONS, completion(prompt=[None] * 3_000_000)),
    "objects as prompt": lambda: posts(COMPLETIONS, completion(prompt=[{}] * 5_000_000)),
    "a million nulls": lambda: posts(COMPLETIONS, completion(prompt=[None] * 1_000_000)),
    "15 MB of token ids": lambda: posts(COMPLETIONS, completion(prompt=[0] * 7_500_000)),
    "a million token ids": lambda: posts(COMPLETIONS, completion(prompt=[0] * 1_000_000)),
    "15 MB of text": lambda: posts(COMPLETIONS, completion(prompt="a," * 7_500_000)),
    "a million stops": lambda: posts(COMPLETIONS, completion(prompt="x", stop=["a"] * 1_000_000)),
    "biases of text": lambda: posts(
        COMPLETIONS, completion(prompt="x", logit_bias={str(n): "x" for n in range(400_000)})
    ),
    "depth": lambda: posts(COMPLETIONS, completion(prompt="x")[:-1] + ',"x":' + "[" * 10**7),
    "500,000 messages": lambda: posts(CHATS, many("messages", 500_000)),
    "300,000 messages": lambda: posts(CHATS, many("messages", 300_000)),
    "500,000 items": lambda: posts(RESPONSES, many("input", 500_000)),
    "many headers": lambda: floods(LINE, b"x: %s\r\n" % (b"a" * 1000) * 64),
    "small headers": lambda: floods(LINE, b"a:\r\n" * 16384),
    "one header": lambda: floods(LINE + b"x: ", b"a" * 65536),
    "one URL": lambda: floods(b"GET /", b"a" * 65536),
    "trailers": lambda: floods(TRAILER, b"x-a: b\r\n" * 8192),
    "pipelined GETs": lambda: pipelines,
    "40 bodies together": lambda: bodies_together,
    **{name: lambda: posts(CHATS, chat()) for name in TEMPLATES},
}
"""What makes each attack; those that need a template of their own stand in :data:`TEMPLATES`."""


def many(field: str, count: int) -> str:
    """The JSON of a request with ``count`` messages."""
    return f'{{"{field}":[{",".join([ITEM] * count)}]}}'


async def run(names: list[str], seconds: float) -> list[Found]:
    """Run them in order; print the table as it grows."""
    print(TITLE, flush=True)
    found = []
    for name, attack in ATTACKS.items():
        if names and name not in names:
            continue
        with contextlib.ExitStack() as stack:
            options: tuple[str, ...] = ()
            if name in TEMPLATES:
                file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "t.jinja"
                file.write_text(TEMPLATES[name])
                options = ("--chat-template", str(file))
            found.append(await measure(name, attack(), seconds, options))
        print(found[-1].line(), flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if anything is worse than it may be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each attack")
    parser.add_argument("attack", nargs="*", help="names of the table; by default all")
    options = parser.parse_args(argv)
    if unknown := set(options.attack) - ATTACKS.keys():
        parser.error(f"no such attack: {', '.join(unknown)}")
    found = asyncio.run(run(options.attack, options.seconds))
    return int(any(each.faults() for each in found))


if __name__ == "__main__":
    sys.exit(main())
