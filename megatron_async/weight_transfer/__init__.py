"""The former address of :mod:`megatron_async.weights`: its names, and a warning."""

from __future__ import annotations

import megatron_async.weights as moved
from megatron_async.former_address import names_of

__getattr__ = names_of(moved, __name__)
