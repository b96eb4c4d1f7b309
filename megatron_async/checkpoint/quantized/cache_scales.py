"""Scales of keys and values that a checkpoint brings for an FP8 KV cache, one of each for a layer,
or for each of its heads: compressed-tensors' and ModelOpt's ``k_scale``, and the older
``k_proj.output_scale``, or ``kv_scale`` for both."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async.checkpoint.huggingface.huggingface import family_of
from megatron_async.checkpoint.quantized import is_plain
from megatron_async.checkpoint.quantized.fp8 import check_scale, read_tensors
from megatron_async.checkpoint.reading.files import stored_headers
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.targets import Stage, TensorParallel
from megatron_async.errors import CheckpointError
from megatron_async.kernels.attention.e4m3_cache import MOST_BITS
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.mamba.sizes import ATTENTION

if TYPE_CHECKING:
    from megatron_async.checkpoint.reading.files import StoredTensor

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"\blayers\.([0-9]{1,9})\.\w+\."
    r"(?:(?:(?:[kv]|qkv)_proj\.|attn\.)?(k|v|kv)_scale|([kv])_proj\.output_scale)$"
)


def _check_range(name: str, scale: Tensor) -> None:
    wide = scale.float()
    if bool(((wide < 2.0**-MOST_BITS) | (wide > 2.0**MOST_BITS)).any()):
        raise CheckpointError(
            f"{name} has scales from {float(wide.min()):g} to {float(wide.max()):g}; those of keys "
            f"and values are from 2^-{MOST_BITS} to 2^{MOST_BITS}: quantize the model again"
        )


def cache_scales_of(directory: Path, config: ModelConfig, model: torch.nn.Module) -> Tensor | None:
    """Fp32 ``[layers of this stage, 2, heads of this rank]``: the scales of keys and values that
    ``directory`` of Hugging Face's has for an FP8 KV cache; None if there are none.

    Raises:
        CheckpointError: one is no scale.
    """
    values = read_json(directory / "config.json")
    if is_plain(directory, values):
        return None
    pattern = config.hybrid_override_pattern or ATTENTION * config.num_layers
    parts = family_of(values).names.parts
    return read_cache_scales(
        stored_headers(directory),
        [place // parts for place, kind in enumerate(pattern) if kind == ATTENTION],
        config.num_kv_heads,
        Stage.of(model),
        TensorParallel.current(),
    )


def read_cache_scales(
    stored: Mapping[str, StoredTensor],
    layers: Sequence[int],
    heads: int,
    stage: Stage,
    parallel: TensorParallel,
) -> Tensor | None:
    """Fp32 ``[layers of this stage, 2, heads of this rank]`` of keys and values; None if there are
    none, or, with a warning, not one of each for each layer or head.

    Args:
        layers: numbers of those of the whole model that attend, as they are stored.
        heads: of keys and values in a layer of the whole model.

    Raises:
        CheckpointError: one is zero, negative, subnormal or not finite, or is none that keys and
            values can have.
    """
    names: dict[tuple[int, int], str] = {}
    twice = False
    for name in stored:
        found = _NAME.search(name)
        if found is not None:
            for kind in found[2] or found[3]:
                place = int(found[1]), "kv".index(kind)
                twice |= place in names
                names[place] = name
    if not names:
        return None
    wanted = {(layer, kind) for layer in layers for kind in (0, 1)}
    values = read_tensors(dict.fromkeys(names.values()), stored)
    for name, value in values.items():
        check_scale(name, value)
        _check_range(name, value)
    counts = {value.numel() for value in values.values()}
    if twice or names.keys() != wanted or not counts <= {1, heads}:
        logger.warning(
            "%s has scales of keys and values, such as %s, but not one of each for each of its %d "
            "layers, or for each of their %d heads: they are left unread, and others are chosen",
            stored[next(iter(values))].file.parent,
            next(iter(values)),
            len(layers),
            heads,
        )
        return None
    scales = torch.empty(len(layers), 2, heads, dtype=torch.float32)
    for at, layer in enumerate(layers):
        for kind in (0, 1):
            scales[at, kind] = values[names[layer, kind]].float().flatten()
    own = scales.chunk(parallel.size, -1)[parallel.rank]
    return own if stage.stages == 1 else own[stage.first : stage.first + stage.layers]
