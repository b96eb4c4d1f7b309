"""Output that cannot be written: the standard output, reports and traces."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from megatron_async.cli.main import main
from megatron_async.cli.output.output_file import OutputFile
from megatron_async.verify import command as verify

Capture = pytest.CaptureFixture[str]
SMALL = ("--shape", "tiny-llama", "--prompt-tokens", "8", "--device", "cpu")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@needs_full
def test_output_without_room_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert main(["verify", "--list-scenarios"]) == 2
    err = capsys.readouterr().err
    assert "the standard output cannot be written: No space left on device" in err
    assert err.count("\n") == 1


def test_a_closed_output_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)  # as Python has it where there is none
        assert main(["verify", "--list-scenarios"]) == 2
    err = capsys.readouterr().err
    assert "the standard output is closed" in err and err.count("\n") == 1


def test_errors_without_a_place_to_go_are_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["generate", "--model", "/no/such", "--prompt", "a"]) == 2
    assert main(["verify", "--list-scenarios"]) == 0


def test_other_errors_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "libnone.so")

    monkeypatch.setattr(verify, "_list_scenarios", fail)
    with pytest.raises(FileNotFoundError):
        main(["verify", "--list-scenarios"])


def test_what_the_encoding_lacks_is_shown_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.txt"
    with file.open("w", encoding="ascii") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        arguments = ("--prompt", "\u00e4", "b", "--max-new-tokens", "4")
        assert main(["generate", *arguments, "--device", "cpu"]) == 0
    assert file.read_bytes().startswith(b"=== 1/2: '\\xe4'\n")


@needs_full
def test_a_report_that_finds_no_room_is_said_once(capsys: Capture) -> None:
    options = ("--batch-sizes", "1,2", "--depths", "0", "--rounds", "1", "--new-tokens", "14")
    assert main(["bench", *SMALL, *options, "--json", "/dev/full"]) == 2
    captured = capsys.readouterr()
    error = "error: --json /dev/full: cannot be written: No space left on device; choose"
    assert captured.err.count("error: ") == captured.err.count(error) == 1
    rows = [line.split() for line in captured.out.splitlines()[2:4]]
    assert [(row[:2], row[2] != "failed") for row in rows] == [
        (["1", "0"], True),
        (["2", "0"], True),
    ]


@needs_full
def test_a_trace_that_finds_no_room_is_one_line(capsys: Capture) -> None:
    assert main(["trace", *SMALL, "--steps", "6", "-o", "/dev/full"]) == 2
    captured = capsys.readouterr()
    assert "--output /dev/full: cannot be written: No space left" in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "report.json", tmp_path / "link.json"
    link.symlink_to(path)
    file = OutputFile("--json", str(link))
    assert not path.exists()
    file.write("old")
    write = Path.write_text

    def cut_off(self: Path, text: str) -> int:
        write(self, text[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(KeyboardInterrupt):
        file.write("new")
    assert path.read_text() == "old" and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_pipe_is_written_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = OutputFile("--json", str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file.write("text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    os.close(reader)
