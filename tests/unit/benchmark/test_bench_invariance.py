"""``scripts/bench_invariance.py`` prints its lines, and begins none when its seconds are over."""

from __future__ import annotations

import sys

import pytest

from scripts import bench_invariance

OPTIONS = ("--device", "cpu", "--rounds", "1", "--steps", "2", "--prompt", "4")


def lines_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[list[str], list[str]]:
    """What each line of the table is of, and what was left out."""
    monkeypatch.setattr(sys, "argv", ["bench_invariance", *OPTIONS, *options])
    bench_invariance.main()
    output, error = capsys.readouterr()
    table = [line.split(" | ")[0].removeprefix("| ") for line in output.splitlines()[2:]]
    left = [line.partition("over: ")[2] for line in error.splitlines() if "left out" in line]
    return table, left


def test_each_kind_of_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ("--model", "random:tiny-llama", "--batch-sizes", "2")
    table, left = lines_of(capsys, monkeypatch, *model, "--prefill", "2x5", "--train", "1x6")
    assert table == ["trainer's step, 1 x 6", "prefill, 2 x 5", "decode, 2 rows"] and not left


def test_no_line_begins_when_the_seconds_are_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bench_invariance.Rows("random:tiny-llama", (1, 6), layers=1)
    monkeypatch.setattr(bench_invariance, "SMALL_TABLE", (rows, *bench_invariance.SMALL_TABLE))
    name = "random:tiny-llama, 1 layers, trainer's step, "
    table, left = lines_of(capsys, monkeypatch, "--table", "--seconds", "1e-9")
    assert not table and left == [f"{name}1 x 6", "random:tiny-llama", f"{name}2 x 32"]
    monkeypatch.setattr(bench_invariance, "SMALL_TABLE", (rows,))
    assert lines_of(capsys, monkeypatch, "--table") == ([f"{name}1 x 6"], [])
