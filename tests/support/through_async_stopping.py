"""A pytest plugin for transformers' own tests: plain ``generate`` stops asynchronously in them.

In a checkout of transformers whose version is the installed one:

    PYTHONPATH=PROJECT:PROJECT/tests/support python -m pytest -p through_async_stopping \
        tests/models/llama/test_modeling_llama.py -m generate

Without a GPU stopping would be synchronous, so streams that run late take the place of CUDA's. The
last line says how many calls went through, and how many checks were under way.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from transformers import GenerationMixin

from megatron_async.contrib.transformers import async_stopping
from megatron_async.contrib.transformers.stopping.decoding import Decoding

if TYPE_CHECKING:
    from tests.support.late_streams import LateStreams
else:  # there ``tests`` is that of transformers
    from late_streams import LateStreams

AHEAD = 3
_calls = {"generate": 0, "asynchronous": 0, "with checks on a stream": 0, "checks": 0}
_seeds = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    stock = GenerationMixin.generate

    @functools.wraps(stock)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not None:
            return stock(model, *args, **kwargs)
        streams = LateStreams(next(_seeds))
        _calls["generate"] += 1
        try:
            with async_stopping(model, AHEAD, streams):
                return stock(model, *args, **kwargs)
        finally:
            _calls["with checks on a stream"] += streams.submitted > 0
            _calls["checks"] += streams.submitted

    run = Decoding.run

    @functools.wraps(run)
    def counted(decoding: Decoding) -> Any:
        _calls["asynchronous"] += 1
        return run(decoding)

    GenerationMixin.generate, Decoding.run = generate, counted  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(", ".join(f"{name} {count}" for name, count in _calls.items()))
