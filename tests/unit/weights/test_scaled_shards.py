"""Shards of e4m3 with their scales, as a trainer's ranks have them: ``relay`` joins and divides
both."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_async.checkpoint import load_pretrained
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.values import E4M3
from megatron_async.weights.parallel_layouts import relay, shard_of
from megatron_async.weights.place import read_weights
from tests.support.fp8_models import kept_bytes

State = dict[str, Tensor]


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of blocks of 128 x 128, and what they are of each element."""
    rows, columns = weight.shape
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return scale, wide


def for_all(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rand(1) + 0.5
    return scale, scale.expand_as(weight)


def of_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (torch.rand(*weight.shape[:-1], 1) + 0.5).bfloat16()
    return scale, scale.float().expand_as(weight)


LAYER = "decoder.layers.0"
SHARDS = {
    f"{LAYER}.self_attention.linear_qkv.weight": (96, 160),
    f"{LAYER}.self_attention.linear_proj.weight": (160, 72),
    f"{LAYER}.mlp.linear_fc1.weight": (2 * 140, 160),
    f"{LAYER}.mlp.linear_fc2.weight": (160, 140),
    f"{LAYER}.mlp.experts.linear_fc1.weight3": (2 * 40, 160),
    f"{LAYER}.mlp.experts.local_experts.5.linear_fc2.weight": (160, 200),
}
"""The shapes that a rank of two has."""


def times(numbers: Tensor, scale: Tensor) -> Tensor:
    groups = numbers.shape[-1] // scale.shape[-1]
    return numbers.float() * scale.repeat_interleave(groups, -1)


@pytest.mark.parametrize("scales", (in_blocks, for_all, of_rows))
def test_shards_are_joined_with_their_scales(
    scales: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    """The products of what is joined are those that are joined, and so it is where they are
    divided again."""
    shards: list[State] = []
    products: list[State] = []
    for rank in range(2):
        shards.append({})
        products.append({})
        torch.manual_seed(rank)
        for name, shape in SHARDS.items():
            numbers = torch.randn(shape).to(E4M3)
            scale, wide = scales(numbers)
            shards[rank] |= {name: numbers, f"{name}_scale_inv": scale}
            products[rank][name] = numbers.float() * wide
    for size in (1, 2, 4):
        for rank in range(size):
            found = relay(shards, gated=True, rank=rank, size=size)
            meant = relay(products, gated=True, rank=rank, size=size)
            for name in SHARDS:
                assert times(found[name], found[f"{name}_scale_inv"]).equal(meant[name]), name
    del shards[0][f"{LAYER}.mlp.linear_fc1.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=r"fc1.weight_scale_inv is not on each tensor-paral"):
        relay(shards, gated=True)


def test_stacked_experts_are_joined_with_their_scales() -> None:
    """By their rows, and each as a whole, with a scale for each expert or for its rows."""
    name = f"{LAYER}.mlp.experts.linear_fc1.weight"
    for by_expert, shape in product((False, True), ((3,), (3, 64, 1))):
        ranks = []
        for rank in range(2):
            torch.manual_seed(rank)
            ranks.append((torch.randn(3, 64, 32).to(E4M3), torch.rand(shape) + 0.5))
        shards = [{name: numbers, f"{name}_scale": scale} for numbers, scale in ranks]
        plain = [{name: x.float() * s.view(3, -1, 1)} for x, s in ranks]
        joined = relay(shards, gated=True, by_expert=(by_expert, True))
        meant = relay(plain, gated=True, by_expert=(by_expert, True))
        assert times(joined[name], joined[f"{name}_scale"]).equal(meant[name])
    shards[1][f"{name}_scale"] = torch.ones(3, 63, 1)
    with pytest.raises(CheckpointError, match=rf"{name}_scale has shape \[3, 63, 1\]; scales of"):
        relay(shards, gated=True)


def test_a_model_takes_what_ranks_of_a_trainer_have_quantized() -> None:
    """Joined, as products that are joined, where a layer has 16 bits."""
    model = load_pretrained("tiny", dtype=torch.bfloat16).model
    new = {name: p.detach().roll(1, 0) for name, p in model.named_parameters()}
    shards: list[State] = [{}, {}]
    products: list[State] = [{}, {}]
    for rank, (name, x) in product(range(2), new.items()):
        shard = products[rank][name] = shards[rank][name] = shard_of(name, x, rank, 2, gated=True)
        if ".linear_" in name and x.dim() == 2:
            scale, wide = in_blocks(shard)
            numbers = (shard / wide / 100).to(E4M3)
            shards[rank] |= {name: numbers, f"{name}_scale_inv": scale}
            products[rank][name] = numbers.float() * wide
    found = []
    for each in (shards, products):
        read_weights(model, relay(each, gated=True), all_parameters=True)()
        found.append({name: x.clone() for name, x in kept_bytes(model).items()})
    assert all(x.equal(found[1][name]) for name, x in found[0].items())
