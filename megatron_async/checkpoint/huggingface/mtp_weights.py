"""Layers for multi-token prediction (MTP) in Hugging Face directories, under MiMo's names
(arXiv:2505.07608): which stored tensor goes where.

Such a layer norms a hidden state and the embedding of the token that it meets, projects both,
runs a layer like the decoder's, and norms its output. It reads the model's own embedding and output
layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron_async.checkpoint.targets import Target


class MtpLayer(NamedTuple):
    """Name prefixes of an MTP layer: ``theirs`` of all of it and of its inner layer alike, ``ours``
    of the whole, ``inner`` of the layer like the decoder's."""

    theirs: str
    ours: str
    inner: str


def mtp_layers(count: int) -> Iterator[MtpLayer]:
    """Yield the layers of a model with ``count`` MTP layers."""
    for n in range(count):
        ours = f"mtp.layers.{n}"
        yield MtpLayer(f"model.mtp_layers.{n}", ours, f"{ours}.transformer_layer")


def mtp_targets(targets: Any, layer: MtpLayer) -> None:
    """Targets of what an MTP layer has around its inner layer."""
    for theirs, ours in (
        ("token_layernorm", "enorm"),
        ("hidden_layernorm", "hnorm"),
        ("input_proj", "eh_proj"),
        ("final_layernorm", "final_layernorm"),
    ):
        targets.whole(f"{layer.theirs}.{theirs}.weight", f"{layer.ours}.{ours}.weight")
    name = f"{layer.theirs}.input_proj.weight"
    targets[name] = _embedding_first(targets[name])


def _embedding_first(target: Target) -> Target:
    """Stored columns read [hidden state, embedding], and megatron's [embedding, hidden state]."""

    def select(stored: torch.Tensor) -> torch.Tensor:
        hidden, embedding = target.select(stored).chunk(2, dim=-1)
        return torch.cat((embedding, hidden), dim=-1)

    return dataclasses.replace(target, select=select)
