"""``python -m tests.support.dying_front_end FD``: a front end that ends as soon as it serves."""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_async.serving.front_ends import ToFrontEnd
from megatron_async.serving.messages import Started
from megatron_async.serving.parent_process import Parent

if __name__ == "__main__":
    parent: Parent[Any] = Parent(int(sys.argv[1]), ToFrontEnd)
    parent.receive()
    parent.send(Started())
    os._exit(7)
