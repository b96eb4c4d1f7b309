"""Multi-latent attention over the paged cache: references and Triton kernels against float64.

On a GPU the kernels are compiled. Without one, ``TRITON_INTERPRET=1`` runs them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.attention import paged_decode, paged_prefill
from tests.support.interpreter import HAS_TRITON, on_devices
from tests.support.paged_cases import make_case as make_decode
from tests.unit.kernels.test_paged_prefill import UNTOUCHED
from tests.unit.kernels.test_paged_prefill import make_case as make_prefill

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
LATENT, ROTATED = 24, 8
"""Neither is the size of a kernel's tile."""
DEEPSEEK = 512, 64


def expected(query: Tensor, keys: Tensor, scale: float, latent: int) -> Tensor:
    """float64 attention of one token's query ``[H, D]`` over keys ``[T, 1, D]``."""
    keys = keys[:, 0].double()
    weights = (query.double() @ keys.T * scale).softmax(-1)
    return weights @ keys[:, :latent]


def check_decode(
    attend: Callable[..., Tensor],
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = 6,
    sizes: tuple[int, int] = (LATENT, ROTATED),
    block_size: int = 16,
    lengths: tuple[int, ...] = (1, 45, 257, 300),
) -> None:
    latent = sizes[0]
    case = make_decode(
        list(lengths), heads=heads, kv_heads=1, head_dim=sum(sizes), block_size=block_size,
        dtype=dtype, device=device,
    )  # fmt: skip
    wanted = [
        expected(
            case.query[row], case.keys[case.table[row]].flatten(0, 1)[:length], case.scale, latent
        )
        for row, length in enumerate(lengths)
    ]
    arguments = case.query, case.keys, case.keys, case.table, case.lengths, case.scale
    out = attend(*arguments, latent=latent)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), torch.stack(wanted), rtol=tolerance, atol=tolerance)
    some = torch.tensor([len(lengths) - 1, 0], device=device)
    alone = attend(
        case.query[some], case.keys, case.keys, case.table[some], case.lengths[some], case.scale,
        latent=latent,
    )  # fmt: skip
    assert torch.equal(alone, out[some])


def check_prefill(
    attend: Callable[..., None],
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = 6,
    sizes: tuple[int, int] = (LATENT, ROTATED),
    pieces: tuple[tuple[int, int], ...] = ((0, 1), (70, 33), (5, 64), (39, 2)),
) -> None:
    latent = sizes[0]
    case = make_prefill(
        list(pieces), group=heads, kv_heads=1, head_dim=sum(sizes), block_size=16, dtype=dtype,
        device=device,
    )  # fmt: skip
    shape = (*case.query.shape[:2], latent)
    wanted = torch.full(shape, UNTOUCHED, dtype=torch.float64, device=device)
    for slot, first, length, start in case.chunks.tolist():
        keys = case.keys[case.table[slot]].flatten(0, 1)
        for token in range(length):
            seen = keys[: start + token + 1]
            wanted[first + token] = expected(case.query[first + token], seen, case.scale, latent)
    out = torch.full(shape, UNTOUCHED, dtype=dtype, device=device)
    attend(
        case.query, case.keys, case.keys, case.table, case.chunks, case.scale, out, latent=latent
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


def test_references_equal_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = paged_decode.paged_decode_attention_reference
    check_decode(reference, torch.float32, "cpu")
    check_prefill(paged_prefill.paged_mixed_attention_reference, torch.float32, "cpu")
    # One row at a time: what is gathered stays small.
    monkeypatch.setattr(paged_decode, "GATHERED_BYTES", 1)
    check_decode(reference, torch.float32, "cpu")


def test_attention_by_length_equals_float64() -> None:
    def attend(*arguments: Any, latent: int) -> Tensor:
        *some, lengths, scale = arguments
        return paged_decode.paged_decode_attention_by_length(
            *some, lengths.tolist(), scale, latent=latent
        )

    check_decode(attend, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need triton")
@on_devices
def test_kernels_equal_float64(device: str) -> None:
    from megatron_async.kernels.attention import paged_decode_triton, paged_prefill_triton

    decode = paged_decode_triton.paged_decode_attention_triton
    prefill = paged_prefill_triton.paged_mixed_attention_triton
    if device == "cpu":
        check_decode(decode, torch.float32, device, lengths=(45, 300))
        check_decode(decode, torch.float32, device, heads=20, block_size=64, lengths=(1, 70))
        check_prefill(prefill, torch.float32, device, pieces=((0, 1), (60, 13), (39, 2)))
        return
    for dtype in (torch.float32, torch.bfloat16):
        for heads in (16, 128):
            check_decode(decode, dtype, device, heads=heads, sizes=DEEPSEEK, block_size=64)
            check_prefill(prefill, dtype, device, heads=heads, sizes=DEEPSEEK)
        check_decode(decode, dtype, device)
        check_prefill(prefill, dtype, device)
    many = tuple(range(1, 4000, 97))
    check_decode(decode, torch.bfloat16, device, heads=16, sizes=DEEPSEEK, lengths=many)


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need triton")
@on_devices
def test_rows_whose_sums_take_too_much_memory_come_by_parts(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.kernels.attention import paged_decode_triton

    monkeypatch.setattr(paged_decode_triton, "LATENT_WORKSPACE_ELEMENTS", 6 * LATENT)
    attend = paged_decode_triton.paged_decode_attention_triton
    check_decode(attend, torch.float32, device, lengths=(3, 40))


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need triton")
@on_devices
@pytest.mark.parametrize(("tokens", "heads", "rank", "rotated"), [(5, 3, 24, 6), (2, 20, 512, 64)])
def test_append_kernel_equals_its_reference(
    device: str, tokens: int, heads: int, rank: int, rotated: int
) -> None:
    from megatron_async.kernels.attention.latent_append import (
        latent_append,
        latent_append_reference,
    )

    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        query = random(tokens, heads, rotated + 10).to(dtype)[..., 10:]
        packed = random(tokens, rank + rotated).to(dtype)
        table, weight = random(9, 2, rotated // 2), random(rank).to(dtype)
        positions = torch.randint(0, 9, (tokens,), generator=generator).to(device)
        slots = (torch.randperm(12, generator=generator)[:tokens] + 4).to(device)
        found = []
        for append in (latent_append, latent_append_reference):
            out = torch.zeros(tokens, heads, rank + rotated, dtype=dtype, device=device)
            cache = torch.zeros(4, 4, 1, rank + rotated, dtype=dtype, device=device)
            append(query, packed, out[..., rank:], cache, slots, positions, table, weight, 1e-6)
            assert not out[..., :rank].any()
            found.append((out, cache))
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
