"""A stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_async.weights.announced import send_announced


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], Any]
) -> None:
    """Send all, packed."""
    assert src == 0
    send_announced(group.members, [post_iter_func(item) for item in iterator], packed=True)
