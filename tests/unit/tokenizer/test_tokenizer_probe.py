"""A ``tokenizer.json`` of anybody's is tried in a process with limits, and refused in one line."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_async.errors import CheckpointError
from megatron_async.tokenizer import probing
from megatron_async.tokenizer.probe import MOST_ID, answer
from megatron_async.tokenizer.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "megatron_async/assets/tiny/tokenizer.json"
VALUES: dict[str, Any] = json.loads(TINY.read_text())
MOST_KIB = 64 * 1024


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """This process's peak grows by no more than 64 MiB in a test."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


def written(path: Path, **changes: Any) -> Path:
    (path / "tokenizer.json").write_text(json.dumps({**VALUES, **changes}))
    return path


def replaced(pattern: dict[str, str], content: str, steps: int = 1) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * steps}


def added(token_id: int, content: str, *, normalized: bool = False) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return [
        {"id": token_id, "content": content, "special": True, "normalized": normalized, **flags}
    ]


def padding(length: Any, multiple: int | None = None) -> dict[str, Any]:
    side = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    return {"strategy": length, "pad_to_multiple_of": multiple, **side}


OMEGA = {"String": "\u03a9"}
MEMORY = "it takes too much memory: its rules or its numbers are too large"
VOCABULARY = {**VALUES["model"], "vocab": {**VALUES["model"]["vocab"], "zz": 2**31}}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "multiplies": ({"normalizer": replaced(OMEGA, "\u03a9" * 1000, 4)}, MEMORY),
    "multiplies_once": (
        {"normalizer": replaced(OMEGA, "x" * 999)},
        "1 characters become 999 tokens",
    ),
    "of_a_class": ({"normalizer": replaced({"Regex": r"\p{Thai}"}, "a" * 99)}, "become"),
    "prepends": ({"normalizer": {"type": "Prepend", "prepend": "x" * 9999}}, "become"),
    "added_token": (
        {
            "added_tokens": added(300, "\u03a9", normalized=True),
            "normalizer": replaced(OMEGA, "\u03a9" * 1000, 4),
        },
        MEMORY,
    ),
    "grows_back": (
        {"decoder": {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 999}},
        "come back as",
    ),
    "padding": ({"padding": padding({"Fixed": 10**8})}, "padding has length=100000000; the most"),
    "multiple": (
        {"padding": padding("BatchLongest", 2**40)},
        "padding has pad_to_multiple_of=1099",
    ),
    "large_id": ({"model": VOCABULARY}, "token 'zz' has id 2147483648; the most is"),
    "added_id": ({"added_tokens": added(MOST_ID, "<x>")}, "token '<x>' has id 16777216; the most"),
    "template": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "s", "type_id": 0}}] * 9999,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"s": {"id": "s", "ids": [1], "tokens": ["s"]}},
            }
        },
        "1 characters become 9999 tokens",
    ),
    "negative": ({"model": {**VOCABULARY, "vocab": {"a": -1}}}, "integer `-1`, expected u32"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_by_name(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, reason = HOSTILE[name]
    with pytest.raises(CheckpointError, match="json: not a valid tokenizer") as raised:
        Tokenizer.from_directory(written(tmp_path, **changes))
    assert reason in str(raised.value) and str(raised.value).isprintable()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "changes",
    (
        {"padding": padding({"Fixed": 512})},
        {"truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0,
                        "direction": "Right"}},
        {"normalizer": {"type": "NFKD"}},
        {"added_tokens": added(5000, "<far>")},
    ),
    ids=("padding", "truncation", "decomposition", "far id"),
)  # fmt: skip
def test_an_ordinary_tokenizer_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(written(tmp_path, **changes))
    assert len(tokenizer.tokenize("Hello, world")) == len("Hello, world")


def test_a_content_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer.from_directory(written(tmp_path, version="1.0"))

    def refuse(*_: Any) -> str:
        raise AssertionError("tried again")

    monkeypatch.setattr(probing, "_ask", refuse)
    Tokenizer.from_directory(tmp_path)
    with pytest.raises(AssertionError, match="tried again"):
        Tokenizer.from_directory(written(tmp_path, version="1.0", added_tokens=[]))


def test_a_process_that_is_stopped_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(probing.Child):
        def __init__(self, module: str, **options: Any) -> None:
            super().__init__(module, **options)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(probing, "Child", Stopped)
    monkeypatch.setattr(probing, "MOST_SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="a process that tries it has not ended within"):
        probing.check_tokenizer(tmp_path, b"{}")


def test_a_process_that_cannot_be_started_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(probing, "Child", refuse)
    with pytest.raises(CheckpointError, match="cannot be started: Resource temporarily unavailab"):
        probing.check_tokenizer(tmp_path, b"{ }")


def test_what_is_loaded_is_not_written_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON a tokenizer has a place for each id up to the largest."""
    far = {**VALUES["model"], "vocab": {**VALUES["model"]["vocab"], "zz": MOST_ID - 1}}
    assert answer(json.dumps({**VALUES, "model": far}).encode()) == ""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**VALUES, "model": far})))
    assert tokenizer.token_name(MOST_ID - 1) == "zz"
