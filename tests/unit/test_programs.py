"""Programs of tests, and a whole run of them, leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import MARK, left_behind
from tests.support.programs import process_group, run_program

ROOT = Path(__file__).parents[2]
GRANDCHILD = "[sys.executable, '-c', 'import time; time.sleep(10**6)']"
LEAVES = f"import subprocess, sys; subprocess.Popen({GRANDCHILD}, pass_fds=[FD])"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reading gives the end of the file once no process has the other end."""
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)


@pytest.mark.parametrize("end", ("", "; sys.exit(3)", "; raise ValueError"))
def test_what_a_program_started_ends_with_it(pipe: tuple[int, int], end: str) -> None:
    read_end, write_end = pipe
    program = LEAVES.replace("FD", str(write_end)) + end
    done = run_program(
        [sys.executable, "-c", program], pass_fds=[write_end], stderr=subprocess.DEVNULL
    )
    assert (done.returncode == 0) == (end == "")
    os.close(write_end)
    assert os.read(read_end, 1) == b""


def test_a_group_ends_where_the_test_fails(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    with pytest.raises(ZeroDivisionError), process_group() as group:
        process = subprocess.Popen(["sleep", "1000000"], pass_fds=[write_end], process_group=group)
        os.close(write_end)
        raise ZeroDivisionError
    assert os.read(read_end, 1) == b""
    assert process.wait() == -signal.SIGKILL


def test_a_group_ends_with_the_process_that_was_killed_inside(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    program = f"""
        import os, signal, subprocess
        from tests.support.programs import process_group
        with process_group() as group:
            subprocess.Popen(["sleep", "1000000"], pass_fds=[{write_end}], process_group=group)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], pass_fds=[write_end], cwd=ROOT
    )
    os.close(write_end)
    assert done.returncode == -signal.SIGKILL
    assert os.read(read_end, 1) == b""


@pytest.mark.parametrize("leaves", (False, True))
def test_a_run_that_leaves_a_process_fails_names_it_and_ends_it(
    leaves: bool, pipe: tuple[int, int], tmp_path: Path
) -> None:
    read_end, write_end = pipe
    (tmp_path / "conftest.py").write_text(
        "from tests.support import leftovers\n"
        "leftovers.WAIT_SECONDS = 0.1\n"
        "def pytest_configure(config): leftovers.watch_for_leftovers(config)\n"
    )
    # The shell in between ends at once, so that what it has started has lost its parent.
    start = f"subprocess.run(['sh', '-c', 'exec sleep 987654 &'], pass_fds=[{write_end}])"
    (tmp_path / "test_it.py").write_text(
        f"import subprocess\ndef test_it():\n    {start if leaves else 'pass'}\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull,
         "--rootdir", str(tmp_path), str(tmp_path)],
        env={**environment, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        pass_fds=[write_end], capture_output=True, text=True,
    )  # fmt: skip
    os.close(write_end)
    assert os.read(read_end, 1) == b""
    assert "1 passed" in done.stdout
    assert done.returncode == int(leaves)
    assert ("left behind" in done.stdout and "sleep 987654" in done.stdout) == leaves


def test_processes_of_other_runs_are_left_alone() -> None:
    assert left_behind("a mark that nobody has") == []
