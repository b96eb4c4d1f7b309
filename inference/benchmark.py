"""``python inference/benchmark.py``: the same as ``megatron-async bench``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # This file lies in a checkout, whose package need not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron_async.cli.main import main

    sys.exit(main(["bench", *sys.argv[1:]]))
