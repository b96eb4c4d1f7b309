"""A small GPT-OSS as it is published, with experts in MXFP4, and with plain ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.huggingface_models import random_model

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def random_packed(*shape: int, scales: tuple[int, int] = (117, 124)) -> tuple[Tensor, Tensor]:
    """Blocks and scales of weights ``[*shape]``."""
    *lead, columns = shape
    blocks = torch.randint(0, 256, (*lead, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(*scales, (*lead, columns // 32), dtype=torch.uint8)


def write_plain(path: Path) -> Path:
    """The model in float32."""
    random_model("gpt_oss").save_pretrained(path)
    return path


def write_packed(path: Path, **changes: Any) -> Path:
    """The model with random experts in MXFP4, or with ``changes`` of its configuration another."""
    write_plain(path)
    if changes:
        config = AutoConfig.from_pretrained(path)
        for name, value in changes.items():
            setattr(config, name, value)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            blocks, scales = random_packed(experts, rows, columns)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZED}))
    return path
