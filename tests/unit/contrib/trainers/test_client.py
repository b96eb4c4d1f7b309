"""The trainers' client: what it raises when the server goes away."""

from __future__ import annotations

import socket
import threading

import pytest

from megatron_async.contrib.trainers.client import Client
from megatron_async.errors import EngineDeadError


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
