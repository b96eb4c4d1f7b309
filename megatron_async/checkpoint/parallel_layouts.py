"""The former address of :mod:`megatron_async.weights.parallel_layouts`, with a warning."""

from __future__ import annotations

import megatron_async.weights.parallel_layouts as moved
from megatron_async.former_address import names_of

__getattr__ = names_of(moved, __name__)
