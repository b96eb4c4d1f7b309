"""A stand-in: the trainer's end of a group over gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_async.weights.group import WeightGroup


def trainer_init(init_info: dict[str, Any]) -> Any:
    """The trainer is rank 0; ``group`` is what the client takes apart when it closes."""
    members = WeightGroup(
        init_info["master_address"],
        init_info["master_port"],
        rank=0,
        world_size=init_info["world_size"],
        timeout=60.0,
    )
    return SimpleNamespace(members=members, group=SimpleNamespace(store=None, socket=None))
