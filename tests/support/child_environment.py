"""The environment of a process that a test starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def child_environment(**more: str) -> dict[str, str]:
    """This process's, with all that it can import: packages may lie on its ``PYTHONPATH`` alone."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, **more}
