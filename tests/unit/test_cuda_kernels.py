"""The CUDA C++ kernels of the decode path against float64, and what surrounds them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels.cuda import attention as decode_attention
from megatron_async.kernels.cuda import compile as cuda
from megatron_async.kernels.cuda.linear import (
    ADD,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    Linear,
    Tiling,
    candidates,
    choose,
    padded,
    statistics_of,
)

LIMIT = 1e-2

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and cuda.unavailable(0) is not None,
        reason="the CUDA kernels need compute capability 9.0 and cuda.bindings",
    ),
]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


# --- tilings: anywhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(
    ("n", "k", "norm", "epilogue"),
    [
        (6144, 4096, RMS_NORM, STORE),
        (4096, 14336, NO_NORM, ADD),
        (28672, 4096, RMS_NORM, SILU_GATE),
        (50257, 768, LAYER_NORM, STORE),
        (768, 3072, NO_NORM, ADD),
        (5120, 8192, NO_NORM, ADD),
        (384, 128, RMS_NORM, STORE),
        (256, 256, NO_NORM, ADD),
    ],
)
def test_every_shape_has_a_tiling_that_fits(
    n: int, k: int, norm: int, epilogue: int, rows: int
) -> None:
    most = padded(rows)
    assert most >= rows
    tiling = choose(n, k, most, norm, epilogue)
    assert tiling is not None
    assert tiling.fits(n, k, most, norm, epilogue)


def test_a_weight_too_narrow_for_the_kernel_has_no_tiling() -> None:
    assert list(candidates(256, 32, 1, NO_NORM, STORE)) == []


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((72, 4, 64, 72), "head dimension"),
        ((128, 32, 64, 128), "share a KV head"),
        ((128, 4, 24, 128), "block size"),
        ((128, 4, 64, 64), "rotated"),
    ],
)
def test_attention_says_what_it_does_not_take(shape: tuple[int, ...], word: str) -> None:
    reason = decode_attention.unsupported(*shape)
    assert reason is not None and word in reason


# --- products ------------------------------------------------------------------------------------

_PRODUCTS = [
    (512, 256, RMS_NORM, STORE, True),
    (256, 512, NO_NORM, ADD, False),
    (256, 512, NO_NORM, ADD, True),
    (1024, 256, RMS_NORM, SILU_GATE, False),
    (768, 192, LAYER_NORM, GELU_TANH, True),
    (768, 192, LAYER_NORM, GELU, True),
    (1003, 256, RMS_NORM, STORE, False),
    (1003, 192, LAYER_NORM, STORE, False),
    (2304, 768, LAYER_NORM, STORE, True),
]


class Product:
    def __init__(
        self, n: int, k: int, norm: int, epilogue: int, bias: bool, rows: int, seed: int = 0
    ) -> None:
        self.n, self.k, self.norm, self.epilogue, self.rows = n, k, norm, epilogue, rows
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            x = torch.randn(*shape, generator=generator, device="cuda") * scale
            return x.bfloat16()

        self.x = draw(rows, k) + 0.25
        self.weight = draw(n, k, scale=0.05)
        self.bias = draw(n) if bias else None
        self.norm_weight = draw(k) + 1
        self.norm_bias = draw(k) if norm == LAYER_NORM else None
        self.residual = draw(rows, n)

    def wanted(self) -> torch.Tensor:
        x = self.x.double()
        if self.norm == RMS_NORM:
            x = F.rms_norm(x, (self.k,), self.norm_weight.double(), 1e-5)
        elif self.norm == LAYER_NORM:
            assert self.norm_bias is not None
            x = F.layer_norm(x, (self.k,), self.norm_weight.double(), self.norm_bias.double(), 1e-5)
        y = x @ self.weight.double().T
        if self.bias is not None:
            y = y + self.bias.double()
        if self.epilogue == ADD:
            return y + self.residual.double()
        if self.epilogue == SILU_GATE:
            gate, up = y.chunk(2, 1)
            return F.silu(gate) * up
        if self.epilogue in (GELU, GELU_TANH):
            return F.gelu(y, approximate="tanh" if self.epilogue == GELU_TANH else "none")
        return y

    def run(self, tiling: Tiling, statistics_norm: int = RMS_NORM) -> tuple[torch.Tensor, float]:
        """The result, and the error of the statistics that came with it."""
        linear = Linear(
            self.n, self.k, padded(self.rows), self.norm, self.epilogue, statistics_norm,
            tiling, 0,
        )  # fmt: skip
        width = self.n // 2 if self.epilogue == SILU_GATE else self.n
        # A row more than the kernel may write: it must stay as it is.
        guarded = torch.full((self.rows + 1, width), float("nan"), device="cuda").bfloat16()
        out = guarded[: self.rows]
        statistics = statistics_of(self.x, self.norm, 32 if self.k % 64 else 64)
        emitted, error = None, 0.0
        if self.epilogue == ADD:
            emitted = torch.full(
                (self.rows, self.n // linear.statistic_rows, 2), float("nan"), device="cuda"
            )
            out.copy_(self.residual)
        linear(
            self.x, self.weight, out, bias=self.bias,
            norm=(self.norm_weight, self.norm_bias, 1e-5) if self.norm else None,
            statistics=statistics if self.norm else None,
            residual=out if self.epilogue == ADD else None, statistics_out=emitted,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert guarded[-1].isnan().all()
        if emitted is not None:
            wanted = statistics_of(out, statistics_norm, linear.statistic_rows)
            error = relative_error(emitted, wanted.double())
        return out, error


def _sample(product: Product, count: int) -> list[Tiling]:
    most = padded(product.rows)
    shape = (product.n, product.k, most, product.norm, product.epilogue)
    every = [
        Tiling(row_tiles, warps_n, warps_k, cluster, stages, stream, persistent)
        for row_tiles in (1, 2, 3)
        for warps_n in (1, 2, 4)
        for warps_k in (1, 2, 4)
        for cluster in (1, 2, 4)
        for stages in (2, 4, 5)
        for stream in (False, True)
        for persistent in (False, True)
    ]
    fitting = [tiling for tiling in every if tiling.fits(*shape)]
    return fitting[:: max(1, len(fitting) // count)][:count]


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16, 32])
@pytest.mark.parametrize(("n", "k", "norm", "epilogue", "bias"), _PRODUCTS)
class TestProducts:
    pytestmark = on_gpu

    def test_equals_float64(
        self, n: int, k: int, norm: int, epilogue: int, bias: bool, rows: int
    ) -> None:
        product = Product(n, k, norm, epilogue, bias, rows)
        wanted = product.wanted()
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        cuda_tilings = _sample(product, 5)
        assert cuda_tilings
        for tiling in cuda_tilings:
            out, error = product.run(tiling, statistics_norm)
            assert relative_error(out, wanted) < LIMIT, tiling
            assert error < 1e-3, tiling

    def test_a_row_and_a_repetition_have_the_same_bits(
        self, n: int, k: int, norm: int, epilogue: int, bias: bool, rows: int
    ) -> None:
        product = Product(n, k, norm, epilogue, bias, rows)
        tiling = _sample(product, 3)[-1]
        first, _ = product.run(tiling)
        again, _ = product.run(tiling)
        assert torch.equal(first, again)


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "norm", "rope"),
    [
        (128, 4, 64, False, True),
        (128, 2, 64, True, True),
        (64, 1, 16, False, False),
        (96, 3, 32, True, True),
        (256, 8, 16, False, True),
        (128, 16, 128, True, True),
        (64, 12, 64, False, True),
    ],
)
class TestAttention:
    pytestmark = on_gpu

    def test_equals_float64(
        self, head_dim: int, group: int, block_size: int, norm: bool, rope: bool, splits: int
    ) -> None:
        kv_heads, lengths = 2, [0, 1, 15, 16, 17, 63, 64, 200, 700, 1]
        rows = len(lengths)
        generator = torch.Generator("cuda").manual_seed(head_dim + group)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        columns = max(lengths) // block_size + 1
        blocks = rows * columns + 1
        # Blocks that hold nothing, and the rest of those in use, are poisoned.
        keys = torch.full((blocks, block_size, kv_heads, head_dim), float("nan"), device="cuda")
        keys = keys.bfloat16()
        values = keys.clone()
        order = torch.randperm(blocks - 1, generator=generator, device="cuda") + 1
        table = torch.zeros(rows + 3, columns, dtype=torch.int64, device="cuda")
        slots = torch.arange(rows, device="cuda") + 2
        table[slots] = order.view(rows, columns)
        qkv = draw(rows, kv_heads * (group + 2) * head_dim)
        q_weight, k_weight = draw(head_dim) + 1, draw(head_dim) + 1
        cos_sin = torch.randn(1024, 2, head_dim // 2, generator=generator, device="cuda")
        positions = torch.tensor(lengths, device="cuda")
        mapping = table[slots, positions // block_size] * block_size + positions % block_size
        wanted = torch.zeros(rows, kv_heads, group, head_dim, dtype=torch.float64, device="cuda")
        scale = 1 / math.sqrt(head_dim)
        parts = qkv.double().view(rows, kv_heads, group + 2, head_dim)
        queries, new_keys, new_values = parts[:, :, :-2], parts[:, :, -2], parts[:, :, -1]
        if norm:
            queries = F.rms_norm(queries, (head_dim,), q_weight.double(), 1e-6)
            new_keys = F.rms_norm(new_keys, (head_dim,), k_weight.double(), 1e-6)
        if rope:
            cos, sin = cos_sin[positions].double().unbind(1)
            queries = _rotated(queries, cos[:, None, None], sin[:, None, None])
            new_keys = _rotated(new_keys, cos[:, None], sin[:, None])
        for row, length in enumerate(lengths):
            past_keys, past_values = (
                draw(length, kv_heads, head_dim),
                draw(length, kv_heads, head_dim),
            )
            at = table[slots[row]][torch.arange(length, device="cuda") // block_size]
            offsets = torch.arange(length, device="cuda") % block_size
            keys[at, offsets], values[at, offsets] = past_keys, past_values
            all_keys = torch.cat((past_keys.double(), new_keys[row, None]))
            all_values = torch.cat((past_values.double(), new_values[row, None]))
            scores = torch.einsum("hgd,thd->hgt", queries[row], all_keys) * scale
            wanted[row] = torch.einsum("hgt,thd->hgd", scores.softmax(2), all_values)
        out = torch.full((rows, kv_heads * group * head_dim), float("nan"), device="cuda")
        out = out.bfloat16()
        attention = decode_attention.DecodeAttention(
            head_dim, group, kv_heads, block_size, norm=norm, rope=rope, splits=splits,
            device_index=0,
        )  # fmt: skip
        attention(
            qkv, keys, values, table, slots, positions, mapping, out, scale=scale,
            cos_sin=cos_sin if rope else None, q_weight=q_weight if norm else None,
            k_weight=k_weight if norm else None, eps=1e-6,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert relative_error(out.view_as(wanted), wanted) < LIMIT
        for row in range(rows):
            assert relative_error(out[row].view_as(wanted[row]), wanted[row]) < 2 * LIMIT, row
        assert relative_error(keys.flatten(0, 1)[mapping], new_keys) < LIMIT
        assert torch.equal(values.flatten(0, 1)[mapping].double(), new_values)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
