"""Kernels over a cache of e4m3: they read the same numbers, and keep what the reference keeps.

On a GPU the kernels are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention.e4m3_cache import E4M3, encode
from tests.support.interpreter import HAS_TRITON, on_devices
from tests.support.paged_cases import make_case as make_decode

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.kernels.attention.latent_append import latent_append
from megatron_async.kernels.attention.paged_decode_triton import paged_decode_attention_triton
from megatron_async.kernels.attention.paged_prefill_triton import paged_mixed_attention_triton
from megatron_async.kernels.attention.rope_append import rope_append, rope_append_reference
from tests.unit.kernels.test_paged_prefill import make_case as make_prefill

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
DTYPES = (torch.float32, torch.bfloat16)


def kept(cache: Tensor, scale: Tensor | None = None) -> Tensor:
    heads = cache.shape[-2]
    scale = torch.ones(heads, device=cache.device) if scale is None else scale
    return encode(cache, scale)


@on_devices
@pytest.mark.parametrize(
    ("dtype", "latent"), ((torch.float32, 24), (torch.bfloat16, None), (torch.bfloat16, 24))
)
def test_decode_reads_the_same_numbers(device: str, dtype: torch.dtype, latent: int | None) -> None:
    """Bit for bit those of a cache that holds them in the query's dtype."""
    heads, kv_heads, size = (4, 2, 64) if latent is None else (6, 1, 32)
    case = make_decode(
        [1, 45], heads=heads, kv_heads=kv_heads, head_dim=size, block_size=16, dtype=dtype,
        device=device,
    )  # fmt: skip
    keys, values = kept(case.keys), kept(case.values)
    further: dict[str, Any] = {} if latent is None else {"latent": latent}

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        values = values if latent is None else keys
        return paged_decode_attention_triton(
            case.query, keys, values, case.table, case.lengths, case.scale, **further
        )

    found = attend(keys, values)
    assert found.equal(attend(keys.to(dtype), values.to(dtype)))
    assert found.isfinite().all() and not found.equal(attend(case.keys, case.values))


@on_devices
@pytest.mark.parametrize(
    ("dtype", "latent"), ((torch.float32, 24), (torch.bfloat16, None), (torch.bfloat16, 24))
)
def test_prefill_reads_the_same_numbers(
    device: str, dtype: torch.dtype, latent: int | None
) -> None:
    group, kv_heads, size = (2, 2, 64) if latent is None else (6, 1, 32)
    case = make_prefill(
        [(0, 1), (17, 9)], group=group, kv_heads=kv_heads, head_dim=size, block_size=16,
        dtype=dtype, device=device,
    )  # fmt: skip
    keys, values = kept(case.keys), kept(case.values)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        out = torch.zeros(*case.query.shape[:2], latent or size, dtype=dtype, device=device)
        values = values if latent is None else keys
        further: dict[str, Any] = {} if latent is None else {"latent": latent}
        paged_mixed_attention_triton(
            case.query, keys, values, case.table, case.chunks, case.scale, out, **further
        )
        return out

    found = attend(keys, values)
    assert found.equal(attend(keys.to(dtype), values.to(dtype)))
    assert found.isfinite().all() and not found.equal(attend(case.keys, case.values))


def check_kept(found: Tensor, meant: Tensor) -> None:
    assert found.view(torch.uint8).equal(meant.view(torch.uint8))
    assert found.dtype == E4M3 and len(found.float().unique()) > 50


@on_devices
def test_each_number_is_kept_as_the_nearest(device: str) -> None:
    """Ties, subnormal numbers, those that are too large, infinities and NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = numbers[numbers.isfinite()].sort()[0]
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [between, between.nextafter(numbers[1:]), between.nextafter(numbers[:-1])]
    others = [1e-30, 460.0, 464.0, 500.0, 1e38, float("inf"), float("nan"), -0.0]
    values = torch.cat((numbers, *near, torch.tensor([*others, *(-x for x in others)])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).to(device)
    cache = torch.zeros(2, len(values) // 16, 1, 1, 16, dtype=torch.uint8, device=device)
    cache = cache.view(E4M3)
    packed = torch.cat((torch.zeros_like(values).view(-1, 16), values.view(-1, 16)), 1)
    packed = torch.cat((packed, values.view(-1, 16)), 1)  # query, key, value
    slots = torch.arange(len(packed), device=device)
    scales = torch.tensor([[1.0], [0.5]], device=device)
    rope_append(packed, cache[0], cache[1], slots, slots, scales=scales)
    for found, scale in zip(cache, scales, strict=True):
        check_kept(found, kept(values.view(-1, 1, 1, 16), scale))


@on_devices
@pytest.mark.parametrize(("dtype", "pairs"), ((torch.float32, 16), (torch.bfloat16, 8)))
def test_what_is_appended_is_what_the_reference_keeps(
    device: str, dtype: torch.dtype, pairs: int
) -> None:
    """With norms and rotation, in whole heads and in a part of them; each head, and keys and
    values, have scales of their own."""
    torch.manual_seed(0)
    tokens, kv_heads, group, size, blocks, bs = 9, 2, 3, 32, 5, 4
    packed = (torch.randn(tokens, kv_heads * (group + 2) * size) * 20).to(device, dtype)
    slots = (torch.randperm((blocks - 1) * bs)[:tokens] + bs).to(device)
    positions = torch.arange(tokens, device=device)
    angles = torch.rand(tokens, pairs, device=device)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    weight = torch.rand(size).to(device, dtype)
    scales = torch.tensor([[0.25, 2.0], [0.5, 4.0]], device=device)
    shape = (2, blocks, bs, kv_heads, size)
    arguments = slots, positions, cos_sin, weight, weight, 1e-6
    found = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
    plain = torch.zeros(shape, dtype=dtype, device=device)
    query = rope_append(packed, found[0], found[1], *arguments, scales)
    assert query.equal(rope_append(packed, plain[0], plain[1], *arguments))
    for cache, wide, scale in zip(found, plain, scales, strict=True):
        check_kept(cache, kept(wide, scale))
    reference = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
    rope_append_reference(packed, reference[0], reference[1], *arguments, scales)
    wide = reference.float() - found.float()
    assert wide.abs().max() <= reference.float().abs().max() / 8


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_appended_as_the_reference_keeps_them(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tokens, heads, rank, pairs, blocks, bs = 7, 3, 24, 4, 5, 4
    query = torch.randn(tokens, heads, 2 * pairs).to(device, dtype)
    latent = (torch.randn(tokens, rank + 2 * pairs) * 30).to(device, dtype)
    slots = (torch.randperm((blocks - 1) * bs)[:tokens] + bs).to(device)
    positions = torch.arange(tokens, device=device)
    angles = torch.rand(tokens, pairs, device=device)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    weight = (torch.rand(rank) * 9).to(device, dtype)
    scales = torch.tensor([[0.5]], device=device)
    shape = (blocks, bs, 1, rank + 2 * pairs)
    found = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
    plain = torch.zeros(shape, dtype=dtype, device=device)
    out = torch.empty_like(query)
    arguments = slots, positions, cos_sin, weight, 1e-6
    latent_append(query, latent, out, found, *arguments, scales)
    latent_append(query, latent, out, plain, *arguments)
    check_kept(found, kept(plain, scales[0]))
