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
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not module.ispkg:
            family = importlib.import_module(module.name).FAMILY
            found[family.model_type] = family
    return dict(sorted(found.items()))
