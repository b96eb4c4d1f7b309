"""A rank other than 0 of a model: started by rank 0, by torchrun, or called as :func:`follow`.

Nothing that takes long is imported before this process answers rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_async.processes import standard_error
from megatron_async.processes.call import Call
from megatron_async.processes.lifeline import EXIT_ORPHAN, leave_signals_to_parent
from megatron_async.ranks.rendezvous.call import Line
from megatron_async.ranks.rendezvous.shared import Shared

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_async.models.served import ServedModel
    from megatron_async.ranks.follower import Group
    from megatron_async.ranks.layout import Layout


def follow(
    layout: Layout,
    device: str,
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    model: ServedModel | None = None,
) -> None:
    """Be a rank other than 0 until rank 0 ends the group; then this process ends, with status 0.
    It leaves SIGINT and SIGTERM to rank 0 meanwhile.

    Args:
        device: "cpu" or "cuda".
        store: where rank 0 is met; None takes the environment of a launcher.
        model: the model, where each rank builds its own.

    Raises:
        ConfigError: the environment is not a launcher's, or is that of rank 0; or ranks of several
            hosts have no secret.
    """
    from megatron_async.errors import ConfigError
    from megatron_async.ranks.follower import join_group
    from megatron_async.ranks.open_files import check_files
    from megatron_async.ranks.rendezvous.meeting import environment_store
    from megatron_async.ranks.start import device_of_rank

    check_files(layout)
    if store is None or rank is None:
        if os.environ.get("RANK") == "0":
            raise ConfigError("RANK=0 has the engine: it leads, and the others follow")
        store, rank = environment_store(layout)
    group = join_group(layout, device_of_rank(device), store, rank)
    if threading.current_thread() is threading.main_thread():
        # A launcher sends them to all ranks. Rank 0 lets requests end, and then ends this one.
        leave_signals_to_parent()
    _run(group, device, model)


def _run(group: Group, device: str, model: ServedModel | None = None) -> None:
    import logging

    from megatron_async.build.rank_model import RankModel
    from megatron_async.processes.garbage import imports_are_over
    from megatron_async.ranks.follower import Follower

    imports_are_over()
    try:
        Follower(group, RankModel(device, model)).run()
    except BaseException as error:
        logging.getLogger(__name__).exception("rank %d has failed", group.rank)
        group.fail(error)
        standard_error.drain()
        os._exit(1)  # threads of collectives may wait for ever
    if device.startswith("cuda"):
        from megatron_async.ranks import process_group

        process_group.leave()  # as rank 0 does
    sys.stdout.flush()
    standard_error.drain()
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    """Run a process that rank 0 has started. Its arguments are the connection to rank 0, the
    device, and the sizes of the layout."""
    descriptor, device, *sizes = arguments
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    try:
        shared = Shared.take_from(connection)
    except OSError:
        return EXIT_ORPHAN
    line = Line(Call(connection.detach()))

    from megatron_async.ranks.follower import meet_rank_0
    from megatron_async.ranks.layout import Layout
    from megatron_async.ranks.start import device_of_rank

    rank = int(os.environ["RANK"])
    layout = Layout(*map(int, sizes))
    _run(meet_rank_0(layout, device_of_rank(device), rank, line, shared), device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
