"""How a directory says that its weights are quantized: ``quantization_config`` in ``config.json``,
or ModelOpt's ``hf_quant_config.json`` beside it.

What is served are the weights times their scales. Which tensors are quantized their dtypes say, so
lists of modules do not matter; nor does how KV caches were to be quantized. How activations were
matters where they are to be quantized (``input_scales.py``): else they stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from megatron_async.checkpoint.quantized import FIELD, MODELOPT_FILE, quantization_of
from megatron_async.checkpoint.quantized.fp8 import BLOCK, fp8_targets, or_scales_of
from megatron_async.checkpoint.reading.field_uses import FieldUses
from megatron_async.checkpoint.reading.files import SafetensorsWeights, StoredTensor
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.errors import CheckpointError, shown

_LARGEST_BLOCK = 1 << 16
FP8_FIELDS = FieldUses.of(
    "quant_method weight_block_size",
    "activation_scheme modules_to_not_convert modules_to_convert ignored_layers dequantize "
    "kv_cache_scheme scale_fmt",
    fmt=("e4m3",),
    expert_dtype=("fp8",),
)
_FBGEMM = FieldUses.of(
    "quant_method",
    "activation_scale_ub modules_to_not_convert modules_to_convert dequantize",
)
_COMPRESSED = FieldUses.of(
    "quant_method config_groups sparsity_config",
    "ignore kv_cache_scheme version global_compression_ratio quantization_status run_compressed "
    "dequantize",
    format=("float-quantized", "naive-quantized", "mixed-precision", "dense"),
    transform_config=({},),
)
_GROUP = FieldUses.of(
    "weights",
    "targets input_activations output_activations",
    format=("float-quantized", "naive-quantized"),
)
_WEIGHTS = FieldUses.of(
    "strategy block_structure",
    "observer observer_kwargs scale_dtype zp_dtype group_size actorder",
    num_bits=(8,),
    type=("float",),
    symmetric=(True,),
    dynamic=(False,),
)
_MODELOPT = FieldUses.of(
    "quant_method quant_algo config_groups",
    "kv_cache_quant_algo kv_cache_scheme exclude_modules ignore producer quantized_layers",
    group_size=(BLOCK[1],),
)
_OF_CACHES = ("kv_cache_quant_algo", "kv_cache_scheme")
_STRATEGIES = ("tensor", "channel", "block")
_ALGORITHMS = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": BLOCK}


class Fp8Scheme(NamedTuple):
    """Weights of e4m3.

    Attributes:
        block: rows and columns that share a scale; None where a whole tensor or a row does.
        static_activations: a scale of its inputs is stored for each layer; None for some layers.
    """

    block: tuple[int, int] | None
    static_activations: bool | None = False


def read_scheme(directory: Path, values: Mapping[str, Any]) -> Fp8Scheme | None:
    """How weights of ``directory``, whose ``config.json`` has ``values``, are stored; None for
    those that are plain, or packed as their type has its own way.

    Raises:
        CheckpointError: see :func:`scheme_of`; ModelOpt's file is no regular one, or no JSON.
    """
    found, path = quantization_of(values), directory / MODELOPT_FILE
    if found is not None or not is_regular_file(path):
        return scheme_of(found) if knows(found) else None
    inner = read_json(path).get("quantization")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path}: quantization must be an object with quant_algo")
    if inner.get("quant_algo") is None:
        return None  # the KV cache alone
    try:
        return _modelopt(inner)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def with_scales(
    weights: SafetensorsWeights, values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> SafetensorsWeights:
    """``weights``, times their scales where they have some.

    Args:
        values: the content of the directory's ``config.json``.
        stored: all of its tensors.

    Raises:
        CheckpointError: see :func:`scheme_of` and :func:`~.fp8.fp8_targets`.
    """
    scheme = read_scheme(weights.directory, values)
    targets = weights.targets
    if scheme is not None:
        targets = fp8_targets(targets, stored, scheme.block)
    return replace(weights, targets=targets, ignore=or_scales_of(weights.ignore))


def knows(found: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a ``quantization_config`` is of a method that :func:`scheme_of` reads."""
    method = found.get("quant_method") if isinstance(found, dict) else None
    return isinstance(method, str) and method in METHODS


