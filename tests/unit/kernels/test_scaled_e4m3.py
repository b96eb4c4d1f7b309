"""Inputs quantized, and products of e4m3 by e4m3, beside the references."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.gemm.invariant.mode import batch_invariant_mode
from megatron_async.models.quantized import inputs as reference
from megatron_async.models.quantized.values import E4M3
from tests.support.compiled_kernels import HOPPER, LIMIT_OF, compiles, compiling_for, empty
from tests.support.interpreter import HAS_TRITON, on_devices
from tests.support.sweeps import some

if HAS_TRITON:
    from megatron_async.kernels.gemm import e4m3_inputs, scaled_e4m3
    from megatron_async.kernels.gemm.invariant.products_triton import Tile

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(test: Any) -> Any:
    for mark in gpu:
        test = mark(test)
    return test


def rows_of(count: int, k: int, dtype: torch.dtype) -> Tensor:
    """Of many sizes; one of zeros, one with a subnormal scale, and what is no number in some."""
    x = torch.randn(count, k) * torch.logspace(-6, 3, count)[:, None]
    x[0], x[1] = 0, x[1].sign() * 2e-37
    x[2, 3], x[3, k - 1], x[4, 0] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def check_same(found: tuple[Tensor, Tensor], meant: reference.Inputs) -> None:
    numbers, scale = (each.cpu() for each in found)
    assert numbers.dtype == E4M3 and scale.dtype == torch.float32
    assert torch.equal(scale.nan_to_num(-1.0), meant.scale.nan_to_num(-1.0))
    assert torch.equal(numbers.float().isnan(), meant.numbers.float().isnan())
    assert torch.equal(numbers.float().nan_to_num(), meant.numbers.float().nan_to_num())


@on_devices
@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize(("k", "groups"), ((256, 1), (200, 1), (256, 2), (288, 3)))
def test_inputs_are_those_of_the_reference(device: str, k: int, groups: int, static: bool) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        x = rows_of(9, k, dtype)
        given = torch.tensor([0.37]) if static else None
        on_device = None if given is None else given.to(device)
        found = e4m3_inputs.quantize_inputs(x.view(3, 3, k).to(device), groups, on_device)
        assert found[0].shape == (3, 3, k) and found[1].shape == (3, 3, groups)
        flat = found[0].view(9, k), found[1].view(9, groups)
        check_same(flat, reference.quantize_inputs(x, groups, given))


def factors(
    rows: int, n: int, k: int, groups: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All numbers of e4m3, subnormal ones too, and scales."""
    found: list[Tensor] = []
    for count in (rows, n):
        bits = torch.randint(0, 256, (count, k), dtype=torch.uint8)
        bits[(bits & 0x7F) == 0x7F] = 1
        found += [bits.view(E4M3).to(device), (torch.rand(count, groups) * 3e-3).to(device)]
    return found[0], found[1], found[2], found[3]


