"""The kernels of one token for captured transformers models, against the torch code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from megatron_async.contrib.transformers.captured import row_kernels as rows
from tests.support.interpreter import on_devices

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def drawn(*size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(device, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    limit = LIMIT[dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=limit, rtol=limit)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outer", "inner"), [(9, 40), (6, 320), (7, 2048)])
def test_rows(outer: int, inner: int, dtype: torch.dtype, device: str) -> None:
    x, weight = (drawn(*s, device=device, dtype=dtype) for s in ((inner,), (outer, inner)))
    weight /= inner**0.5
    for bias in (None, drawn(outer, device=device, dtype=dtype)):
        expected = rows.times_rows(x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
        assert_near(rows.launch_rows(x, weight, bias), expected, dtype)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(64, 40), (96, 17), (768, 48)])
def test_columns(inner: int, outer: int, dtype: torch.dtype, device: str) -> None:
    x, weight = (drawn(*s, device=device, dtype=dtype) for s in ((inner,), (inner, outer)))
    weight /= inner**0.5
    bias = drawn(outer, device=device, dtype=dtype)
    expected = rows.times_columns(x.cpu(), weight.cpu(), bias.cpu())
    assert_near(rows.launch_columns(x, weight, bias, 1)[0], expected, dtype)
    parts = rows.parts_of(inner, outer)
    expected = rows.parts_of_columns(x.cpu(), weight.cpu(), parts)
    assert_near(rows.launch_columns(x, weight, None, parts), expected, dtype)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "length", "position"),
    [(4, 4, 64, 140, 133), (6, 2, 24, 20, 0), (4, 1, 80, 300, 128)],
)
def test_attention(
    heads: int, kv_heads: int, dim: int, length: int, position: int, dtype: torch.dtype, device: str
) -> None:
    """With padding in front, a cache that lacks the token, and garbage behind it."""
    query = drawn(1, heads, 1, dim, device=device, dtype=dtype)
    whole = drawn(1, 1, 2 * kv_heads, dim, device=device, dtype=dtype).transpose(1, 2)
    key, value = whole.chunk(2, dim=1)  # views, as of one product
    keys, values = (drawn(1, kv_heads, length, dim, device=device, dtype=dtype) for _ in range(2))
    values[:, :, position:] = torch.nan
    values[:, :, position + 1 :] = 7.0
    allowed = torch.zeros(1, 1, 1, length, dtype=torch.bool, device=device)
    allowed[..., position // 4 : position + 1] = True
    at = torch.tensor([position], device=device)
    given = (query, key, value, keys, values, allowed, at)
    on_host = [tensor.cpu().clone() for tensor in given]
    expected = rows.attend_one(*on_host, dim**-0.5)
    found = rows.launch_attention(*given, dim**-0.5)
    assert_near(found, expected, dtype)
    assert torch.equal(keys.cpu(), on_host[3]) and torch.equal(values.cpu(), on_host[4])


@on_devices
def test_vectors_with_gaps(device: str) -> None:
    x, weight = (drawn(*s, device=device, dtype=torch.float32) for s in ((80,), (40, 40)))
    gaps, bias = x[::2], torch.zeros(40, device=device)
    assert_near(rows.launch_rows(gaps, weight, None), weight.cpu() @ gaps.cpu(), x.dtype)
    found = rows.launch_columns(gaps, weight, bias, 1)[0]
    assert_near(found, gaps.cpu() @ weight.cpu(), x.dtype)