def scheme_of(found: Mapping[str, Any]) -> Fp8Scheme | None:
    """What a ``quantization_config`` that :func:`knows` says; None if it quantizes the KV cache
    alone.

    Raises:
        CheckpointError: it asks for another format of weights than FP8 (e4m3) with scales by
            tensor, row or block, or for what is not known; the message names it.
    """
    return METHODS[found["quant_method"]](found)


def _fp8(found: Mapping[str, Any]) -> Fp8Scheme:
    """DeepSeek's and Qwen's, and Neural Magic's old one, without blocks."""
    FP8_FIELDS.check(found, of=FIELD)
    block = _block_of("weight_block_size", found.get("weight_block_size"))
    return Fp8Scheme(block, found.get("activation_scheme") == "static")


def _fbgemm(found: Mapping[str, Any]) -> Fp8Scheme:
    """Meta's: a scale for each row. Its bound of the scales of activations is for its kernels."""
    _FBGEMM.check(found, of=FIELD)
    return Fp8Scheme(None, False)


def _compressed_tensors(found: Mapping[str, Any]) -> Fp8Scheme | None:
    _COMPRESSED.check(found, of=FIELD)
    sparsity = found.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        raise _unsupported("sparsity_config", sparsity, "null, or format 'dense'")
    groups = found.get("config_groups")
    if not groups and isinstance(found.get("kv_cache_scheme"), dict):
        return None
    return _of_groups(groups)


def _modelopt(found: Mapping[str, Any]) -> Fp8Scheme | None:
    inner = found.get("quantization")  # as in its own file
    if isinstance(inner, dict):
        found = inner
    _MODELOPT.check(found, of=FIELD)
    algorithm = found.get("quant_algo")
    if algorithm is None and any(found.get(name) is not None for name in _OF_CACHES):
        return None
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise _unsupported("quant_algo", algorithm, ", ".join(_ALGORITHMS))
    return Fp8Scheme(_ALGORITHMS[algorithm], algorithm == "FP8")


def _of_groups(groups: Any) -> Fp8Scheme | None:
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("config_groups", groups, "an object of groups")
    blocks: set[tuple[int, int] | None] = set()
    static: set[bool] = set()
    for name, group in groups.items():
        if _is_of_activations(group):
            continue
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unsupported(f"config_groups.{name}", group, "an object with weights")
        _GROUP.check(group, of=f"{FIELD}.config_groups.{name}")
        _WEIGHTS.check(weights, of=f"{FIELD}.config_groups.{name}.weights")
        strategy = weights.get("strategy")
        if strategy not in _STRATEGIES:
            raise _unsupported("strategy", strategy, ", ".join(_STRATEGIES))
        block = weights.get("block_structure") if strategy == "block" else None
        blocks.add(_block_of("block_structure", block))
        inputs = group.get("input_activations")
        static.add(isinstance(inputs, dict) and inputs.get("dynamic") is False)
    if len(blocks) > 1:
        raise _unsupported("config_groups", groups, "groups of one block_structure")
    if not blocks:
        return None
    return Fp8Scheme(blocks.pop(), static.pop() if len(static) == 1 else None)


def _is_of_activations(group: Any) -> bool:
    """Whether a group, such as one of attention, quantizes nothing that is stored."""
    if not isinstance(group, dict) or group.get("weights") is not None:
        return False
    return isinstance(group.get("input_activations"), dict)


def _block_of(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) else _sizes_of(value)
    if len(sizes) != 2 or not all(type(n) is int and 1 <= n <= _LARGEST_BLOCK for n in sizes):
        raise _unsupported(name, value, f"two sizes of 1 to {_LARGEST_BLOCK}")
    return sizes[0], sizes[1]


def _sizes_of(value: Any) -> list[int]:
    """Sizes like "128x128", as compressed-tensors wrote them before; none of anything else."""
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", value) if isinstance(value, str) else None
    return [] if found is None else [int(size) for size in found.groups()]


def _unsupported(name: str, value: Any, supported: str) -> CheckpointError:
    return CheckpointError(
        f"{FIELD}: {name}={shown(value)} is not supported; supported: {supported}"
    )


METHODS: dict[str, Callable[[Mapping[str, Any]], Fp8Scheme | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
