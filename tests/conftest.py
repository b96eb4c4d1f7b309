"""Options of the test suite."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.support.interpreter import INTERPRETED, mend_interpreter

# The same examples in every run of the CI, new ones on everybody's own machine.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


if INTERPRETED:
    mend_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--state-machine-examples",
        type=int,
        default=250,
        help="examples of the engine's state machine, each of up to 110 rule steps",
    )
    parser.addoption(
        "--long-run",
        action="store_true",
        help="decode a million tokens in the long run, instead of a hundred thousand",
    )
