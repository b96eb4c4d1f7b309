"""Models in FP8 as they are published, next to the plain weights that they mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

LARGEST = 448.0
"""Of e4m3."""
BLOCK = (48, 32)
"""Divides no weight of the models here in both directions."""


def one(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for all, and what it is of each element."""
    scale = weight.abs().max() / LARGEST
    return scale, scale


def each_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return scale, scale


def each_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (range(0, n, size) for n, size in zip(weight.shape, BLOCK, strict=True))
    scale = torch.empty(len(rows), len(columns))
    wide = torch.empty_like(weight)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            at = slice(row, row + BLOCK[0]), slice(column, column + BLOCK[1])
            scale[i, j] = weight[at].abs().max() / LARGEST
            wide[at] = scale[i, j]
    return scale, wide


Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    values = {
        "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy,
        "observer": "minmax", "group_size": None, **weights,
    }  # fmt: skip
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": values, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "version": "0.12",
    }  # fmt: skip


DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
NEURAL_MAGIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
    "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.33"},
}  # fmt: skip
FORMATS: dict[str, tuple[dict[str, Any], str, Quantize]] = {
    "deepseek": (DEEPSEEK, "_scale_inv", each_block),
    "neural-magic": (NEURAL_MAGIC, "_scale", one),
    "compressed-tensor": (compressed("tensor"), "_scale", one),
    "compressed-channel": (compressed("channel"), "_scale", each_row),
    "compressed-block": (
        compressed("block", block_structure=list(BLOCK)), "_scale", each_block
    ),
    "modelopt": (MODELOPT, "_scale", one),
    "modelopt-channel": (
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "_scale", each_row
    ),
}  # fmt: skip
MODELS = ("llama", "qwen3_moe", "deepseek_v2", "phi3")
"""Names of ``huggingface_models``."""


def is_quantized(name: str) -> bool:
    return name.endswith("proj.weight") or "_proj_" in name or "kv_" in name


def write(path: Path, plain: Path, kind: str) -> Path:
    """A model in FP8, and next to it, in ``meant``, the plain weights that it stands for."""
    config, suffix, quantize = FORMATS[kind]
    shutil.copytree(plain, path)
    shutil.copytree(plain, path / "meant")
    tensors = load_file(plain / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if is_quantized(name) and tensors[name].dim() == 2]:
        scale, wide = quantize(tensors[name])
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        meant[name] = tensors[name].float() * wide
        tensors[f"{name}{suffix}"] = scale.clone()
        if config.get("activation_scheme") == "static" or config is MODELOPT:
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    if config.get("kv_cache_quant_algo"):
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    save_file(tensors, path / "model.safetensors")
    save_file(meant, path / "meant" / "model.safetensors")
    set_config(path, config)
    return path


def set_config(path: Path, config: dict[str, Any]) -> None:
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": config}))


def kept_bytes(model: Module) -> dict[str, Tensor]:
    """All that a model keeps, scales too, as bytes."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: each.detach().contiguous().view(torch.uint8) for name, each in both}


def cache_scales(path: Path | str) -> Tensor:
    """Those that the FP8 cache of an engine over a model starts with, or over this stage of it."""
    from megatron_async.checkpoint import load_pretrained
    from megatron_async.models.gpt_network import GPTNetwork
    from megatron_async.runner.memory.cache_scales import choose_scales
    from megatron_async.runner.memory.whole_prompts import batch_of_prompts

    model = load_pretrained(path).model
    network = GPTNetwork(model, kv_cache_dtype=torch.float8_e4m3fn, batch_invariant=True)
    batch = batch_of_prompts(network, network.kv_cache_spec.decoder, [1], batch_invariant=True)
    choose_scales(network, batch)
    assert batch.scales is not None
    return batch.scales
