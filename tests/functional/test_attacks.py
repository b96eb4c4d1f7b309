"""Hostile requests, one of each kind, beside a stream: ``scripts/attack_server.py`` repeats them.

The stream has its text, the front end stays small, and the server answers afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from scripts.attack_server import ATTACKS, KEY, MOST_MIB
from tests.support.real_server import RealServer, real_server

KINDS = (
    "objects as prompt",
    "a million token ids",
    "15 MB of text",
    "a million stops",
    "depth",
    "500,000 messages",
    "many headers",
    "one header",
    "one URL",
    "trailers",
    "pipelined GETs",
    "40 bodies together",
)
STREAM = {"prompt": "def f(", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def peak_mib(server: RealServer) -> float:
    """The most memory that the front end has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def test_a_stream_has_its_text_beside_each_attack() -> None:
    asyncio.run(attack_all())


async def attack_all() -> None:
    options = ("--inference-async-scheduling", "--api-key", KEY)
    async with real_server(*options) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        body = {**STREAM, "stream": True}
        text, before = await server.text(body), peak_mib(server)
        for name in KINDS:
            stream = asyncio.create_task(server.text(body))
            # The server may hang up, and some attacks end by themselves after seconds.
            with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                await ATTACKS[name]()(server)
            assert await stream == text, name
            assert peak_mib(server) < before + MOST_MIB, name
        await server.until_idle()
        assert (await server.http.get("/health")).status_code == 200
