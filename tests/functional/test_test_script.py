"""``scripts/test``: what it runs where, with how many processes and threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.gpus import order_of_gpus

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class Done(NamedTuple):
    status: int
    output: str
    calls: list[dict[str, Any]]
    """Of ``python -m``: arguments, and the variables that matter."""


def run(
    folder: Path,
    *arguments: str,
    machine: str = "0 3",
    missing: str = "",
    failing: str = "",
    **variables: str,
) -> Done:
    """With a Python that tells how it was called. ``machine`` is what it says of GPUs and
    processes; it has no module ``missing``, and ``failing`` fails."""
    calls = folder / "calls"
    calls.touch()
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "if sys.argv[1] == '-c':\n"
        f"    sys.exit({missing!r} != '' and {missing!r} in sys.argv[2])\n"
        "if sys.argv[1] == '-':\n"
        f"    print({machine!r})\n"
        "    sys.exit()\n"
        f"names = {(*THREADS, *BYTECODE, 'TEST_GPUS')!r}\n"
        "print('of', sys.argv[2])\n"
        "call = {'arguments': sys.argv[2:], **{name: os.environ.get(name) for name in names}}\n"
        f"print(json.dumps(call), file=open({str(calls)!r}, 'a'))\n"
        f"sys.exit(sys.argv[2] == {failing!r})\n"
    )
    python.chmod(0o755)
    own = (*THREADS, *BYTECODE, "TEST_PROCESSES")
    inherited = {k: v for k, v in os.environ.items() if k not in own}
    done = subprocess.run(
        [SCRIPT, *arguments],
        env={**inherited, "PYTHON_BIN": str(python), **variables},
        capture_output=True,
        text=True,
    )
    return Done(
        done.returncode,
        done.stdout + done.stderr,
        [json.loads(line) for line in calls.open()],
    )


def test_everything_is_run_and_arguments_go_to_pytest(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/unit", "-k", "two words")
    assert done.status == 0 and "[test] all passed" in done.output
    *lint, one, other = [call["arguments"] for call in done.calls]
    assert lint == [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    assert sorted((one, other)) == [
        ["mypy"],
        [
            "pytest",
            "-n",
            "3",
            "--dist",
            "worksteal",
            "--durations=10",
            "tests/unit",
            "-k",
            "two words",
        ],
    ]
    assert done.output.index("[test] pytest\nof pytest") < done.output.index("types\nof mypy")
    assert [done.calls[-1][name] for name in THREADS] == ["1", "1"]


def test_quick_runs_lint_types_and_what_is_not_slow(tmp_path: Path) -> None:
    done = run(tmp_path, "-x", "--quick")
    assert done.status == 0
    *lint, one, other = [call["arguments"] for call in done.calls]
    assert [each[0] for each in lint] == ["ruff", "ruff"]
    pytest_call, types = sorted((one, other), key=lambda each: each == ["mypy"])
    assert types == ["mypy"]
    assert pytest_call[5:] == ["--durations=10", "--quick", "-m", "not slow", "-x"]


def test_real_tokenizers_are_run_alone_and_each_in_one_process(tmp_path: Path) -> None:
    done = run(tmp_path, "-x", "--tokenizers")
    (call,) = (call["arguments"] for call in done.calls)
    assert call[:6] == ["pytest", "-n", "3", "--dist", "loadgroup", "--durations=10"]
    assert call[6:] == ["--tokenizers", "-x"]


def test_quick_and_gpu_exclude_each_other(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpu", "--quick", machine="1 8")
    assert (done.status, done.calls) == (2, [])
    assert "--quick and --gpu exclude each other" in done.output


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    done = run(tmp_path, failing="ruff")
    assert done.status == 1 and "[test] failed: lint format\n" in done.output
    assert len(done.calls) == 4
    done = run(tmp_path, failing="mypy")
    assert done.status == 1 and "[test] failed: types\n" in done.output


@pytest.mark.parametrize(
    ("missing", "left"), [("ruff", ["mypy", "pytest"]), ("mypy", ["ruff", "ruff", "pytest"])]
)
def test_a_python_without_lint_tools_runs_the_tests(
    missing: str, left: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, missing=missing)
    assert done.status == 0 and f"is left out: {tmp_path}/python has no {missing}" in done.output
    assert sorted(call["arguments"][0] for call in done.calls) == sorted(left)


def test_a_python_without_what_the_tests_need_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, missing="xdist")
    assert (done.status, done.calls) == (2, [])
    assert "lacks what the tests need; install this package with [test]" in done.output


def test_gpu_runs_its_tests_alone_with_two_threads_each(tmp_path: Path) -> None:
    done = run(tmp_path, "-x", "--gpu", "tests", machine="2 14")
    assert done.status == 0
    (call,) = done.calls
    assert call["arguments"] == [
        "pytest", "-n", "14", "--dist", "worksteal", "--durations=10", "-m", "gpu", "--all", "-x",
        "tests",
    ]  # fmt: skip
    assert [call[name] for name in (*THREADS, "TEST_GPUS")] == ["2", "2", "2"]


def test_processes_and_threads_may_be_given(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpu", machine="1 8", TEST_PROCESSES="3", OMP_NUM_THREADS="5")
    (call,) = done.calls
    assert call["arguments"][2] == "3" and call["OMP_NUM_THREADS"] == "5"


def test_processes_share_bytecode_where_python_was_to_write_none(tmp_path: Path) -> None:
    *_, last = run(tmp_path, PYTHONDONTWRITEBYTECODE="1").calls
    place = str(SCRIPT.parents[1] / ".pytest_cache" / "bytecode")
    assert [last[name] for name in BYTECODE] == [None, place]
    *_, last = run(tmp_path, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX="other").calls
    assert [last[name] for name in BYTECODE] == [None, "other"]
    *_, last = run(tmp_path).calls
    assert [last[name] for name in BYTECODE] == [None, None]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpu", machine="0 2")
    assert (done.status, done.calls) == (2, [])
    assert "--gpu needs an NVIDIA GPU, and PyTorch of" in done.output
    none = tmp_path / "bin" / "nvidia-smi"
    none.parent.mkdir()
    none.write_text("#!/bin/sh\nexit 9\n")
    none.chmod(0o755)
    path = f"{none.parent}:{os.environ['PATH']}"
    done = run(tmp_path, "--gpu", PYTHON_BIN="", PATH=path)
    assert (done.status, done.calls) == (2, [])
    assert "--gpu needs an NVIDIA GPU, and nvidia-smi finds none" in done.output


def test_this_machine_bears_some_processes() -> None:
    """The part of the script that asks the machine, with the Python that runs this."""
    program = SCRIPT.read_text().split("<<'EOF'\n")[1].split("\nEOF\n")[0]
    done = subprocess.run(
        [sys.executable, "-", "cpu"], input=program, capture_output=True, text=True, check=True
    )
    gpus, processes = map(int, done.stdout.split())
    assert gpus == 0 and 1 <= processes <= 8


def test_each_worker_has_a_gpu_of_its_own_first_and_sees_them_all() -> None:
    assert [order_of_gpus(None, 3, f"gw{n}") for n in range(4)] == [
        "0,1,2", "1,2,0", "2,0,1", "0,1,2"
    ]  # fmt: skip
    assert order_of_gpus("GPU-a,GPU-b", 2, "gw11") == "GPU-b,GPU-a"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_setup_lets_one_pip_at_a_time_install_what_torch_needs(
    has_gpu: bool, tmp_path: Path
) -> None:
    """Two would write the same files. Without a GPU there is no build for the CPU here."""
    log, tools = tmp_path / "log", tmp_path / "tools"
    python, smi = tmp_path / ".venv" / "bin" / "python", tools / "nvidia-smi"
    for path, text in (
        (smi, f"exit {int(not has_gpu)}"),
        (
            python,
            f"""
            [ "$1" != -c ] || exit 0
            case "$*" in
                *" show "* | *+cpu*) exit 1 ;;
                *" -r "*) sleep 0.3 && echo pins ;;
                *torch==*) echo torch ;;
                *) echo other ;;
            esac >>{log}
            """,
        ),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    for name in ("requirements", "scripts", "setup.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(SCRIPT.parents[1] / name)
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", '. "$ROOT/scripts/setup.sh"'],
        env={**os.environ, "ROOT": str(tmp_path), "PATH": f"{tools}:{os.environ['PATH']}"},
        check=True,
    )
    assert log.read_text().split() == ["other", "pins", "pins", "torch", "other"]
