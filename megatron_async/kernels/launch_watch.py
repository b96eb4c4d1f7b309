"""Tells the arguments of launches that PyTorch does not see: those of CUDA and Triton kernels; and
keeps those of CUDA back."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any


class Watch(threading.local):
    """``seen`` is called with the arguments of each launch of a thread; None for nobody. While a
    thread ``keeps_back``, its kernels of CUDA are loaded and not launched."""

    seen: Callable[[Iterable[Any]], None] | None = None
    keeps_back = False


watch = Watch()
"""Each thread has its own: engines of several threads capture their graphs side by side."""


@functools.cache
def watch_triton() -> None:
    """From now on launches of Triton's kernels are told, too. Before, Triton is as it came."""
    from triton.runtime import interpreter, jit

    for kernels in (jit.JITFunction, interpreter.InterpretedFunction):
        kernels.run = _told(kernels.run)


def watch_triton_if_loaded() -> None:
    """:func:`watch_triton` where kernels of it may have been defined."""
    if "triton.runtime.jit" in sys.modules:
        watch_triton()


def _told(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def told(kernel: Any, *args: Any, **options: Any) -> Any:
        if watch.seen is not None:
            watch.seen((*args, *options.values()))
        return run(kernel, *args, **options)

    return told
