"""A child ends with its parent, whatever it does and however its parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_async.processes.child import Child
from megatron_async.processes.lifeline import EXIT_ORPHAN
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
PARENT = """
import os, sys, threading
from megatron_async.processes.child import Child

def start():
    child = kept.append(Child("busy", inherited=[1]))

kept = []
thread = threading.Thread(target=start)  # that ends before its child does
thread.start()
thread.join()
print("started", kept[0].pid, flush=True)
kept[0].wait()
"""
WHAT_IT_DOES = {
    # The interpreter is kept: no thread of Python runs, nor a handler of signals.
    "computes": "print('begins', flush=True)\n10 ** 10 ** 9",
    "ignores": """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        print("begins", flush=True)
        time.sleep(3600)
    """,
    "is stopped": """
        import os, signal
        print("begins", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    """,
    "has a child of its own": """
        import subprocess, sys
        print("begins", flush=True)
        subprocess.run([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    """,
}


@pytest.fixture(params=WHAT_IT_DOES)
def parent(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and the child of it that is in the midst of something."""
    (tmp_path / "busy.py").write_text(textwrap.dedent(WHAT_IT_DOES[request.param]))
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(2)]
        lines = {words[0]: words[1:] for words in said}
        assert set(lines) == {"started", "begins"}
        yield process, int(lines["started"][0])
        process.kill()


def test_a_child_ends_with_a_parent_that_is_killed(
    parent: tuple[subprocess.Popen[str], int],
) -> None:
    process, pid = parent
    child = psutil.Process(pid)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs([child], PATIENCE_SECONDS)
    assert gone == [child] and alive == []


def test_a_child_whose_parent_has_gone_before_its_first_line_ends_at_once() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    command = [
        sys.executable,
        "-m",
        "megatron_async.processes.lifeline",
        str(read_end),
        "no.such.module",
    ]
    status = subprocess.run(command, pass_fds=[read_end], cwd=ROOT, check=False).returncode
    os.close(read_end)
    assert status == EXIT_ORPHAN


def test_a_child_that_is_stopped_before_its_first_line_ends_too() -> None:
    child = Child("no.such.module")
    os.kill(child.pid, signal.SIGSTOP)
    child.lifeline.close()
    assert child.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_child_that_nobody_has_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, sys, time\nos.write(int(sys.argv[1]), b'.')\ntime.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("waits")
    assert child.connection.recv(1) == b"."
    child.lifeline.close()
    assert child.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    child.connection.close()


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_child_leaves_the_signals_of_its_first_moments_to_its_parent(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager signals all processes at once, some of which have not begun yet."""
    (tmp_path / "waits.py").write_text("import os, sys\nos.write(int(sys.argv[1]), b'.')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("waits")
    os.kill(child.pid, number)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    assert child.connection.recv(1) == b"." and child.wait(PATIENCE_SECONDS) == 0
