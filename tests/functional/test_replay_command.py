"""``generate --record`` and ``replay``: a bug report is a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_async.cli.main import main

Capture = pytest.CaptureFixture[str]


def record(path: Path, *options: str) -> None:
    prompts = ["--prompt", "def f(n):", "class Stack:", "import os", "x = ["]
    sampling = ["--temperature", "0.8", "--max-new-tokens", "12"]
    memory = ["--max-requests", "2", "--block-count", "3"]
    device = ["--device", "cpu", "--record", str(path)]
    assert main(["generate", *prompts, *sampling, *memory, *device, *options]) == 0


@pytest.mark.parametrize("depth", (None, 0, 2))
def test_a_recorded_generation_is_repeated(
    depth: int | None, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "--depth", "2")
    capsys.readouterr()
    at = [] if depth is None else ["--depth", str(depth)]
    assert main(["replay", str(path), *at]) == 0
    how = "with equal tokens (recorded at depth 2)" if depth == 0 else "exactly"
    expected = f"repeated {how}: 4 requests, 4 commands, depth {2 if depth is None else depth}\n"
    assert capsys.readouterr().out == expected


def test_a_run_that_went_otherwise_is_shown(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if "finished" in line)["finished"]["tokens"][0] += 1
    path.write_text("\n".join(map(json.dumps, lines)))
    capsys.readouterr()
    assert main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("differs: entry ") and "not repeated: 4 requests" in out
    assert main(["replay", str(path), "--depth", "1"]) == 1
    assert capsys.readouterr().out.startswith("differs: request ")


def test_the_model_is_the_recorded_one(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "--model", "random:tiny-nemotron-h")
    assert main(["replay", str(path)]) == 0
    path.write_text(path.read_text().replace("random:tiny-nemotron-h", "my-model"))
    assert main(["replay", str(path)]) == 2
    assert "recorded with the model 'my-model'; add --model PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    ((["missing.jsonl"], "cannot be read"), (["--depth", "x", "f"], "--depth"), ([], "FILE")),
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["replay", *arguments])
    except SystemExit as stopped:
        status = int(str(stopped.code))
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "missing" / "run.jsonl")
    assert main(["generate", "--prompt", "x", "--device", "cpu", "--record", path]) == 2
    assert "record=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "old", "new"),
    (
        (0, '"record": null', '"record": "mine.txt"'),
        (0, '"model": "tiny"', '"model": 7'),
        (0, '"model": "tiny", ', ""),
        (0, '"max_requests": 2', '"max_requests": ' + "9" * 5000),
        (0, '"tokenizer_model": null', '"tokenizer_model": "/etc/hostname"'),
        (1, '"tokens": [', '"tokens": [-1, '),
        (1, '"step": 0', '"step": 18446744073709551616'),
        (1, '"key": 0', '"key": {}'),
        (1, '"command": "AddRequest"', '"command": ["AddRequest"]'),
    ),
)
def test_a_hostile_run_is_one_line_and_opens_nothing(
    line: int, old: str, new: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, mine = tmp_path / "run.jsonl", tmp_path / "mine.txt"
    record(path)
    mine.write_text("precious")
    lines = path.read_text().splitlines()
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    assert mine.read_text() == "precious"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_alone(
    capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--prompt", "def f(n):", "--max-new-tokens", "5", "--device", "cpu"]
    assert main(["generate", *options]) == 0
    text = capsys.readouterr().out
    assert main(["generate", *options, "--record", "/dev/full"]) == 0
    assert capsys.readouterr().out == text
    assert [r.message for r in caplog.records if "/dev/full" in r.message] == [
        "record='/dev/full' cannot be written any more: No space left on device; the run goes on, "
        "and is not recorded"
    ]
