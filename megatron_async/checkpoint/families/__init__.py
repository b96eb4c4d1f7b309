"""The types of Hugging Face models, one module each: whatever has a ``FAMILY`` is one.

``docs/models.md`` says how to add one.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from megatron_async.checkpoint.huggingface.family import Family


@functools.cache
def families() -> dict[str, Family]:
    """By ``model_type``, in alphabetical order."""
    found: dict[str, Family] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        family = importlib.import_module(f"{__name__}.{module.name}").FAMILY
        found[family.model_type] = family
    return found
