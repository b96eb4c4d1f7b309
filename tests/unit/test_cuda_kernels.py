"""The CUDA C++ kernels of the decode path against float64, and what surrounds them.

On a GPU, and without one in an emulator that is stricter about order than a GPU is
(``tests/support/emulated_intrinsics.hpp``). There the products are fewer and smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels.cuda import attention as decode_attention
from megatron_async.kernels.cuda import compile as cuda
from megatron_async.kernels.cuda import linear as cuda_linear
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
from tests.support import emulator

LIMIT = 1e-2

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and cuda.unavailable(0) is not None,
        reason="the CUDA kernels need compute capability 9.0 and cuda.bindings",
    ),
]
GPU = "cuda"
EMULATED = "cpu"
emulated = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")


def on_both(*names: str, gpu: Iterable[tuple], small: Iterable[tuple]) -> pytest.MarkDecorator:  # type: ignore[type-arg]
    """Parametrise ``device`` and ``names`` with cases for a GPU and for the emulator."""
    cases = [pytest.param(GPU, *case, marks=on_gpu) for case in gpu]
    cases += [pytest.param(EMULATED, *case, marks=emulated) for case in small]
    return pytest.mark.parametrize(("device", *names), cases, indirect=["device"])


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == EMULATED:
        emulator.install(monkeypatch)
    return torch.device(request.param)


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


class Product:
    def __init__(
        self,
        device: torch.device,
        n: int,
        k: int,
        norm: int,
        epilogue: int,
        bias: bool,
        rows: int,
    ) -> None:
        self.device = device
        self.n, self.k, self.norm, self.epilogue, self.rows = n, k, norm, epilogue, rows
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

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

    def linear(self, tiling: Tiling, statistics_norm: int = RMS_NORM) -> Linear:
        return Linear(
            self.n, self.k, padded(self.rows), self.norm, self.epilogue, statistics_norm, tiling,
            self.device,
        )  # fmt: skip

    def run(self, linear: Linear, statistics_norm: int = RMS_NORM) -> tuple[torch.Tensor, float]:
        """The result, and the error of the statistics that came with it."""
        width = self.n // 2 if self.epilogue == SILU_GATE else self.n
        # A row more than the kernel may write: it must stay as it is.
        guarded = torch.full((self.rows + 1, width), float("nan"), device=self.device).bfloat16()
        out = guarded[: self.rows]
        statistics = statistics_of(self.x, self.norm, 32 if self.k % 64 else 64)
        emitted, error = None, 0.0
        if self.epilogue == ADD:
            tiles = self.n // linear.statistic_rows
            emitted = torch.full((self.rows, tiles, 2), float("nan"), device=self.device)
            out.copy_(self.residual)
        linear(
            self.x, self.weight, out, bias=self.bias,
            norm=(self.norm_weight, self.norm_bias, 1e-5) if self.norm else None,
            statistics=statistics if self.norm else None,
            residual=out if self.epilogue == ADD else None, statistics_out=emitted,
        )  # fmt: skip
        assert guarded[-1].isnan().all()
        if emitted is not None:
            wanted = statistics_of(out, statistics_norm, linear.statistic_rows)
            error = relative_error(emitted, wanted.double())
        return out, error


def _tilings(product: Product, count: int) -> list[Tiling]:
    """A spread of what can be built."""
    every = [
        Tiling(row_tiles, warps_n, warps_k, splits, stages, stream, persistent, memory)
        for row_tiles in (1, 2, 3)
        for warps_n in (1, 2, 4)
        for warps_k in (1, 2, 4)
        for splits in (1, 2, 4)
        for stages in (2, 4, 5)
        for stream in (False, True)
        for persistent in (False, True)
        for memory in (False, True)
    ]
    shape = (product.n, product.k, padded(product.rows), product.norm, product.epilogue)
    fitting = [tiling for tiling in every if tiling.fits(*shape)]
    return fitting[:: max(1, len(fitting) // count)][:count]


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
_SMALL_PRODUCTS = [
    ((96, 192, RMS_NORM, STORE, True), 5, Tiling(3, 1, 3, 1, 2)),
    ((96, 256, RMS_NORM, STORE, True), 32, Tiling(1, 2, 1, 2, 3, stream=True)),
    ((96, 448, RMS_NORM, STORE, False), 13, Tiling(1, 3, 1, 2, 3, stream=True, memory=True)),
    ((128, 256, RMS_NORM, SILU_GATE, False), 1, Tiling(2, 2, 1, 1, 4)),
    ((128, 320, RMS_NORM, SILU_GATE, True), 32, Tiling(2, 2, 1, 1, 4, stream=True)),
    ((128, 384, RMS_NORM, SILU_GATE, False), 17, Tiling(1, 4, 1, 2, 2, memory=True)),
    ((205, 256, RMS_NORM, STORE, False), 30, Tiling(1, 2, 1, 1, 3, stream=True, persistent=True)),
    ((75, 256, RMS_NORM, STORE, False), 2, Tiling(1, 2, 1, 1, 8, persistent=True)),
    ((64, 512, NO_NORM, ADD, False), 32, Tiling(1, 2, 1, 4, 3, stream=True, memory=True)),
    ((64, 512, NO_NORM, ADD, True), 16, Tiling(1, 2, 1, 4, 2)),
    ((64, 448, NO_NORM, ADD, True), 8, Tiling(1, 1, 4, 1, 3)),
    ((64, 448, NO_NORM, ADD, False), 3, Tiling(2, 2, 2, 2, 4)),
    ((96, 192, LAYER_NORM, GELU_TANH, True), 7, Tiling(1, 3, 2, 1, 3)),
    ((64, 256, LAYER_NORM, GELU, True), 20, Tiling(1, 2, 2, 2, 2)),
]


@on_both(
    *("product", "rows", "tiling"),
    gpu=((product, rows, None) for product in _PRODUCTS for rows in (1, 5, 8, 13, 16, 32)),
    small=_SMALL_PRODUCTS,
)
class TestProducts:
    @pytest.fixture(autouse=True)
    def setup(
        self,
        device: torch.device,
        product: tuple[int, int, int, int, bool],
        rows: int,
        tiling: Tiling | None,
    ) -> None:
        self.product = Product(device, *product, rows)
        self.tilings = _tilings(self.product, 5) if tiling is None else [tiling]
        assert self.tilings

    def test_equals_float64(self, rows: int) -> None:
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        wanted = self.product.wanted()
        for tiling in self.tilings:
            linear = self.product.linear(tiling, statistics_norm)
            out, error = self.product.run(linear, statistics_norm)
            assert relative_error(out, wanted) < LIMIT, tiling
            assert error < 1e-3, tiling

    def test_a_repetition_has_the_same_bits(self, rows: int) -> None:
        statistics_norm = LAYER_NORM if rows % 2 else RMS_NORM
        linear = self.product.linear(self.tilings[-1], statistics_norm)
        first, _ = self.product.run(linear, statistics_norm)
        again, _ = self.product.run(linear, statistics_norm)
        assert torch.equal(first, again)


@emulated
def test_emulated_tilings_use_every_way_to_build_the_kernel() -> None:
    tilings = [tiling for _, _, tiling in _SMALL_PRODUCTS]
    for (n, k, norm, epilogue, _), rows, tiling in _SMALL_PRODUCTS:
        assert tiling.fits(n, k, padded(rows), norm, epilogue), tiling
    for name in ("stream", "persistent", "memory"):
        assert {getattr(tiling, name) for tiling in tilings} == {False, True}
    assert {epilogue for (_, _, _, epilogue, _), _, _ in _SMALL_PRODUCTS} == set(range(5))


# --- attention -----------------------------------------------------------------------------------


_ATTENTIONS = [
    (128, 4, 64, False, True),
    (128, 2, 64, True, True),
    (64, 1, 16, False, False),
    (96, 3, 32, True, True),
    (256, 8, 16, False, True),
    (128, 16, 128, True, True),
    (64, 12, 64, False, True),
]
_LENGTHS = [0, 1, 15, 16, 17, 63, 64, 200, 700, 1]


@on_both(
    *("shape", "splits", "piece_tokens", "lengths"),
    gpu=(
        (shape, splits, piece_tokens, _LENGTHS)
        for shape in _ATTENTIONS
        for splits, piece_tokens in ((1, 2048), (2, 2048), (8, 2048), (1, 128), (2, 32), (4, 16))
    ),
    small=[
        ((64, 2, 16, True, True), 1, 2048, [0, 1, 15, 17, 200]),
        ((96, 3, 32, True, True), 2, 2048, [0, 16, 63, 150]),
        ((64, 12, 64, False, False), 1, 64, [64, 0, 33, 129, 65]),
        ((128, 4, 16, False, True), 4, 16, [0, 31, 64, 65, 330]),
        ((32, 1, 16, True, True), 1, 16, [1016, 0, 511, 16, 15, 17]),
    ],
)
class TestAttention:
    def test_equals_float64(
        self,
        device: torch.device,
        shape: tuple[int, int, int, bool, bool],
        splits: int,
        piece_tokens: int,
        lengths: list[int],
    ) -> None:
        head_dim, group, block_size, norm, rope = shape
        kv_heads, rows = 2, len(lengths)
        generator = torch.Generator(device).manual_seed(head_dim + group)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).bfloat16()

        columns = max(lengths) // block_size + 1
        blocks = rows * columns + 1
        # Blocks that hold nothing, and the rest of those in use, are poisoned.
        keys = torch.full((blocks, block_size, kv_heads, head_dim), float("nan"), device=device)
        keys = keys.bfloat16()
        values = keys.clone()
        order = torch.randperm(blocks - 1, generator=generator, device=device) + 1
        table = torch.zeros(rows + 3, columns, dtype=torch.int64, device=device)
        slots = torch.arange(rows, device=device) + 2
        table[slots] = order.view(rows, columns)
        qkv = draw(rows, kv_heads * (group + 2) * head_dim)
        q_weight, k_weight = draw(head_dim) + 1, draw(head_dim) + 1
        cos_sin = torch.randn(1024, 2, head_dim // 2, generator=generator, device=device)
        positions = torch.tensor(lengths, device=device)
        mapping = table[slots, positions // block_size] * block_size + positions % block_size
        wanted = torch.zeros(rows, kv_heads, group, head_dim, dtype=torch.float64, device=device)
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
            at = table[slots[row]][torch.arange(length, device=device) // block_size]
            offsets = torch.arange(length, device=device) % block_size
            keys[at, offsets], values[at, offsets] = past_keys, past_values
            all_keys = torch.cat((past_keys.double(), new_keys[row, None]))
            all_values = torch.cat((past_values.double(), new_values[row, None]))
            scores = torch.einsum("hgd,thd->hgt", queries[row], all_keys) * scale
            wanted[row] = torch.einsum("hgt,thd->hgd", scores.softmax(2), all_values)
        out = torch.full((rows, kv_heads * group * head_dim), float("nan"), device=device)
        out = out.bfloat16()
        heads = decode_attention.Heads(head_dim, group, kv_heads, block_size, norm, rope)
        attention = decode_attention.DecodeAttention(
            heads, rows, columns * block_size, device, splits=splits, piece_tokens=piece_tokens
        )
        attention(
            qkv, keys, values, table, slots, positions, mapping, out, scale=scale,
            cos_sin=cos_sin if rope else None, q_weight=q_weight if norm else None,
            k_weight=k_weight if norm else None, eps=1e-6,
        )  # fmt: skip
        assert relative_error(out.view_as(wanted), wanted) < LIMIT
        for row in range(rows):
            assert relative_error(out[row].view_as(wanted[row]), wanted[row]) < 2 * LIMIT, row
        assert relative_error(keys.flatten(0, 1)[mapping], new_keys) < LIMIT
        assert torch.equal(values.flatten(0, 1)[mapping].double(), new_values)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


# --- embedding -----------------------------------------------------------------------------------

_EMBEDDINGS = [(64, 16, RMS_NORM, False), (192, 64, LAYER_NORM, True), (320, 32, RMS_NORM, True)]


@on_both("shape", gpu=((shape,) for shape in _EMBEDDINGS), small=((s,) for s in _EMBEDDINGS))
def test_embedding_and_its_statistics(
    device: torch.device, shape: tuple[int, int, int, bool]
) -> None:
    hidden, per_tile, norm, learned = shape
    generator = torch.Generator(device).manual_seed(hidden)
    table, positions = (
        torch.randn(50, hidden, generator=generator, device=device).bfloat16() for _ in range(2)
    )
    tokens = torch.tensor([3, 49, 0, 3], device=device)
    places = torch.tensor([0, 7, 49, 1], device=device)
    out = torch.full((4, hidden), float("nan"), device=device).bfloat16()
    statistics = torch.full((4, hidden // per_tile, 2), float("nan"), device=device)
    embed = decode_attention.Embed(hidden, per_tile, norm, positions=learned, device=device)
    embed(tokens, places, table, positions if learned else None, out, statistics)
    wanted = table[tokens].float()
    if learned:
        wanted += positions[places].float()
    assert torch.equal(out, wanted.bfloat16())
    expected = statistics_of(out, norm, per_tile)
    if norm == RMS_NORM:
        statistics, expected = statistics[..., 1], expected[..., 1]
    assert relative_error(statistics, expected.double()) < 1e-5


# --- the emulator notices -------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize(
    ("there", "instead", "says"),
    [
        ("  wait_for_predecessor();\n", "", None),
        ("      __syncthreads();\n      issue_x();", "      issue_x();", None),
        ("await_copies<ST - 1>();", "", None),
        ("    keep_residual();\n#else", "#else", None),
        ("t * 16;\n      }\n  };\n  start_tile", "size_t(N) * K * 2;}};start_tile", "of nobody"),
    ],
)
def test_the_emulator_notices(
    there: str, instead: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the tests above can fail, each for what it is there for."""
    text = emulator.source_text("linear")
    assert there in text
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    monkeypatch.setattr(
        cuda_linear, "kernel", lambda source, values, _: emulator.EmulatedKernel(source, values)
    )
    adds = "residual" in there
    shape = (64, 512, NO_NORM if adds else RMS_NORM, ADD if adds else STORE, not adds)
    product = Product(torch.device("cpu"), *shape, 32)
    linear = product.linear(Tiling(1, 2, 1, 2, 3, stream=True, memory=True))
    if says is not None:
        with pytest.raises(AssertionError, match=says):
            product.run(linear)
    else:
        out, _ = product.run(linear)
        assert not relative_error(out, product.wanted()) < LIMIT
