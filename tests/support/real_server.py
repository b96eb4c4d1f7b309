"""``megatron-async serve --model tiny`` in a process of its own, and a client of it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class RealServer:
    """A running server.

    Attributes:
        process: of its front end.
        log: path of what it has written on stderr.
        http: a client with any number of connections.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: str, http: httpx.AsyncClient) -> None:
        self.process = process
        self.log = log
        self.http = http
        self.port = http.base_url.port

    def processes(self) -> list[psutil.Process]:
        """The front end and the engine."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children()]

    def mib(self) -> list[float]:
        """Resident memory of each."""
        return [process.memory_info().rss / MIB for process in self.processes()]

    def children(self, module: str) -> list[psutil.Process]:
        """The processes of a module, which is told by the end of its name."""
        return [each for each in self.processes()[1:] if module in " ".join(each.cmdline())]

    async def control(self, path: str) -> None:
        """A control that must do what it is asked."""
        answer = await self.http.post(path)
        assert answer.status_code == 200, answer.text

    async def connect(self, said: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of one's own, on which ``said`` has been sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(said.encode())
        return reader, writer

    async def short(self) -> None:
        """A request of one token."""
        answer = await self.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200, answer.text

    async def latency(self) -> float:
        """Milliseconds of a request of one token, the median of 15."""
        return sorted([await timed(self.short()) for _ in range(15)])[7] * 1e3

    async def unread(self, body: dict[str, Any]) -> socket.socket:
        """The connection of a stream that nobody reads, with little room for what is not."""
        content = json.dumps(body)
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", self.port))
        opened.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
        return opened

    async def text(self, body: dict[str, Any], most: float = float("inf")) -> str:
        """Of a stream, which is left after about ``most`` characters.

        Raises:
            InterruptedError: with the code of an error that came in it, or in its place.
        """
        text = ""
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise InterruptedError(json.loads(await answer.aread())["error"]["code"])
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line.removeprefix("data: "))
                    if "error" in said:
                        raise InterruptedError(said["error"]["code"])
                    text += said["choices"][0]["text"]
                if len(text) >= most:
                    break
        return text

    async def values(self) -> dict[str, float]:
        """The metrics that have no label but the model; 0 for what the engine has not said yet."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        known = [line for line in lines if line.count("=") == 1 and not line.startswith("#")]
        names = (line.partition("{")[0].removeprefix("megatron_async_") for line in known)
        found = zip(names, (float(line.split()[-1]) for line in known), strict=True)
        return collections.defaultdict(float, found)

    async def until_idle(self) -> None:
        """Wait until no request and no block is held."""
        held = ("num_requests_running", "num_requests_waiting", "http_requests_open")
        while True:
            now = await self.values()
            free = now["kv_blocks_free"] and now["kv_blocks_free"] == now["kv_blocks_total"]
            if free and not any(now[name] for name in held):
                return
            await asyncio.sleep(0.05)

    async def until_status(self, status: int) -> None:
        """Wait for an answer of ``/health``."""
        while (await self.http.get("/health")).status_code != status:
            await asyncio.sleep(0.02)


def url_in(log: Iterable[str]) -> str:
    """Where a server is to be found, as its log says behind what its start has to say."""
    for line in log:
        if found := re.search(r"http://\S+", line):
            return found.group()
    raise AssertionError("the server has ended")


@contextlib.asynccontextmanager
async def real_server(
    *options: str, files: int | None = None, unread: bool = False
) -> AsyncIterator[RealServer]:
    """A server, which ends by SIGTERM with status 0.

    Args:
        files: its limit of open files.
        unread: its log is a pipe that nobody reads once it serves.
    """
    command = [sys.executable, "-m", "megatron_async", "serve", "--port", "0", *options]
    limit: Callable[[], None] | None = None
    if files is not None:
        limits = (files, files)

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    pipes: Any = {"preexec_fn": limit, "cwd": ROOT}
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(command, stderr=subprocess.PIPE if unread else log, **pipes) as process,
    ):
        try:
            if process.stderr is not None:
                url = await asyncio.to_thread(url_in, map(bytes.decode, process.stderr))
            else:
                while "http://" not in (said := Path(log.name).read_text()):
                    assert process.poll() is None, said
                    await asyncio.sleep(0.05)
                url = url_in(said.splitlines())
            pool = httpx.Limits(max_connections=None)
            known: Any = {"base_url": url, "limits": pool, "timeout": PATIENCE_SECONDS}
            async with httpx.AsyncClient(**known) as http:
                yield RealServer(process, log.name, http)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, PATIENCE_SECONDS) == 0
        finally:
            process.kill()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other end closes the connection."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def timed(work: Any) -> float:
    """Seconds that it takes."""
    started = time.monotonic()
    await work
    return time.monotonic() - started
