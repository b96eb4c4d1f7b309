"""``python inference/text_generation_server.py``: the same as ``megatron-async serve``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of this script has modules with names of others' (trace). Above it is the checkout,
    # or the package that it is installed in.
    above = Path(__file__).resolve().parents[1]
    sys.path[0] = str(above if (above / "megatron_async").is_dir() else above.parent)

    from megatron_async.cli.main import main

    sys.exit(main(["serve", *sys.argv[1:]]))
