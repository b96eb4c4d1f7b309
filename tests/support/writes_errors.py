"""``python -m tests.support.writes_errors FD``: says to its parent what its standard error is."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.write(int(sys.argv[1]), type(sys.stderr).__name__.encode())
