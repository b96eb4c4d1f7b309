"""The plugin through which transformers' own tests are run by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from transformers import GenerationMixin

from megatron_async.contrib.transformers.stopping.decoding import Decoding
from tests.support import late_streams
from tests.support.tiny_generators import generator_model, prompts

PLUGIN = Path(late_streams.__file__).with_name("through_async_stopping.py")


def test_calls_go_through_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)
    monkeypatch.setattr(Decoding, "run", Decoding.run)
    monkeypatch.setitem(sys.modules, "late_streams", late_streams)  # as in a checkout
    spec = importlib.util.spec_from_file_location("through_async_stopping", PLUGIN)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    model, given = generator_model("llama"), prompts(1)
    expected = model.generate(**given, max_new_tokens=6, eos_token_id=[999], pad_token_id=0)
    plugin.pytest_configure(None)
    found = model.generate(**given, max_new_tokens=6, eos_token_id=[999], pad_token_id=0)
    assert found.equal(expected)
    model.generate(**given, max_new_tokens=6, num_beams=2, pad_token_id=0)
    lines: list[str] = []
    plugin.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert lines == ["generate 2, asynchronous 1, with checks on a stream 1, checks 6"]
