"""Products with e4m3 weights for some hundred rows, beside float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.gemm.invariant.mode import batch_invariant_mode, is_on
from megatron_async.models.quantized import linear
from megatron_async.models.quantized.values import E4M3
from tests.support.compiled_kernels import HOPPER, compiles, compiling_for, empty
from tests.support.interpreter import HAS_TRITON, on_devices

if HAS_TRITON:
    from megatron_async.kernels.gemm import wide_e4m3
    from megatron_async.kernels.gemm.wide_e4m3 import WideTile, tile_of

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
SMALL = ((5, 40, 256, 1), (40, 72, 128, 1), (7, 40, 384, 3))
"""Rows, rows of the weight, columns, groups."""
LARGE = (
    (3, 1024, 2048, 1), (32, 4096, 4096, 1), (64, 1000, 1024, 8), (100, 6144, 4096, 1),
    (128, 4096, 14336, 112), (129, 4096, 14336, 1), (256, 6144, 1024, 1),
)  # fmt: skip


def weight_of(
    n: int, k: int, groups: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """All numbers of e4m3, subnormal ones too, and scales."""
    bits = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 1
    return bits.view(E4M3).to(device), (torch.rand(n, groups) * 3e-3 + 1e-4).to(device)


def meant_of(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    numbers = weight.cpu().float().double().view(len(weight), scale.shape[1], -1)
    whole = (numbers * scale.cpu().double()[:, :, None]).view(weight.shape)
    return x.cpu().double() @ whole.t()


@on_devices
@pytest.mark.parametrize("split", (1, 2))
@pytest.mark.parametrize("case", SMALL)
def test_equals_float64(device: str, case: tuple[int, int, int, int], split: int) -> None:
    torch.manual_seed(0)
    rows, n, k, groups = case
    weight, scale = weight_of(n, k, groups, device)
    x = torch.randn(2, rows, k, device=device).bfloat16()
    found = wide_e4m3.multiply(x, weight, scale, WideTile(32, 32, 64, split, 4, 2))
    meant = meant_of(x, weight, scale)
    assert found.shape == (2, rows, n) and found.dtype == torch.bfloat16
    assert (found.cpu().double() - meant).norm() < 5e-3 * meant.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", LARGE)
def test_chosen_tiles_equal_float64(case: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    rows, n, k, groups = case
    weight, scale = weight_of(n, k, groups, "cuda")
    x = torch.randn(rows, k, device="cuda").bfloat16()
    found = wide_e4m3.multiply(x, weight, scale)
    meant = meant_of(x, weight, scale)
    assert (found.cpu().double() - meant).norm() < 5e-3 * meant.norm()
    for _ in range(20):
        again = wide_e4m3.multiply(x, weight, scale)
        assert torch.equal(found, again), "sums have one order"


@pytest.mark.parametrize(("columns", "groups"), [(128, 2), (384, 2), (256, 16)])
def test_groups_that_end_within_a_stage_are_refused(columns: int, groups: int) -> None:
    weight, scale = weight_of(40, columns, groups)
    assert not wide_e4m3.takes(3, columns, scale)
    with pytest.raises(ValueError, match="end within a stage"):
        wide_e4m3.multiply(torch.ones(3, columns).bfloat16(), weight, scale)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@compiles
@pytest.mark.parametrize(("rows", "groups"), [(64, 1), (256, 1), (128, 32)])
def test_no_product_reads_weights_of_the_next_step(rows: int, groups: int) -> None:
    """What :func:`compiling_for` checks, of tiles of four warps and of eight."""
    n, k, half = 28672, 4096, torch.bfloat16
    x = empty(rows, k, dtype=half).as_subclass(OnGpu)
    scale = empty(n, groups, dtype=torch.float32)
    tile = tile_of(n, k, rows, 132)
    with compiling_for(HOPPER) as found:
        wide_e4m3.multiply(x, empty(n, k, dtype=E4M3), scale, tile)
    (kernel,) = found
    assert "wgmma.mma_async" in kernel.ptx and "fma.rn.bf16x2" in kernel.ptx


def test_splits_fill_the_gpu_and_leave_each_part_columns() -> None:
    for n in (64, 1024, 4096, 6144, 28672):
        for k in (128, 1024, 4096, 14336):
            for rows in range(32, 257, 32):
                tile = tile_of(n, k, rows, 132)
                assert tile.m * -(-rows // tile.m) >= rows and tile.split_k in (1, 2, 4)
                assert k // tile.k >= tile.split_k and 128 % tile.k == 0
                assert tile.split_k == 1 or -(-n // tile.n) * tile.split_k <= 2 * 132


def test_layers_take_it_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to so many rows, never in batch-invariant mode, and never for other dtypes."""
    taken: list[int] = []

    def multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        taken.append(len(x))
        return x

    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(wide_e4m3, "multiply", multiply)
    monkeypatch.setattr(linear, "weight_of", lambda layer, dtype: None)
    monkeypatch.setattr(linear, "F", SimpleNamespace(linear=lambda x, weight: None))
    for groups, most in ((1, 256), (2, 128)):
        weight, scale = weight_of(40, 256, groups)
        layer = SimpleNamespace(weight=weight, weight_scale=scale, quantizes_input=False)
        for rows in (1, most, most + 1):
            x = torch.ones(rows, 256).bfloat16().as_subclass(OnGpu)
            linear.product(layer, x)
        assert taken == [1, most]
        for many in (4, 8, 16):  # which end within a stage
            layer.weight_scale = torch.ones(40, many)
            linear.product(layer, torch.ones(3, 256).bfloat16().as_subclass(OnGpu))
        assert taken == [1, most]
        layer.weight_scale = scale
        x = torch.ones(3, 256).bfloat16().as_subclass(OnGpu)
        linear.product(layer, x.float().as_subclass(OnGpu))
        with batch_invariant_mode():
            assert is_on()
            linear.product(layer, x)
        assert taken == [1, most] and not is_on()
        taken.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_number_is_widened_exactly() -> None:
    bits = torch.arange(256, dtype=torch.uint8, device="cuda")
    bits[(bits & 0x7F) == 0x7F] = 1
    weight = bits.view(E4M3).repeat(64, 1)
    one = torch.eye(256, device="cuda").bfloat16()
    found = wide_e4m3.multiply(one, weight, torch.ones(64, 1, device="cuda"))
    assert torch.equal(found, weight.float().t().bfloat16())
