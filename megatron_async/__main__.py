"""``python -m megatron_async`` is the console script ``megatron-async``."""

import sys

from megatron_async.inference.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
