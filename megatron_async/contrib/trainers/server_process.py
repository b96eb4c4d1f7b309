"""A server in a process of its own, for trainers that start their rollout engines themselves."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from megatron_async.errors import EngineDeadError
from megatron_async.processes.child import Child

MODULE = "megatron_async.contrib.trainers.tied_server"
ASK_AGAIN_SECONDS = 0.2
END_SECONDS = 30.0


class ServerProcess:
    """``megatron-async serve`` at a free port, with the routes of trainers. It ends with this
    process.

    Args:
        model: a model directory.
        options: of the command.
        environment: variables besides this process's own.
        host: an address of this host, at which it listens.
        patience: seconds until it must serve.

    Attributes:
        url: at which it listens.

    Raises:
        EngineDeadError: it has ended before it served, or takes longer.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        patience: float = 1800.0,
    ) -> None:
        port = _free_port(host)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"
        listens = ["--host", host, "--port", str(port), "--server-dev-mode"]
        command = ["serve", "--model", model, *listens, *options]
        self._process = Child(MODULE, command, environment=environment)
        try:
            self._wait(patience)
        except BaseException:
            self.close()
            raise

    def _wait(self, patience: float) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = time.monotonic() + patience
        while True:
            status = self._process.poll()
            if status is not None:
                raise EngineDeadError(f"the server has ended with status {status}; see its log")
            try:
                opener.open(f"{self.url}/health").close()
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > end:
                    said = f"the server does not serve after {patience:g} seconds"
                    raise EngineDeadError(f"{said}; see its log") from None
            time.sleep(ASK_AGAIN_SECONDS)

    def close(self) -> None:
        """End it; may be called again."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((host, 0))
        port: int = listening.getsockname()[1]
        return port
