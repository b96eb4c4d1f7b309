"""The former address of :mod:`megatron_async.contrib.transformers`: its names, and a warning."""

from __future__ import annotations

import megatron_async.contrib.transformers as moved
from megatron_async.former_address import names_of

__all__ = moved.__all__
__getattr__ = names_of(moved, __name__)
