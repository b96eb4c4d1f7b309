"""megatron-core ``dist_checkpointing`` directories (format ``torch_dist``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_async import megatron_compat as compat
from megatron_async.checkpoint.megatron.megatron_root import BACKEND_FILE
from megatron_async.checkpoint.megatron.parts import parts_of
from megatron_async.checkpoint.native import copy_tokenizer_files, token_count_of, write_config
from megatron_async.checkpoint.quantized import check_whole
from megatron_async.checkpoint.reading.common_file import read_common
from megatron_async.checkpoint.reading.distributed_metadata import StoredChunk, StoredTensor
from megatron_async.checkpoint.reading.json_file import one_line, read_json
from megatron_async.checkpoint.reading.regular_files import file_size, read_range
from megatron_async.checkpoint.reading.torch_archive import read_tensor
from megatron_async.checkpoint.targets import Stage
from megatron_async.errors import CheckpointError
from megatron_async.megatron_compat import checkpoints
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.quantized.linear import SCALE

from megatron.core import parallel_state  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import (  # isort: skip
    ShardedTensor,
    apply_factories,
)
from megatron.core.transformer.mlp import MLP  # isort: skip


# Our layers have separate norms; megatron's checkpoints name them as the fused layers do.
_STORED_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_STORED_LATENT_NAMES = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Stored names of layers with multi-latent attention, whose first norm stands before two linear
layers."""


_HYBRID_NAMES = (
    (re.compile(r"(layers\.\d+)\.norm\."), r"\1.mixer.in_proj.layer_norm_"),
    (re.compile(r"decoder\.final_layernorm\."), "decoder.final_norm."),
)
"""Names of megatron's ``MambaStack``."""

_NOT_WEIGHTS = re.compile(r"(optimizer|chained_\d+|rng_state|rerun_state_machine)\b")


def _no_state(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}


