"""Launches of Triton kernels that take smaller tiles where those that were chosen do not fit.

Tiles are chosen by bounds on the shared memory that they take (``shared_memory.py``). What a kernel
takes in the end Triton's compiler alone knows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from triton.runtime.errors import OutOfResources

from megatron_async.errors import ConfigError

logger = logging.getLogger(__name__)

Config = TypeVar("Config")


def launch_fitting(
    name: str,
    config: Config,
    smaller: Callable[[Config], Iterable[Config]],
    launch: Callable[[Config], object],
) -> None:
    """Launch a Triton kernel with ``config``, or with the first of ``smaller(config)`` that fits
    the device where that does not.

    Nothing is remembered: which config a launch takes depends on its own kernel alone, never on the
    launches before it. Triton says so before it queues anything, so this may be captured.

    Raises:
        ConfigError: none fits.
    """
    try:
        launch(config)
        return
    except OutOfResources as error:
        refused = error
    for other in smaller(config):
        if other == config:
            continue
        try:
            launch(other)
        except OutOfResources:
            continue
        _warn(name, config, other, refused.name, refused.required, refused.limit)
        return
    raise ConfigError(
        f"{name} does not fit this GPU: it takes {refused.required} of {refused.limit} "
        f"({refused.name}), with the smallest tiles too"
    ) from refused


@functools.cache
def _warn(
    name: str, config: object, other: object, resource: str, required: int, limit: int
) -> None:
    logger.warning(
        "%s runs with %s, since %s takes %d of %d (%s)",
        name, other, config, required, limit, resource,
    )  # fmt: skip
