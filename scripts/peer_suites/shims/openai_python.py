"""Tests of the openai client ask a mock of the whole API: here they ask our server."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.peer_suites.servers import SERVERS

MODELS = ("gpt-3.5-turbo-instruct", "gpt-5.4", "gpt-4o", "gpt-5.1", "string", "model")


def install(checkout: Path) -> None:
    """Tell the tests where to ask."""
    server = SERVERS.get(["--served-model-name", *MODELS])
    os.environ["TEST_API_BASE_URL"] = f"{server.url}/v1"
