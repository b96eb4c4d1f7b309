"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--state-machine-examples",
        type=int,
        default=220,
        help="examples of the engine's state machine, each of up to 100 rule steps",
    )
    parser.addoption(
        "--long-run",
        action="store_true",
        help="decode a million tokens in the long run, instead of a hundred thousand",
    )
