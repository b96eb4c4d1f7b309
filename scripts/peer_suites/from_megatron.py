"""Megatron-LM's smoke test of its server, which is a program, with ours started by it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.peer_suites.servers import free_port, serve_command
from scripts.peer_suites.stand_ins import load

SMOKE = "tests/functional_tests/test_cases/gpt/gpt_inference_server_smoke_*/serve_smoke.py"


def test_the_smoke_test_serves_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = Path(os.environ["PEER_CHECKOUT"]).glob(SMOKE)
    smoke: Any = load("serve_smoke", path)
    port = free_port()
    command = [*serve_command(), "--port", str(port), "--served-model-name", "EMPTY"]
    monkeypatch.setattr(smoke, "build_server_cmd", lambda *arguments: command)
    monkeypatch.setattr(smoke, "READINESS_MARKER", "http://")
    monkeypatch.setattr(smoke, "SERVER_PORT", port)
    monkeypatch.setattr(sys, "argv", ["smoke", "--checkpoint-dir=no", "--tokenizer-model=no"])
    assert smoke.main() == 0
