"""What ``bench`` says of the host beside its times."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from megatron_async.benchmark.measuring.host import (
    HostConditions,
    conditions_line,
    host_watch,
    reference_us,
    reference_work,
)

SPIN = "import os; os.nice({})\nprint('spins', flush=True)\nwhile os.getppid() == {}: pass"
"""A process that keeps a core busy until it is killed, or its parent is."""


def test_reference_is_the_same_work_each_time() -> None:
    assert reference_work() == reference_work() == sum(range(500))
    assert 0 < reference_us() < 1e5


def test_own_work_is_nobody_elses() -> None:
    with host_watch() as seen:
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            pass
    assert seen[0].other_threads_cores < 0.3


def test_another_thread_is_seen() -> None:
    def spin() -> None:
        while time.thread_time() < 0.5:
            pass

    thread = threading.Thread(target=spin)
    started = time.perf_counter()
    with host_watch() as seen:
        thread.start()
        thread.join()
    # Half a second of it, whatever share of a core that was.
    assert seen[0].other_threads_cores * (time.perf_counter() - started) > 0.4


@pytest.mark.parametrize("niceness", [0, 10])
def test_another_process_is_seen(niceness: int) -> None:
    program = SPIN.format(niceness, os.getpid())
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"spins\n"
        with host_watch() as seen:
            time.sleep(1.0)
        # Where it gets no core, others have them.
        assert seen[0].other_processes_cores > 0.2
    finally:
        process.kill()
        process.communicate()


def test_what_is_interrupted_has_no_conditions() -> None:
    with pytest.raises(KeyError), host_watch() as seen:
        raise KeyError
    assert seen == []


def test_line_has_the_extremes_of_all_rounds() -> None:
    rounds = [
        HostConditions((40.0, 41.0), 0.0, 2.0, 0.0),
        HostConditions((39.0, 80.0), 0.1, 0.0, 0.3),
    ]
    assert conditions_line(rounds) == (
        "host: reference work 39 to 80 us; cores at most, of a round: "
        "other threads 0.1, other processes 2.0, stolen 0.3"
    )