def _sharded_state_dict(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    # megatron's MLP asks each child for its part, an activation that is a plain module too.
    for module in model.modules():
        if isinstance(module, MLP):
            for child in module.children():
                if not hasattr(child, "sharded_state_dict") and not list(child.parameters()):
                    child.sharded_state_dict = _no_state
    if _is_hybrid(model):
        metadata = {**metadata, "non_homogeneous_layers": True}
    sharded: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    return sharded


def _is_hybrid(model: Any) -> bool:
    config: ModelConfig | None = getattr(model, "model_config", None)
    return config is not None and config.hybrid_override_pattern is not None


def _stored_name(key: str, model: Any) -> str:
    latents = model.config.multi_latent_attention
    for ours, theirs in (_STORED_LATENT_NAMES if latents else _STORED_NAMES).items():
        key = key.replace(f".{ours}", f".{theirs}")
    for our_name, theirs in _HYBRID_NAMES if _is_hybrid(model) else ():
        key = our_name.sub(theirs, key)
    return key


def _is_norm_of_experts(key: str, config: ModelConfig) -> bool:
    """Whether ``key`` is of a norm in front of experts: Transformer Engine's layers, which train
    such models, fuse it with nothing."""
    if config.num_moe_experts is None or ".pre_mlp_layernorm." not in key:
        return False
    layer = re.search(r"layers\.(\d+)\.pre_mlp", key)
    return config.has_experts(int(layer[1]) if layer is not None else 0)


def save_distributed(
    path: str | Path,
    model: Any,
    config: ModelConfig,
    *,
    tokenizer_files: Iterable[str | Path] = (),
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
) -> None:
    """Save ``model`` as ``megatron.core.dist_checkpointing.save`` does, with our config.json.

    All ranks call it; the weights keep their dtype. The directory is made if need be.
    """
    check_whole(path, model)
    directory = Path(path)
    if not parallel_state.model_parallel_is_initialized():
        compat.ensure_parallel_state()
    directory.mkdir(parents=True, exist_ok=True)
    sharded_state_dict = _sharded_state_dict(model, {})
    for value in nested_values(sharded_state_dict):
        if hasattr(value, "key") and not _is_norm_of_experts(value.key, config):
            value.key = _stored_name(value.key, model)
    checkpoints.save(sharded_state_dict, directory)
    if torch.distributed.get_rank() == 0:
        copy_tokenizer_files(directory, tokenizer_files)
        write_config(
            directory,
            config,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
            dtype=next(model.parameters()).dtype,
            token_count=token_count_of(model),
        )


def _read_chunk(name: str, chunk: StoredChunk) -> torch.Tensor:
    if chunk.start + chunk.length > file_size(chunk.file):
        raise CheckpointError(f"{chunk.file}: truncated: {name} is not complete")
    data = read_range(chunk.file, chunk.start, chunk.length)
    try:
        return read_tensor(data, chunk.sizes)
    except Exception as error:  # a corrupt archive can raise anything
        raise CheckpointError(f"{chunk.file}: {name} refused: {one_line(error)}") from error


def _parts(model: Any, stored: dict[str, StoredTensor]) -> dict[str, list[ShardedTensor]]:
    """This rank's parts of the stored tensors by stored name; each ``data`` is a view.

    Layers are stored stacked or each under its own name, gate and up projections as one tensor
    or two: as the names in ``stored`` tell.
    """
    metadata = {
        "non_homogeneous_layers": any(name.startswith("decoder.layers.0.") for name in stored),
        "singleton_local_shards": any(name.endswith(".linear_fc1.weight_w") for name in stored),
    }
    sharded = _sharded_state_dict(model, metadata)
    apply_factories(sharded)
    parts: dict[str, list[ShardedTensor]] = {}
    for part in nested_values(sharded):
        if isinstance(part, ShardedTensor) and not part.key.endswith(f".{SCALE}"):
            name = part.key if part.key in stored else _stored_name(part.key, model)
            parts.setdefault(name, []).append(part)
    return parts


def load_weights(directory: Path, model: Any, content: Mapping[str, StoredTensor]) -> None:
    """Fill this rank's part of ``model`` from a directory of ``dist_checkpointing.save``.

    ``content`` is what :func:`read_metadata` found there.

    Optimizer state beside the weights is skipped, as are stored objects.

    Raises:
        CheckpointError: as :func:`check_weights`.
    """
    parts = parts_of(model, check_weights(directory, model, content))
    reads = [
        (min(part.order() for part, _ in found), name, chunk, found)
        for name, of_name in parts.items()
        for chunk in content[name].chunks
        if (found := [(part, spans) for part in of_name if (spans := part.overlap(chunk))])
    ]
    reads.sort(key=lambda read: read[0])
    with torch.no_grad():
        for _, name, chunk, found in reads:
            source = _read_chunk(name, chunk)
            for part, spans in found:
                part.fill(source, chunk, spans)
    for name, of_name in parts.items():
        if not all(part.is_whole() for part in of_name):
            raise CheckpointError(f"{directory}: chunks of {name} overlap")


def check_weights(
    directory: Path, model: Any, content: Mapping[str, StoredTensor]
) -> dict[str, list[ShardedTensor]]:
    """This rank's parts of the tensors in ``content``, by their names; no tensor is read.

    Raises:
        CheckpointError: a file is missing or corrupt, holds a pickle of anything but plain data,
            or a tensor is missing, unexpected or of the wrong shape.
    """
    if not parallel_state.model_parallel_is_initialized():
        compat.ensure_parallel_state()
    backend = read_json(directory / BACKEND_FILE).get("sharded_backend")
    if backend != checkpoints.BACKEND:
        raise CheckpointError(
            f"{directory / BACKEND_FILE}: sharded_backend={backend!r} is not supported; "
            f"supported: {checkpoints.BACKEND!r}"
        )
    read_common(directory)
    stored = {k: v for k, v in content.items() if not _NOT_WEIGHTS.match(k)}
    parts = _parts(model, stored)
    missing, stage = set(parts) - set(stored), Stage.of(model)
    unexpected = {name for name in set(stored) - set(parts) if not stage.leaves_out(name)}
    if missing:
        raise CheckpointError(f"{directory}: tensor {min(missing)} is missing")
    if unexpected:
        raise CheckpointError(f"{directory}: unexpected tensor {min(unexpected)}")
    for name, named_parts in parts.items():
        shape = tuple(named_parts[0].global_shape)
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{directory}: {name} has shape {list(stored[name].shape)}, expected {list(shape)}"
            )
    return parts
