"""The command ``megatron-async`` in a process that ends with the one that has started it, however
that ends: Ray kills its actors."""

from __future__ import annotations

import sys

from megatron_async.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))  # in front is the number of a connection that nobody needs
