"""The open files that a rank needs, looked at before there is any."""

from __future__ import annotations

from megatron_async.processes.limits import need_files
from megatron_async.ranks.layout import Layout

FILES = 64
"""A process that is a rank has some 20 open at a time, without those below."""
FILES_OF_RANK = 16
"""For each further rank: a connection in each group that both are in."""


def check_files(layout: Layout) -> None:
    """Raises ConfigError where a process of a group may open too few files: the others would wait
    for a rank that lacks one."""
    if layout.world_size > 1:
        need_files(FILES + FILES_OF_RANK * (layout.world_size - 1), f"a rank of {layout}")
