"""Fallbacks are logged once with their reason."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger("megatron_async.contrib.transformers")


@cache
def say_once(message: str) -> None:
    """Log ``message`` as a warning, the first time only."""
    logger.warning(message)