def check_product(found: Tensor, given: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Within the rounding of the result, and of sums in fp32 or in the 13 bits of tensor cores,
    which cut off each of the products that they add up at once."""
    x, x_scale, w, w_scale = (each.cpu() for each in given)
    assert found.dtype == dtype
    wide = [
        (each.float().double().unflatten(1, (scale.shape[1], -1)) * scale.double()[..., None])
        .flatten(1)
        for each, scale in ((x, x_scale), (w, w_scale))
    ]  # fmt: skip
    meant = wide[0] @ wide[1].t()
    assert (found.cpu().double() - meant).norm() < 6e-3 * meant.norm()
    sums = 2.0**-11 if found.is_cuda else 2e-6
    size = wide[0].abs() @ wide[1].abs().t()
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)
    rounding *= 1 if found.is_cuda else 2  # the interpreter rounds towards zero
    allowed = rounding * meant.abs() + sums * size + 1e-6
    assert ((found.cpu().double() - meant).abs() <= allowed).all()


SMALL = ((5, 40, 256, 1), (40, 72, 96, 1), (7, 40, 384, 3), (33, 24, 128, 4), (3, 16, 512, 2))
"""Rows, rows of the weight, columns, groups."""


@on_devices
@pytest.mark.parametrize("case", SMALL)
def test_products_are_those_of_the_reference(device: str, case: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    given, (rows, n, _, groups) = factors(*case, device), case
    width = 0 if groups == 1 else case[2] // groups
    tile = Tile(32, 32, min(width or 64, 128), 4, 2)
    for dtype in DTYPES:
        found = scaled_e4m3.multiply(*given, dtype, tile=tile)
        assert found.shape == (rows, n)
        check_product(found, given, dtype)
    meant = reference.product(reference.Inputs(*given[:2]), *given[2:], torch.float32)
    check_product(meant, given, torch.float32)


@on_devices
def test_a_number_that_is_none_stays_in_its_row(device: str) -> None:
    x, x_scale, w, w_scale = factors(6, 16, 128, 1, device)
    x.view(torch.uint8)[4, 7] = 0x7F
    found = scaled_e4m3.multiply(x, x_scale, w, w_scale, torch.float32, tile=Tile(32, 32, 64, 4, 2))
    assert found[4].isnan().all() and found[[0, 1, 2, 3, 5]].isfinite().all()


LARGE = (
    (1, 4096, 4096, 1), (300, 6144, 4096, 1), (2048, 4096, 14336, 1), (65, 1000, 1024, 1),
    (300, 4096, 7168, 56), (33, 1536, 4096, 64), (2048, 7168, 2048, 16),
)  # fmt: skip


@on_gpu
@pytest.mark.parametrize("case", LARGE)
def test_chosen_kernels_equal_float64(case: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    given = factors(*case, "cuda")
    for by_row in (False, True):
        found = scaled_e4m3.multiply(*given, torch.bfloat16, by_row=by_row)
        check_product(found, given, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("groups", (1, 8))
def test_rows_do_not_depend_on_how_many_there_are(groups: int) -> None:
    torch.manual_seed(0)
    x, x_scale, w, w_scale = factors(512, 1536, 1024, groups, "cuda")
    whole = scaled_e4m3.multiply(x, x_scale, w, w_scale, torch.bfloat16, by_row=True)
    for count in (1, 7, 64, 65, 200):
        part = scaled_e4m3.multiply(
            x[:count], x_scale[:count], w, w_scale, torch.bfloat16, by_row=True
        )
        assert torch.equal(part, whole[:count])


def test_which_products_are_taken_and_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, groups, is_taken in (
        (4096, 1, True), (96, 1, True), (4096, 32, True), (4096, 128, True), (512, 2, True),
        (96, 2, False), (4096, 256, False), (576, 3, False),
    ):  # fmt: skip
        assert scaled_e4m3.takes(columns, groups) == is_taken
    assert e4m3_inputs.takes(32768, 1, torch.bfloat16)
    assert not e4m3_inputs.takes(32769, 1, torch.bfloat16)
    assert not e4m3_inputs.takes(256, 1, torch.float64)
    monkeypatch.setattr(scaled_e4m3, "_has_scales_by_row", lambda device: True)
    for n, k, groups, dtype, is_taken in (
        (48, 256, 1, torch.bfloat16, True), (40, 256, 1, torch.bfloat16, False),
        (48, 200, 1, torch.bfloat16, False), (48, 256, 2, torch.bfloat16, False),
        (48, 256, 1, torch.float16, False),
    ):  # fmt: skip
        weight = torch.empty(n, k, dtype=E4M3)
        assert scaled_e4m3.library_takes(weight, groups, dtype) == is_taken


def test_the_library_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and strides that its own check passes; and nothing that is to be batch-invariant."""
    from torch import _meta_registrations as registrations

    called: list[str] = []

    def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
        called.append("library")
        monkeypatch.setattr(registrations, "device_hint", lambda tensor: "cuda")
        made: Tensor = registrations.meta_scaled_mm(*args, **kwargs)
        return made

    monkeypatch.setattr(scaled_e4m3, "_has_scales_by_row", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(scaled_e4m3, "launch_fitting", lambda *given: called.append("Triton"))
    monkeypatch.setattr(scaled_e4m3, "apply_scales", lambda product, dtype: product.sums.to(dtype))
    monkeypatch.setattr(scaled_e4m3, "ONE_SCALE_ROWS", 7)
    for rows in (1, 7, 8):
        x, x_scale, w, w_scale = factors(rows, 48, 256, 1)
        given = (x[None], x_scale[None], w, w_scale)
        for dtype, by_row, meant in (
            (torch.bfloat16, False, "library"), (torch.bfloat16, True, "Triton"),
            (torch.float32, False, "Triton"),
        ):  # fmt: skip
            found = scaled_e4m3.multiply(*given, dtype, by_row=by_row, unit=torch.ones(()))
            assert found.shape == (1, rows, 48) and found.dtype == dtype
            assert called.pop() == meant and not called


@pytest.mark.parametrize(
    ("rows", "n", "one_scale"),
    [
        (65, 6144, True), (128, 4096, True), (256, 4096, True), (65, 28672, False),
        (256, 6144, False), (257, 16, False),
    ],
)  # fmt: skip
def test_few_results_are_added_up_without_scales(
    rows: int, n: int, one_scale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor | None] = []

    def by_library(x: Tensor, *given: Any, unit: Tensor | None) -> Tensor:
        taken.append(unit)
        return x.new_empty(len(x), n, dtype=torch.bfloat16)

    monkeypatch.setattr(scaled_e4m3, "library_takes", lambda *given: True)
    monkeypatch.setattr(scaled_e4m3, "multiply_by_library", by_library)
    x, w = (torch.empty(count, 16, dtype=E4M3, device="meta") for count in (rows, n))
    scales = torch.empty(rows, 1, device="meta"), torch.empty(n, 1, device="meta")
    one = torch.ones(())
    for unit in (one, None):
        scaled_e4m3.multiply(x, scales[0], w, scales[1], torch.bfloat16, unit=unit)
    assert taken[0] is (one if one_scale else None) and taken[1] is None


@on_devices
@pytest.mark.parametrize("case", ((5, 48, 256, 1), (70, 1040, 128, 1)))
def test_sums_of_the_library_are_multiplied_by_both_scales(
    device: str, case: tuple[int, int, int, int]
) -> None:
    """Sums of the library in fp32, with a scale for all, and the kernel behind it."""
    torch.manual_seed(0)
    given, one = factors(*case, device), torch.ones((), device=device)
    found = scaled_e4m3.multiply_by_library(*given, torch.bfloat16, unit=one)
    check_product(found, given, torch.bfloat16)
    if device == "cuda":
        by_row = scaled_e4m3.multiply_by_library(*given, torch.bfloat16, unit=None)
        check_product(by_row, given, torch.bfloat16)
    given[0].view(torch.uint8)[3, 7] = 0x7F
    given[1][4] = float("nan")
    found = scaled_e4m3.multiply_by_library(*given, torch.bfloat16, unit=one)
    assert found[3:5].isnan().all() and found[[0, 1, 2]].isfinite().all()


def test_layers_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of rows, and in batch-invariant mode to the one that does not ask for it."""
    modes: list[bool] = []

    def multiply(*given: Any, by_row: bool, unit: object) -> Tensor:
        assert unit == "one"
        modes.append(by_row)
        return given[0].float()

    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(scaled_e4m3, "multiply", multiply)
    monkeypatch.setattr(e4m3_inputs, "quantize_inputs", reference.quantize_inputs)
    _, _, weight, scale = factors(1, 40, 256, 2)
    layer = SimpleNamespace(weight=weight, weight_scale=scale, input_scale=None, unit_scale="one")
    for rows in (1, 300):
        x = torch.ones(rows, 256).bfloat16().as_subclass(OnGpu)
        reference.product_of(layer, x)
    with batch_invariant_mode():
        reference.product_of(layer, x)
    assert modes == [False, False, True]


@compiles
@pytest.mark.parametrize("groups", some([1, 32], 1))
def test_tensor_cores_multiply_e4m3_and_sums_leave_them(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper. Each stage's sums are added to the total outside, and tiles take no more memory
    than was reckoned with."""
    monkeypatch.setattr(e4m3_inputs, "rounds_once", lambda device: True)
    weight, scale = empty(512, 4096, dtype=E4M3), empty(512, groups, dtype=torch.float32)
    width = 0 if groups == 1 else 4096 // groups
    with compiling_for(HOPPER) as kernels:
        inputs = e4m3_inputs.quantize_inputs(empty(300, 4096, dtype=torch.bfloat16), groups)
        scaled_e4m3.multiply(*inputs, weight, scale, torch.bfloat16, by_row=True)
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernels[0].ptx and "div.rn.f32" in kernels[0].ptx
    assert re.search(r"wgmma\S*\.m64n128k32\.f32\.e4m3\.e4m3", kernels[1].ptx)
    added = kernels[1].ptx.count("add.f32") + kernels[1].ptx.count("fma.rn.f32")
    assert added >= 64 * 128 // 128, "a thread's elements of the tile"
    limit = LIMIT_OF[HOPPER]
    bound = scaled_e4m3.shared_bytes(scaled_e4m3.tile_of(None, width, limit))
    assert kernels[1].shared <= bound <= limit
    many = scaled_e4m3.tile_of(300, width, limit)
    assert many == scaled_e4m3.MANY_ROWS and scaled_e4m3.shared_bytes(many) <= limit
