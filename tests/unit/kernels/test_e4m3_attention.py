"""The fused attention over a cache of e4m3: its numbers, their scales, and what is not a number.

That it equals float64 is in ``test_window_attention.py``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.attention.decode_attention import Heads, heads_of
from megatron_async.kernels.attention.e4m3_cache import E4M3, encode
from megatron_async.runner.memory.attention_metadata import AttentionMetadata
from tests.support import emulator
from tests.support.batches import new_batch
from tests.support.cuda_kernels import device, emulated, on_both, relative_error
from tests.support.window_cases import KV_HEADS, Row, WindowCase, bits
from tests.unit.kernels.test_window_attention import CLOSE, WIDE_SMALL, rows_of

__all__ = ["device"]

PLAIN = (64, 1, 16, False, False)
"""No norm and no rotation: keys are appended as they come."""


def parts_of(case: WindowCase) -> Tensor:
    """A view ``[T, KV heads, query heads, key, value, head_dim]`` of what is packed."""
    return case.packed.unflatten(1, (KV_HEADS, case.heads.group + 2, -1))


def hard_numbers() -> Tensor:
    """In bfloat16: all numbers of e4m3, those half way between two and on either side of it, and
    what is too large, too small, infinite and NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = numbers[numbers.isfinite()].sort()[0]
    between = ((numbers[1:] + numbers[:-1]) / 2).bfloat16()
    near = [between, between.nextafter(numbers[1:].bfloat16())]
    near.append(between.nextafter(numbers[:-1].bfloat16()))
    others = torch.tensor([1e-38, 1e-30, 460.0, 464.0, 500.0, 1e38, math.inf, math.nan, 0.0])
    return torch.cat((numbers.bfloat16(), *near, others.bfloat16(), -others.bfloat16()))


@on_both("window", gpu=[(1,), (4,)], small=[(1,), (4,)])
def test_each_number_is_appended_as_the_nearest(device: torch.device, window: int) -> None:
    """Those of keys and of values, with a scale for each head."""
    case = WindowCase(device, PLAIN, window, [Row(n, window) for n in range(8)], e4m3=True)
    kernel, parts = case.kernel(1, 2048), parts_of(case)
    numbers = hard_numbers().to(device)
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % parts[:, 0, 1].numel()))
    for some in numbers.split(parts[:, 0, 1].numel()):
        for head in range(KV_HEADS):
            for place, each in ((1, some), (2, some.flip(0))):
                parts[:, head, place] = each.view_as(parts[:, 0, 1])
        case.attend(kernel)
        assert case.scales is not None
        for cache, place, scale in zip(case.cache, (1, 2), case.scales, strict=True):
            found = cache.flatten(0, 1).view(torch.uint8)[case.mapping].int()
            meant = encode(parts[:, :, place], scale).view(torch.uint8).int()
            assert torch.equal(unsigned_nan(found), unsigned_nan(meant))


def unsigned_nan(kept: Tensor) -> Tensor:
    return torch.where(kept & 0x7F == 0x7F, 0x7F, kept)


@on_both("window", gpu=[(1,), (2,)], small=[(1,), (2,)])
def test_powers_of_two_change_no_bit(device: torch.device, window: int) -> None:
    """Keys are 2^50 times smaller, queries as many times larger, and values 2^30 times: float16 has
    no room for such queries."""
    rows = [Row(n, window) for n in (0, 14, 40)]
    plain = WindowCase(device, (64, 3, 16, False, False), window, rows, e4m3=True)
    moved = WindowCase(device, (64, 3, 16, False, False), window, rows, e4m3=True)
    assert plain.scales is not None and moved.scales is not None
    moved.scales *= torch.tensor([[2.0**-50], [2.0**30]], device=device)
    parts = parts_of(moved)
    parts[:, :, :3] *= 2.0**50
    parts[:, :, 3] *= 2.0**-50
    parts[:, :, 4] *= 2.0**30
    wanted = plain.attend(plain.kernel(1, 2048))
    found = moved.attend(moved.kernel(1, 2048))
    assert torch.equal(found, wanted * 2.0**30) and wanted.isfinite().all()
    assert torch.equal(bits(moved.cache), bits(plain.cache))
    assert len(wanted.unique()) > 100


@on_both(
    *("window", "byte", "which"),
    gpu=[(w, byte, which) for w in (1, 3) for byte in (0x7F, 0xFF) for which in (0, 1)],
    small=[(1, 0x7F, 1), (3, 0xFF, 0)],
)
def test_a_kept_nan_is_one(device: torch.device, window: int, byte: int, which: int) -> None:
    """It is no large number, and others' rows and heads do not see it."""
    rows = [Row(20, window), Row(40, window), Row(3, window)]
    case = WindowCase(device, (64, 2, 16, False, True), window, rows, e4m3=True)
    kernel = case.kernel(1, 2048)
    first = case.attend(kernel)
    block = case.table[case.slots[window], 1]
    case.cache.view(torch.uint8)[which, block, 5, 0, 7] = byte
    again = case.attend(kernel)
    theirs = torch.zeros_like(again, dtype=torch.bool)
    theirs[window : 2 * window, :2, slice(None) if which == 0 else slice(7, 8)] = True
    assert again[theirs].isnan().all()
    assert torch.equal(again[~theirs], first[~theirs])


