"""Weights of Mamba-2 mixers in Hugging Face directories: which stored tensor goes where.

transformers and megatron-core have the same order of rows: z, x, B, C, dt.
"""

from __future__ import annotations

from typing import Any

from megatron_async.models.description.config import ModelConfig


def mamba_targets(targets: Any, config: ModelConfig, theirs: str, ours: str) -> None:
    """Targets of a mixer, by the prefixes of its stored names and of its parameters.

    Args:
        targets: a ``huggingface_weights.Targets``.
    """
    names = ["in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "norm.weight"]
    names.append("out_proj.weight")
    if config.mamba_conv_bias:
        names.append("conv1d.bias")
    if config.mamba_proj_bias:
        names += ["in_proj.bias", "out_proj.bias"]
    for name in names:
        targets.whole(f"{theirs}.{name}", f"{ours}.{name}")
