"""Servers with the embedded model, one for each list of options, shared by the tests that ask."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_RUNNING = 3
MOST_SECONDS = 900
ASSETS = ROOT / "megatron_async" / "assets" / "tiny"
NAME = "--served-model-name"
GENERATION = {"do_sample": True, "max_new_tokens": 64}
"""Ends an answer whose length nobody limits."""


class NotServedError(Exception):
    """A suite starts its server with an option that this server does not have."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A process that serves at ``url``, as in ``http://127.0.0.1:40123``."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(MOST_SECONDS)
        finally:
            self.process.kill()


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@functools.cache
def _model_directory() -> Path:
    """The embedded model with :data:`GENERATION` beside it, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="peer-suites-"))
    atexit.register(shutil.rmtree, folder)
    for file in ASSETS.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def serve_command() -> list[str]:
    """The command that serves the embedded model, and goes by the name of its directory."""
    model = ["--model", str(_model_directory()), "--generation-config"]
    return [sys.executable, "-P", "-m", "megatron_async", "serve", *model]


def start(options: tuple[str, ...]) -> Server:
    """A new server that answers.

    Raises:
        NotServedError: with what it wrote, if it ended.
        TimeoutError: likewise, if it does not begin to serve.
    """
    command = [*serve_command(), "--shutdown-timeout", "1", "--port", "0", *options]
    if NAME not in options:
        command += [NAME, "tiny"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, env=env)
        limit = time.monotonic() + MOST_SECONDS
        while not (found := re.search(r"http://[\d.]+:\d+", Path(log.name).read_text())):
            said = f"no server with {options}: {Path(log.name).read_text()}"
            if process.poll() is not None:
                raise NotServedError(said)
            if time.monotonic() > limit:
                process.kill()
                raise TimeoutError(said)
            time.sleep(0.05)
    return Server(process, found.group())


class Servers:
    """The servers that run, the last used at the end; a fourth ends the one longest unused."""

    def __init__(self) -> None:
        self._running: OrderedDict[tuple[str, ...], Server] = OrderedDict()

    def get(self, options: list[str]) -> Server:
        """One that serves with these options and has not ended."""
        key = tuple(options)
        server = self._running.pop(key, None)
        if server is not None and server.process.poll() is not None:
            server = None
        if server is None:
            while len(self._running) >= MOST_RUNNING:
                self._running.popitem(last=False)[1].end()
            server = start(key)
        self._running[key] = server
        return server

    def get_alone(self, options: list[str]) -> Server:
        """One with these options; all others are ended first, as they may have its port."""
        if self._running.keys() - {tuple(options)}:
            self.end()
        return self.get(options)

    def end(self) -> None:
        """End all of them."""
        while self._running:
            self._running.popitem()[1].end()


SERVERS = Servers()
