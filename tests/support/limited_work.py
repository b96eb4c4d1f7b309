"""What ``serving/front_end/limited_worker.py`` does in its tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from megatron_async.errors import RequestError


def make_worker(**given: Any) -> Callable[..., Any]:
    """Does, and says, what it is asked."""

    def work(what: str, much: int = 0) -> Any:
        if what == "hang":
            time.sleep(3600)
        elif what == "eat":
            return len(b"x" * much)
        elif what == "die":
            os._exit(1)
        elif what == "refuse":
            raise RequestError("no")
        return {**given, "pid": os.getpid()}

    return work
