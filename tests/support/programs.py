"""Programs that tests start, together with all that these start: nothing outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from tests.support.patience import PATIENCE_SECONDS


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """A group for ``Popen(..., process_group=group)``. It is killed at the end of the block.

    Its first member kills it too when this process is gone, however it ended: nobody else has the
    other end of its pipe.
    """
    leader = subprocess.Popen(
        ["sh", "-c", "read -r _; kill -9 0"], stdin=subprocess.PIPE, process_group=0
    )
    try:
        yield leader.pid
    finally:
        # The leader is not yet waited for, so no other group can have its number.
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        assert leader.stdin is not None
        leader.stdin.close()


def run_program(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` in a group of its own, with patience."""
    with process_group() as group:
        return subprocess.run(
            command, timeout=PATIENCE_SECONDS, text=True, process_group=group, **options
        )
