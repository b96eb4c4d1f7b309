"""The trainers' client: what it raises when the server goes away."""

from __future__ import annotations

import asyncio
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_async.contrib.trainers import client as trainers_client
from megatron_async.contrib.trainers.client import Client
from megatron_async.errors import EngineDeadError
from tests.support.patience import PATIENCE_SECONDS


@pytest.mark.parametrize(
    "said", (b"", b"no HTTP\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1")
)
def test_a_server_that_dies_in_the_middle_is_dead(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def die() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(1 << 16)
                taken.sendall(said)

        thread = threading.Thread(target=die)
        thread.start()
        client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(EngineDeadError, match=r"127\.0\.0\.1:\d+ does not answer: ."):
            client.get("/health")
        thread.join()
    with pytest.raises(EngineDeadError, match=r"does not answer: .*refused"):
        client.get("/health")
    client.close()


def test_texts_that_wait_for_a_call_do_not_keep_it_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than the client has threads for, of an engine that is paused."""
    monkeypatch.setattr(trainers_client, "MOST_AT_ONCE", 3)
    resumed = threading.Event()

    class Paused(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/continue_generation":
                resumed.set()
            assert resumed.wait(PATIENCE_SECONDS)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"text": "a"}')

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Paused)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = Client(f"http://127.0.0.1:{server.server_port}")

    async def ask() -> list[object]:
        texts = [asyncio.create_task(client.generate([number], {})) for number in range(7)]
        await asyncio.sleep(0)  # all are asked before it is
        resume = asyncio.create_task(client.asking("/continue_generation", {}))
        await asyncio.wait_for(resume, PATIENCE_SECONDS / 2)
        return list(await asyncio.gather(*texts))

    try:
        assert asyncio.run(ask()) == [{"text": "a"}] * 7
    finally:
        resumed.set()
        server.shutdown()
        server.server_close()
        thread.join()
        client.close()
