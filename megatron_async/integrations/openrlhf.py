"""The names of :mod:`megatron_async.contrib.trainers.openrlhf`, at the address of integrations."""

from __future__ import annotations

from typing import Any

import megatron_async.contrib.trainers.openrlhf as own


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(own, name)
