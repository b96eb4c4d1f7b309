"""``scripts/measure``: what it runs, and that ``bench`` takes it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_async.cli.main import build_parser

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure"


def measure(folder: Path, *arguments: str) -> tuple[int, str, list[list[str]]]:
    """Exit status, errors, and the commands that the script gives ``megatron-async``. Those with
    4,000 us of host work fail."""
    commands = folder / "commands"
    commands.touch()
    program = folder / "bin" / "megatron-async"
    program.parent.mkdir()
    program.write_text(
        "#!/usr/bin/env python3\nimport json, sys\n"
        f"print(json.dumps(sys.argv[1:]), file=open({str(commands)!r}, 'a'))\n"
        "sys.exit('4000' in sys.argv)\n"
    )
    program.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr, [json.loads(line) for line in commands.open()]


def test_bench_takes_every_part_and_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, errors, commands = measure(tmp_path, str(out))
    assert status == 1 and errors.split() == ["[measure]", "failed:", "host-work"]
    parts = [Path(command[-1]).stem for command in commands]
    assert len(set(parts)) == 10 and out.is_dir()
    for command in commands:
        given = build_parser().parse_args(command)
        assert given.shape is not None and Path(given.json).parent == out


def test_some_parts(tmp_path: Path) -> None:
    status, _, commands = measure(tmp_path, str(tmp_path), "gpt2", "baselines")
    assert status == 0
    assert [command[2] for command in commands] == ["gpt2", "llama8b"]


@pytest.mark.parametrize("arguments", [[], ["out", "gpt2", "9b"]])
def test_says_which_parts_there_are(tmp_path: Path, arguments: list[str]) -> None:
    status, errors, commands = measure(tmp_path, *arguments)
    assert (status, commands) == (2, []) and "8b qwen gpt2" in errors
