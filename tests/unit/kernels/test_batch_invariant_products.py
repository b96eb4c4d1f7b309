"""The products of batch-invariant mode: routing, exactness, rows independent of each other.

On a GPU the kernel is compiled. Without one, ``TRITON_INTERPRET=1`` runs it on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.kernels.gemm import batch_invariant
from megatron_async.kernels.gemm.batch_invariant import batch_invariant_mode
from tests.support.interpreter import compiled, interpreted

try:
    from megatron_async.kernels.gemm import batch_invariant_triton
except ImportError:
    batch_invariant_triton = None  # type: ignore[assignment]


@torch.inference_mode()
def test_cpu_products_give_a_row_the_same_bits_in_any_multiple_of_8() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for columns, depth in ((80, 48), (97, 48), (48, 80), (264, 128)):
            x = torch.randn(264, depth, generator=generator).to(dtype)
            weight = torch.randn(columns, depth, generator=generator).to(dtype)
            expected = F.linear(x, weight)
            for rows in (8, 16, 24, 64, 136):
                assert torch.equal(F.linear(x[-rows:], weight), expected[-rows:])


def test_mode_leaves_the_cpu_alone_and_ends_with_its_scope() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    with batch_invariant_mode():
        inside = F.linear(x, weight)
        torch.bmm(x[None], weight.t()[None])
    assert torch.equal(inside, F.linear(x, weight))
    assert torch.overrides._get_current_function_mode() is None


PRODUCTS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda x, w, b: F.linear(x, w, b),
    lambda x, w, b: torch.addmm(b, x, w.t()),
    lambda x, w, b: torch.matmul(x, w.t()) + b,
    lambda x, w, b: x @ w.t() + b,
    lambda x, w, b: torch.mm(x, w.t().contiguous()) + b,
    lambda x, w, b: x.mm(w.t()) + b,
]


def test_grouped_products_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, matrices = torch.randn(24, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    ends = torch.tensor([8, 8, 19, 24], dtype=torch.int32)
    expected = F.grouped_mm(rows, matrices, offs=ends)
    monkeypatch.setattr(batch_invariant, "_on_cuda", lambda values: True)
    monkeypatch.setattr(batch_invariant, "_by_row", lambda a, b: (a.double() @ b.double()).to(a))
    with batch_invariant_mode():
        found = F.grouped_mm(rows, matrices, offs=ends)
        with pytest.raises(ConfigError, match="grouped_mm for rows in groups alone"):
            F.grouped_mm(rows[None].expand(4, -1, -1), matrices)
    torch.testing.assert_close(found, expected)


def check_products(device: str, dtypes: tuple[torch.dtype, ...], shapes: list[tuple[int, int]],
                   counts: list[int]) -> None:  # fmt: skip
    """Against float64, and each row against itself in other numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        for columns, depth in shapes:
            rows = max(counts)
            x = torch.randn(rows, depth, generator=generator).to(device, dtype)
            weight = torch.randn(columns, depth, generator=generator).to(device, dtype)
            bias = torch.randn(columns, generator=generator).to(device, dtype)
            out = batch_invariant_triton.matmul_by_row(x, weight.t(), bias)
            exact = x.double() @ weight.double().t() + bias.double()
            unit = torch.finfo(dtype).eps
            scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
            accumulation = torch.finfo(torch.float32).eps * depth**0.5 * scale
            assert ((out.double() - exact).abs() <= unit * exact.abs() + accumulation).all()
            row_major = batch_invariant_triton.matmul_by_row(x, weight.t().contiguous(), bias)
            assert torch.equal(row_major, out)
            for count in counts:
                for first in {0, rows - count, (rows - count) // 3}:
                    some = x[first : first + count]
                    product = batch_invariant_triton.matmul_by_row(some, weight.t(), bias)
                    assert torch.equal(product, out[first : first + count]), (dtype, count, first)


@interpreted
def test_interpreted_product_gives_a_row_its_own_bits() -> None:
    dtypes = (torch.float32, torch.float16)
    check_products("cpu", dtypes, [(80, 48), (33, 130), (64, 128)], [1, 3, 64, 70])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
class TestOnGpu:
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_product_gives_a_row_its_own_bits(self, dtype: torch.dtype, device: str) -> None:
        shapes = [(4096, 1024), (97, 48), (1000, 1003), (2048, 4096)]
        counts = [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256, 257]
        check_products(device, (dtype,), shapes, counts)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("hidden", (48, 128, 768, 4096, 5000))
    def test_norms_and_activations_give_a_row_its_own_bits(
        self, dtype: torch.dtype, hidden: int, device: str
    ) -> None:
        x = torch.randn(257, hidden, device=device).to(dtype)
        weight, bias = torch.randn(2, hidden, device=device).to(dtype)
        functions: list[Callable[[Tensor], Tensor]] = [
            lambda x: F.rms_norm(x, (hidden,), weight, 1e-5),
            lambda x: F.layer_norm(x, (hidden,), weight, bias, 1e-5),
            lambda x: F.silu(x) * x,
            F.gelu,
            lambda x: F.gelu(x, approximate="tanh"),
        ]
        for number, function in enumerate(functions):
            expected = function(x)
            for rows in range(1, 257, 5):
                for first in (0, 257 - rows):
                    some = x[first : first + rows].clone()
                    assert torch.equal(function(some), expected[first : first + rows]), number

    @pytest.mark.parametrize("number", range(len(PRODUCTS)))
    def test_mode_routes_products(self, number: int, device: str) -> None:
        product = PRODUCTS[number]
        x, weight, bias = (
            torch.randn(s, device=device).bfloat16() for s in ((9, 64), (40, 64), (40,))
        )
        with torch.no_grad(), batch_invariant_mode():
            out = product(x, weight, bias)
            one = product(x[4:5], weight, bias)
        assert torch.equal(out[4:5], one)
        expected = batch_invariant_triton.matmul_by_row(x, weight.t())
        if number < 2:
            expected = batch_invariant_triton.matmul_by_row(x, weight.t(), bias)
        else:
            expected = expected + bias
        assert torch.equal(out, expected)

    def test_mode_refuses_what_mixes_rows(self, device: str) -> None:
        x = torch.randn(2, 8, 8, device=device)
        refused: list[Callable[[], Tensor]] = [
            lambda: torch.bmm(x, x),
            lambda: x @ x,
            lambda: torch.einsum("bij,bjk->bik", x, x),
            lambda: F.scaled_dot_product_attention(x, x, x),
            lambda: x[0].double() @ x[0].double(),
        ]
        with batch_invariant_mode():
            for operation in refused:
                with pytest.raises(ConfigError, match="batch"):
                    operation()
