"""Mamba-2 mixers in checkpoints of ``dist_checkpointing``, as megatron-core lays them out:
what its tensor-parallel ranks divide each for itself has a name of its own."""

from __future__ import annotations

from typing import Any

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip


def mixer_shards(mixer: Any, prefix: str, offsets: Any = ()) -> dict[str, Any]:
    """The sharded state dict of a mixer, whose data are views of the parameters.

    Args:
        prefix: of the state dict.
        offsets: of this layer among stacked ones.
    """
    sizes = mixer.sizes
    shared = sizes.groups * sizes.state_size
    channels = {"x": sizes.inner, "B": shared, "C": shared}
    parts = {"in_proj": {"z": sizes.inner, **channels, "dt": sizes.heads}, "conv1d": channels}
    found: dict[str, Any] = {}
    for name, parameter in mixer.named_parameters():
        rows = parts.get(name.partition(".")[0])
        pieces = {name: parameter}
        if rows is not None:
            split = parameter.detach().split(list(rows.values()))
            pieces = {f"{name}.{part}": piece for part, piece in zip(rows, split, strict=True)}
        for key, piece in pieces.items():
            found[f"{prefix}{key}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{key}", piece, *offsets, prepend_axis_num=len(offsets)
            )
    return found
