"""Saving as ``megatron.core.dist_checkpointing`` does, in a form that all releases load.

Until 0.18 what is no tensor lies in ``common.pt``; 0.19 keeps it beside the tensors, and still
reads a ``common.pt``. Releases differ in the classes of strategies that write, so none is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

__all__ = ["BACKEND", "COMMON_FILE", "COMMON_OBJECT", "save"]

BACKEND = "torch_dist"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""What 0.19 calls it among the stored objects."""


def save(sharded_state_dict: dict[str, Any], directory: Path) -> None:
    """Write a state dict; all ranks call it.

    The calling process writes: no worker process, no ``__main__`` guard.
    """
    sharded, common = save_preprocess(sharded_state_dict)
    if torch.distributed.get_rank() == 0:
        torch.save(common, directory / COMMON_FILE)
    by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(
        sharded, keep_only_main_replica=True
    )
    dcp_save(
        torch_strategy.mcore_to_pyt_state_dict(by_key, is_loading=False),
        storage_writer=FileSystemWriter(directory),
        planner=torch_strategy.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        ),
        no_dist=torch.distributed.get_world_size() == 1,
    )
    if torch.distributed.get_rank() == 0:
        save_config(CheckpointingConfig(BACKEND, 1), str(directory))
    torch.distributed.barrier()