@on_both("window", gpu=[(1,), (2,)], small=[(2,)])
def test_an_infinite_value_is_kept_as_the_largest(device: torch.device, window: int) -> None:
    case = WindowCase(device, PLAIN, window, [Row(9, window)], e4m3=True)
    parts_of(case)[0, 1, 2, 3] = -math.inf
    wanted, cache = case.wanted()
    out = case.attend(case.kernel(1, 2048))
    assert relative_error(out, wanted) < CLOSE and out.isfinite().all()
    assert torch.equal(bits(case.cache)[:, case.table[1]], bits(cache)[:, case.table[1]])


@on_both("limits", gpu=[({},), ({"window": 17},)], small=[({},)])
def test_a_models_own_forward_takes_its_layers_scales_to_the_kernel(
    device: torch.device, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        emulator.install(monkeypatch, sm_count=2)
        monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    case = WindowCase(device, WIDE_SMALL, 2, rows_of(2, [0, 9, 33]), limits=limits, e4m3=True)
    context = new_batch(
        params_dtype=torch.bfloat16, num_layers=2, kv_channels=32, num_attention_heads=2,
        max_sequence_length=case.capacity, block_count=1, block_size_tokens=16, device=device,
        num_speculative_tokens=1, kept=E4M3,
    )  # fmt: skip
    context.block_table = case.table
    cache = torch.stack((case.cache.view(torch.uint8),) * 2).view(E4M3)
    context.take_cache(cache)
    assert context.scales is not None and case.scales is not None
    context.scales[1] = case.scales
    metadata = AttentionMetadata(
        case.positions, case.slots, case.mapping, len(case.packed), case.positions + 1, window=2
    )
    context.begin(metadata)
    given = case.packed, case.cos_sin, None, None
    assert context.attention.heads_of_decode(context.metadata, *given, limits) == case.heads
    before = cache[0].view(torch.uint8).clone()
    out = context.attend_packed(1, case.packed, case.scale, case.cos_sin, None, None, 0.0, **limits)
    wanted = case.wanted_over(cache[1])
    assert relative_error(out[case.counted], wanted[case.counted]) < CLOSE
    assert torch.equal(cache[0].view(torch.uint8), before), "another layer's"


def test_a_cache_of_another_dtype_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda index: None)
    packed = torch.zeros(1, 2 * 3 * 32).bfloat16()
    shape = (1, 2, 3, 16, 2, 32)
    for dtype, e4m3 in ((torch.bfloat16, False), (E4M3, True)):
        heads = heads_of(packed, torch.zeros(shape).to(dtype), None, None, None)
        assert heads is not None and heads.e4m3 == e4m3
    for dtype in (torch.float16, torch.float8_e5m2):
        assert heads_of(packed, torch.zeros(shape).to(dtype), None, None, None) is None


def test_a_tile_of_bytes_takes_as_much_memory_as_two_of_bfloat16() -> None:
    plain = Heads(128, 4, 8, 64, norm=False, rope=True)
    macros = [heads.defines(8, 8192, 132) for heads in (plain, plain._replace(e4m3=True))]
    assert macros[1] == {**macros[0], "E4M3": 1, "ST": 4}, "nothing else differs"
    least = [decode_attention.shared_bytes({**each, "MIN_SHARED": 0}) for each in macros]
    assert least[0] - 2 * 128 <= least[1] <= least[0]


@emulated
@pytest.mark.sweep
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("permute(kept[n % 2], 0x3120)", "kept[n % 2]"),
        ("return i / 16 * 16 + i / 2 % 2 * 8 + i / 4 % 4 * 2 + i % 2;", "return i;"),
        ("#define FIRST_OF(g) (2 * (g))", "#define FIRST_OF(g) (g)"),
        ("factor * __uint_as_float((exponent - 14) << 23)", "factor"),
        ("scale_log2 * key_scale", "scale_log2"),
        ("#define VALUE_FACTOR value_factor", "#define VALUE_FACTOR 1.f"),
        (
            "value_factor = 1.f / scales[KV_HEADS + item.head]",
            "value_factor = 1.f / scales[KV_HEADS]",
        ),
        ("ROW_BYTES < 128 ? row / 2 & 3 : row & 7", "row & 7"),
    ],
)
def test_the_emulator_notices(
    there: str, instead: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That these tests can fail."""
    text = emulator.source_text("attention")
    assert there in text
    emulator.install(monkeypatch, sm_count=1)
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    build = emulator.EmulatedKernel
    monkeypatch.setattr(decode_attention, "kernel", lambda source, macros, _: build(source, macros))
    case = WindowCase(
        torch.device("cpu"), (64, 3, 16, True, True), window, rows_of(window, [14, 40]), e4m3=True
    )
    out = case.attend(case.kernel(1, 2048))
    wanted = case.wanted_over(case.cache)
    assert not relative_error(out[case.counted], wanted[case.counted]) < 2 * CLOSE
