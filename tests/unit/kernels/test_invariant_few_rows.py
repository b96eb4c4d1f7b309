"""Products of few rows in one order of K by CUDA: bits, and which of them are used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.kernels.gemm.invariant import skinny
from megatron_async.kernels.gemm.invariant.segments import segment_size
from megatron_async.kernels.gemm.invariant.skinny import Product, multiply, takes, tile_config
from megatron_async.kernels.shared_memory import HOPPER_BYTES
from megatron_async.models.description.invariant_products import products_of
from megatron_async.models.layers.decoder_layer import DecoderLayer
from tests.support import emulator
from tests.support.cuda_kernels import emulated
from tests.support.interpreter import compiled

CPU = torch.device("cpu", 0)
NARROW = 4
"""Multiprocessors of a GPU on which small weights fill them."""


def in_order(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """The sums in float32 of products that are exact: of each segment of K in order, and then of
    the segments, as long as those of Triton's kernels."""
    total = torch.zeros(len(x), len(weight))
    size = segment_size(x.shape[1], segments) or x.shape[1]
    for begin in range(0, x.shape[1], size):
        part = torch.zeros_like(total)
        for k in range(begin, min(begin + size, x.shape[1])):
            part += x[:, k : k + 1].float() * weight[:, k].float()
        total += part
    return total


