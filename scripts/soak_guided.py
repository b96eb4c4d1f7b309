"""Guided requests over HTTP with drafts: what ends validates, and is what serial decoding gives.

    python -m scripts.soak_guided [--requests 10000] [--streams 32]

Ten function schemas with four seeds each are asked again and again, as streams, of a server that
drafts asynchronously. What each should say comes from a server without drafts and asynchronous
scheduling. jsonschema-rs validates. It takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from typing import Any

import jsonschema_rs

from tests.support.guided_tokens import SCHEMAS as BY_NAME
from tests.support.real_server import RealServer, real_server

SCHEMAS = list(BY_NAME.values())
TEXT, SEEDS, LENGTH = "call = ", 4, 160
DRAFTS = ("--num-speculative-tokens", "4", "--speculative-method", "ngram")
ROOM = ("--inference-dynamic-batching-max-requests", "32", "--batch-invariant")


def asks() -> list[dict[str, Any]]:
    """Each schema with each seed; half of them greedy."""
    return [
        {
            "prompt": TEXT, "max_tokens": LENGTH, "seed": seed, "temperature": float(seed % 2),
            "structured_outputs": {"json": schema, "disable_any_whitespace": True}, "stream": True,
        }
        for schema, seed in itertools.product(SCHEMAS, range(SEEDS))
    ]  # fmt: skip


async def told(server: RealServer, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a stream, and why it ended."""
    text, reason = "", ""
    async with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason


async def soak(requests: int, streams: int) -> str:
    """Ask ``requests`` times, ``streams`` at once; returns what was measured."""
    bodies = asks()
    async with real_server("--model", "tiny", *ROOM) as server:
        expected = [await told(server, body) for body in bodies]
    numbers, ended = iter(range(requests)), 0
    validators = [jsonschema_rs.validator_for(schema) for schema in SCHEMAS for _ in range(SEEDS)]
    started = time.monotonic()

    async def client(server: RealServer) -> None:
        nonlocal ended
        for number in numbers:
            at = number % len(bodies)
            found = await told(server, bodies[at])
            assert found == expected[at], (bodies[at], found, expected[at])
            text, reason = found
            if reason == "stop":
                assert validators[at].is_valid(json.loads(text)), text
                ended += 1

    options = ("--inference-async-scheduling", "--depth", "2", *DRAFTS)
    async with real_server("--model", "tiny", *ROOM, *options) as server:
        await asyncio.gather(*(client(server) for _ in range(streams)))
        values = (await server.http.get("/metrics")).text
    seconds = time.monotonic() - started
    drafted = [line for line in values.splitlines() if "accepted_draft_tokens_total{" in line]
    assert drafted and float(drafted[0].split()[-1]) > 0
    return (
        f"{requests:,} requests, {streams} at once, {seconds:.0f} s: all as serial decoding, "
        f"{ended:,} ended and all of them validate"
    )


def main() -> None:
    """Run it, and print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    print(asyncio.run(soak(args.requests, args.streams)))


if __name__ == "__main__":
    main()
