"""Embedded models cut to their first layers, for tests that ask for no more of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from megatron_async.checkpoint.path import model_directory


def write_layers(name: str, folder: Path, layers: int, scale: float = 1.0) -> None:
    """An embedded model cut to so many layers, with a tensor in the last of them scaled."""
    source = model_directory(name)
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    config["model"]["num_layers"] = layers
    if config["model"].get("moe_layer_freq"):
        config["model"]["moe_layer_freq"] = config["model"]["moe_layer_freq"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    gone = tuple(f"decoder.layers.{n}." for n in range(layers, 9))
    weights = load_file(source / "model.safetensors")
    weights = {k: value for k, value in weights.items() if not k.startswith(gone)}
    weights[f"decoder.layers.{layers - 1}.self_attention.linear_proj.weight"] *= scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