def values(*shape: int) -> Tensor:
    """Numbers of many sizes."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-6, 7, shape)).bfloat16()


def kept(weight: Tensor) -> Tensor:
    """The same as a parameter of a model."""
    skinny.keep_weight(weight)
    return weight


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch, NARROW)
    monkeypatch.setattr(skinny, "_runs", lambda device: True)
    monkeypatch.setattr(skinny, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(skinny, "_loaded", {})
    monkeypatch.setattr(skinny, "_same", {CPU})


@emulated
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("rows", (1, 8, 11, 37, 64))
@pytest.mark.parametrize("segments", (1, 2, 4))
def test_sums_have_one_order(rows: int, segments: int) -> None:
    """Of 16 columns of K, which are one instruction, one alone is not 0. What is large at the begin
    goes away again at the end, and what was added meanwhile was rounded."""
    torch.manual_seed(rows)
    product = Product(96, 1024, segments)
    x, weight = values(rows, product.depth), kept(values(product.columns, product.depth))
    x[:, torch.arange(product.depth) % 16 != 5] = 0
    for column, size in ((5, 2.0**18), (product.depth - 11, -(2.0**18))):
        x[:, column], weight[:, column] = 1, size
    skinny.load([product], [rows], CPU)
    expected = in_order(x, weight, segments)
    others = (in_order(x, weight, n).bfloat16() for n in (1, 2, 4) if n != segments)
    assert not any(torch.equal(expected.bfloat16(), each) for each in others)
    assert torch.equal(multiply(x, weight, segments), expected.bfloat16())
    bias = values(product.columns)
    assert torch.equal(multiply(x, weight, segments, bias), (expected + bias.float()).bfloat16())


@emulated
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("rows", (3, 16, 48))
def test_swiglu_is_that_of_a_product_that_was_rounded(rows: int) -> None:
    torch.manual_seed(rows)
    product = Product(128, 512, 1, gated=True)
    x, weight = torch.randn(rows, 512).bfloat16(), kept(torch.randn(128, 512).bfloat16() / 16)
    skinny.load([product], [rows], CPU)
    out = multiply(x, weight, 1, gated=True)
    exact = F.linear(x.double(), weight.double())
    gate, up = exact.bfloat16().float().chunk(2, 1)
    expected = F.silu(gate) * up
    assert out is not None and out.shape == (rows, 64)
    # The emulator's sums and exponentials may round to the other side of a tie.
    same = out == expected.bfloat16()
    gate, up = exact.float().chunk(2, 1)
    unrounded = out == (F.silu(gate) * up).bfloat16()
    assert same.float().mean() > 0.98 > 0.9 > unrounded.float().mean()


@emulated
@pytest.mark.usefixtures("on_a_cpu")
def test_what_was_not_loaded_is_left_to_other_kernels() -> None:
    x, weight = torch.randn(9, 512).bfloat16(), kept(torch.randn(128, 512).bfloat16())
    skinny.load([Product(128, 512, 2)], [16], CPU)
    assert takes(x, weight, 2) and multiply(x, weight, 2) is not None
    assert multiply(x, weight, 2, gated=True) is None
    others = [
        (x, weight, 1),
        (x[:8], weight, 2),
        (x[:0], weight, 2),
        (torch.randn(65, 512).bfloat16(), weight, 2),
        (x.float(), kept(weight.float()), 2),
        (x, kept(torch.randn(512, 128).bfloat16().t()), 2),
        (x, kept(torch.randn(128 * 512 + 1).bfloat16()[1:].view(128, 512)), 2),
    ]
    for x, other, segments in others:
        assert not takes(x, other, segments) and multiply(x, other, segments) is None


@emulated
@pytest.mark.usefixtures("on_a_cpu")
def test_a_weight_that_a_step_may_write_is_left_to_other_kernels() -> None:
    """It would be read before the kernel that writes it has ended."""
    x, weight = torch.randn(9, 512).bfloat16(), kept(torch.randn(128, 512).bfloat16())
    skinny.load([Product(128, 512, 2)], [16], CPU)
    assert takes(x, weight, 2) and takes(x, weight.view(128, 512), 2)
    assert not takes(x, weight.clone(), 2)
    lies_there = weight.detach()
    del weight
    assert not takes(x, lies_there, 2), "the parameter is gone"


@emulated
@pytest.mark.usefixtures("on_a_cpu")
def test_other_bits_than_those_of_triton_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "_same", set())
    monkeypatch.setattr(skinny, "EXAMINED", (Product(128, 512, 2),))
    monkeypatch.setattr(skinny, "ROWS", (8, 16))

    def right(x: Tensor, weight: Tensor, product: Product) -> Tensor:
        assert not skinny._same, "nobody uses them yet"
        return in_order(x, weight, product.segments).bfloat16()

    def values(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape).bfloat16()

    def wrong(x: Tensor, weight: Tensor, product: Product) -> Tensor:
        found = right(x, weight, product)
        found[-1, -1] = float("inf") if len(x) == 16 else found[-1, -1]
        return found

    def fails(x: Tensor, weight: Tensor, product: Product) -> Tensor:
        raise RuntimeError("no such instruction")

    for expected, said in ((wrong, "of 16 rows has other bits"), (fails, "no such instruction")):
        other = skinny.find_products(CPU, values, expected)
        assert other is not None and said in other and not skinny._same
    assert skinny.find_products(CPU, values, right) is None and skinny._same == {CPU}


def test_each_cta_has_one_segment_and_clusters_add_up() -> None:
    for product in (
        Product(6144, 4096, 1),
        Product(4096, 4096, 2),
        Product(28672, 4096, 1, gated=True),
        Product(4096, 14336, 4),
        Product(1024, 3072, 2),
    ):
        for rows in skinny.ROWS:
            config = tile_config(product, rows, 132, HOPPER_BYTES)
            assert config is not None and config.tma and not config.workspace
            assert config.split_k == product.segments and config.warps_k == 1
            size = segment_size(product.depth, product.segments) or product.depth
            stages = product.depth // 64
            cuts = [stages * rank // config.split_k * 64 for rank in range(config.split_k)]
            assert cuts == list(range(0, product.depth, size)), "those of Triton's segments"
    for product in (
        Product(4096, 11008, 4),  # Llama-2-7B's: Triton's last segment is shorter
        Product(128256, 4096, 1),
        Product(4096, 4128, 2),
        Product(4104, 4096, 1, gated=True),
        Product(16, 4096, 1),
    ):
        assert tile_config(product, 32, 132, HOPPER_BYTES) is None


def test_products_of_a_model_are_those_of_its_layers() -> None:
    model = load_pretrained("tiny", dtype=torch.bfloat16).model
    config = model.config
    hidden, inner = config.hidden_size, config.ffn_hidden_size
    found = list(products_of(model))
    assert len(set(found)) == len(found)
    assert Product(2 * inner, hidden, 1, gated=True) in found
    assert Product(2 * inner, hidden, 1) not in found
    assert {(each.columns, each.depth) for each in found} >= {(hidden, inner), (hidden, hidden)}
    layer = next(each for each in model.modules() if isinstance(each, DecoderLayer))
    layer.mlp.register_forward_hook(lambda *_: None)  # then its modules are called
    assert Product(2 * inner, hidden, 1) in list(products_of(model))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
class TestOnGpu:
    @pytest.mark.parametrize(
        "product",
        (
            Product(6144, 4096, 1), Product(4096, 4096, 2), Product(28672, 4096, 1, gated=True),
            Product(4096, 14336, 4), Product(1024, 3072, 2), Product(6144, 1024, 1, gated=True),
        ),
    )  # fmt: skip
    def test_bits_are_those_of_a_chunk(self, product: Product, device: str) -> None:
        from megatron_async.kernels.gemm.invariant import products_triton as products
        from megatron_async.kernels.norm.swiglu import swiglu

        gpu = torch.device("cuda", 0)
        products.find_tiles(gpu, torch.bfloat16)
        assert gpu in skinny._same
        skinny.load([product], range(1, 65), gpu)
        x = torch.randn(2048, product.depth, device=device).bfloat16()
        weight = torch.randn(product.columns, product.depth, device=device).bfloat16() / 32
        skinny.keep_weight(weight)
        chunk = products.matmul_by_row(x, weight.t())
        chunk = swiglu(chunk) if product.gated else chunk
        for rows in (1, 3, 8, 9, 16, 17, 32, 33, 48, 49, 64):
            some = x[rows : 2 * rows].contiguous()
            out = multiply(some, weight, product.segments, gated=product.gated)
            assert out is not None and torch.equal(out, chunk[rows : 2 * rows]), rows
