"""The pytest plugin of a run: installs the shim of its suite and writes down how each test ended.

``PEER_SUITE``, ``PEER_CHECKOUT`` and ``PEER_REPORT`` name the shim, the suite's checkout and the
file that gets a line of JSON for each test: its id, its outcome, and the end of what it said.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scripts.peer_suites.servers import SERVERS

MOST_CHARACTERS = 6000


def _write(test: str, outcome: str, said: Any) -> None:
    line = {"test": test, "outcome": outcome, "said": str(said or "")[-MOST_CHARACTERS:]}
    with Path(os.environ["PEER_REPORT"]).open("a") as report:
        report.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has its call, or a phase around it that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported counts as a test."""
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longrepr)


atexit.register(SERVERS.end)  # also where pytest gives up
signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, too
importlib.import_module(f"scripts.peer_suites.shims.{os.environ['PEER_SUITE']}").install(
    Path(os.environ["PEER_CHECKOUT"])
)
