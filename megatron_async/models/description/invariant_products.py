"""Products of a model in batch-invariant mode that have kernels of their own for few rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_async.kernels.gemm.invariant.segments import segments_of
from megatron_async.kernels.gemm.invariant.skinny import Product, keep_weight, load


def _matrices_of(model: torch.nn.Module) -> Iterator[Tensor]:
    """The parameters ``[columns, K]`` in bfloat16 that it may multiply by. Not all of them are
    multiplied by, as an embedding is not."""
    for weight in model.parameters():
        if weight.dim() == 2 and weight.dtype is torch.bfloat16:
            yield weight


def products_of(model: torch.nn.Module) -> Iterator[Product]:
    """What decode steps may multiply by, each once."""
    from megatron_async.models.layers.decoder_layer import (
        DecoderLayer,
        multiplies_with_swiglu,
    )

    gated = {
        id(layer.mlp.linear_fc1.weight)
        for layer in model.modules()
        if isinstance(layer, DecoderLayer)
        and layer.may_join_products()
        and multiplies_with_swiglu(layer.mlp)
    }
    seen: set[Product] = set()
    for weight in _matrices_of(model):
        columns, depth = weight.shape
        segments = segments_of(weight.dtype, columns, depth)
        product = Product(columns, depth, segments, id(weight) in gated and segments == 1)
        if product not in seen:
            seen.add(product)
            yield product


def load_products(model: torch.nn.Module, rows: Iterable[int], device: torch.device) -> None:
    """Load what computes them for these numbers of rows."""
    load(products_of(model), rows, device)
    for weight in _matrices_of(model):
        keep_weight(weight)
