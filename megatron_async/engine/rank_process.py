"""A rank other than 0 of a model: started by rank 0, by torchrun, or called as :func:`follow`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

import torch.distributed as dist

from megatron_async.engine.ranked_build import RankModel
from megatron_async.errors import ConfigError
from megatron_async.models.wrapper import GPTInferenceWrapper
from megatron_async.ranks.follower import EXIT_ORPHAN, Follower, join_group
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.meeting import environment_store
from megatron_async.ranks.start import device_of_rank

WATCH_SECONDS = 1.0


def follow(
    layout: Layout,
    device: str,
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    wrapper: GPTInferenceWrapper | None = None,
) -> None:
    """Be a rank other than 0 until rank 0 ends the group; then this process ends, with status 0.

    Args:
        device: "cpu" or "cuda".
        store: where rank 0 is met; None takes the environment of a launcher.
        wrapper: the model, where each rank builds its own.

    Raises:
        ConfigError: the environment is not a launcher's, or is that of rank 0.
    """
    if store is None or rank is None:
        if os.environ.get("RANK") == "0":
            raise ConfigError("RANK=0 has the engine: it leads, and the others follow")
        store, rank = environment_store(layout)
    group = join_group(layout, device_of_rank(device), store, rank)
    try:
        Follower(group, RankModel(device, wrapper)).run()
    except BaseException as error:
        logging.getLogger(__name__).exception("rank %d has failed", rank)
        group.fail(error)
        os._exit(1)  # threads of collectives may wait for ever
    sys.stdout.flush()
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    """Of a process that rank 0 has started: the device, the port of the store, rank 0's process,
    and the sizes of the layout."""
    device, port, parent, *sizes = arguments
    # What a terminal and a service manager send to all processes is for rank 0, which may let
    # requests end first; this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(int(parent))
    rank = int(os.environ["RANK"])
    follow(Layout(*map(int, sizes)), device, store=_store(int(port)), rank=rank)
    return 0


def _store(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)


def _end_with(parent: int) -> None:
    """End when the process that started this one is gone before there is a connection."""

    def watch() -> None:
        over = threading.Event()
        while os.getppid() == parent:
            over.wait(WATCH_SECONDS)
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
