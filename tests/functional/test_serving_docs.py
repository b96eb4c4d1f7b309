"""The server as docs/serving.md shows it: the command, the curl and the client."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.real_server import url_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
COMMAND, CURL = re.findall(r"^    ((?:megatron-async|curl) (?:.*\\\n)*.*)", PAGE, re.M)
(CLIENT,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of the page's own command, on a free port."""
    name, *arguments = shlex.split(COMMAND)
    assert name == "megatron-async"
    server = subprocess.Popen(
        [sys.executable, "-m", "megatron_async", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert server.stderr is not None
        url = url_in(server.stderr)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield url
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_pages_begin_with_the_same_commands(page: str) -> None:
    _, *blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S)
    shown = "".join(blocks)[: "".join(blocks).index("}'\n") + 3]
    served, asked = shown.split("\n", 1)
    assert served == f".venv/bin/{COMMAND}"
    assert shlex.split(asked.replace("\\\n", " ")) == shlex.split(CURL.replace("\\\n", " "))


def test_the_curl_gets_a_completion(url: str) -> None:
    command = shlex.split(CURL.replace("\\\n", " ").replace("http://127.0.0.1:5000", url))
    done = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_SECONDS)
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer
    assert answer["usage"]["completion_tokens"] == 20 and answer["choices"][0]["text"]


def test_the_client_gets_a_chat_and_a_number(url: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(CLIENT, {"url": url})
    *chat, number = printed.getvalue().rstrip("\n").split("\n")
    assert "".join(chat) and re.fullmatch("[0-9]{2,5}", number)
