"""Products of a model in batch-invariant mode whose kernels are compiled for few rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_async.kernels.gemm.invariant.skinny import Product


def products_of(model: torch.nn.Module) -> Iterator[Product]:
    """What decode steps may multiply by, each once: matrices in bfloat16. Not all of them are
    multiplied by, as an embedding is not."""
    from megatron_async.kernels.gemm.invariant.products_triton import segments_of
    from megatron_async.models.spec import multiplies_with_swiglu

    mlps: list[Any] = [each for each in model.modules() if multiplies_with_swiglu(each)]
    gated = {id(mlp.linear_fc1.weight) for mlp in mlps}
    seen: set[Product] = set()
    for weight in model.parameters():
        if weight.dim() != 2 or weight.dtype is not torch.bfloat16:
            continue
        columns, depth = weight.shape
        segments = segments_of(weight.dtype, columns, depth)
        product = Product(columns, depth, segments, id(weight) in gated and segments == 1)
        if product not in seen:
            seen.add(product)
            yield product
