"""Modules that have moved: what stands at a former address has the same names, and warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any


def names_of(moved: ModuleType, former: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module ``former``, after a warning to its importer."""
    warnings.warn(f"{former} is now {moved.__name__}", DeprecationWarning, stacklevel=3)

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(moved, name)

    return get
