"""``python -m tests.support.stub_front_end FD``: a front end that does no more than to end: with
status 7 as soon as it serves, or, when its model is "patient", with 8 at the news that the engine
was given up; "frozen" stands still as soon as it serves, and "slow" never does."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from megatron_async.processes.messages import Started
from megatron_async.processes.parent import Parent
from megatron_async.serving.front_end.front_ends import ToFrontEnd
from megatron_async.serving.messages import GivenUp

if __name__ == "__main__":
    parent: Parent[Any] = Parent(int(sys.argv[1]), ToFrontEnd)
    launch = parent.receive()
    if launch.settings.model == "slow":
        parent.receive()
    parent.send(Started())
    if launch.settings.model == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if launch.settings.model == "patient":
        os._exit(8 if isinstance(parent.receive(), GivenUp) else 0)
    os._exit(7)
