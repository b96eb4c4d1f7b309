"""Spreads the processes of a test run over the GPUs. Imported before anything looks for one."""

from __future__ import annotations

import os


def order_of_gpus(visible: str | None, count: int, worker: str) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a worker of pytest-xdist: all ``count`` GPUs, of which each
    worker has another one as its first, and so as its current one."""
    names = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    first = int(worker.removeprefix("gw")) % len(names)
    return ",".join(names[first:] + names[:first])


if int(os.environ.get("TEST_GPUS", "0")) > 1 and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = order_of_gpus(
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        int(os.environ.pop("TEST_GPUS")),
        os.environ["PYTEST_XDIST_WORKER"],
    )
