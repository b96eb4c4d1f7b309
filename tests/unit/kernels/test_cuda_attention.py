"""The attention and the embedding of the fused decode forward against float64."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention
from megatron_async.kernels.gemm.skinny_gemm import statistics_of
from megatron_async.kernels.gemm.tile_config import LAYER_NORM, RMS_NORM, SHARED_BYTES
from megatron_async.kernels.norm.embed import Embed
from tests.support import emulator
from tests.support.cuda_kernels import LIMIT, device, emulated, on_both, relative_error
from tests.support.window_cases import KV_HEADS, Row, WindowCase, bits

pytestmark = pytest.mark.sweep

__all__ = ["device"]


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((72, 4, 64, 72), "head dimension"),
        ((16, 4, 64, 16), "head dimension"),
        ((128, 32, 64, 128), "share a KV head"),
        ((128, 4, 24, 128), "block size"),
        ((128, 4, 64, 64), "rotated"),
    ],
)
def test_attention_says_what_it_does_not_take(shape: tuple[int, ...], word: str) -> None:
    reason = decode_attention.unsupported(*shape)
    assert reason is not None and word in reason


@emulated
def test_every_shape_fits_into_shared_memory() -> None:
    shapes = list(itertools.product(range(32, 257, 16), range(1, 17), (1, 2, 4, 8)))
    assert all(decode_attention.unsupported(d, group, 16, d) is None for d, group, _ in shapes)
    defines = [
        decode_attention.Heads(head_dim, group, 8, 16, norm=True, rope=True).defines(
            rows, capacity, emulator.SM_COUNT, cluster=cluster
        )
        for head_dim, group, cluster in shapes
        for rows, capacity in ((32, 131072), (decode_attention.MOST_ROWS, 1 << 20))
    ]
    few = [
        decode_attention.Heads(head_dim, group, 2, 16, norm=True, rope=True).defines(1, 4096, 132)
        for head_dim, group in itertools.product((32, 64, 96, 128, 256), (1, 4, 8, 16))
    ]
    assert {each["WARPS"] for each in few} == {2, 4, decode_attention.WARPS_OF_FEW}
    assert max(emulator.shared_bytes("attention", defines + few)) <= SHARED_BYTES


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
_MANY_SPLITS = [700, 650, 1000, 500, 64, 1, 0, 900]
"""More KV splits, of 128 tokens, than clusters of eight blocks."""
_WIDE = [(37 * row) % 61 for row in range(40)]
_WIDE_SPLITS = [0, 300, *_WIDE[:35], 130, 16]
_VERY_WIDE = [(37 * row) % 611 for row in range(150)]


@on_both(
    *("shape", "cluster", "split_tokens", "lengths"),
    gpu=(
        (shape, cluster, split_tokens, lengths)
        for shape in _ATTENTIONS
        for cluster, split_tokens, lengths in (
            *((cluster, 2048, _LENGTHS) for cluster in (1, 2, 8)),
            *((1, 128, _LENGTHS), (2, 32, _LENGTHS), (4, 16, _LENGTHS), (8, 16, _MANY_SPLITS)),
            *((1, 8192, _VERY_WIDE), (1, 64, _WIDE_SPLITS), (2, 128, _VERY_WIDE)),
            *((8, 8192, [length]) for length in (0, 16, 130, 1000)),
            *((8, 8192, [700, 0]), (8, 64, [1023]), (1, 8192, [5, 300])),
        )
    ),
    small=[
        ((64, 2, 16, True, True), 1, 2048, [0, 1, 15, 17, 200]),
        ((96, 3, 32, True, True), 2, 2048, [0, 16, 63, 150]),
        ((64, 12, 64, False, False), 1, 64, [64, 0, 33, 129, 65]),
        ((128, 4, 16, False, True), 4, 16, [0, 31, 64, 65, 330]),
        ((32, 1, 16, True, True), 1, 16, [1016, 0, 511, 16, 15, 17]),
        ((32, 3, 16, False, True), 8, 16, _MANY_SPLITS),
        ((32, 2, 16, True, True), 1, 2048, _WIDE),
        ((32, 1, 16, False, True), 2, 16, _WIDE_SPLITS),
        ((64, 2, 16, True, True), 4, 2048, [300]),
    ],
)
class TestAttention:
    def test_equals_float64(
        self,
        device: torch.device,
        shape: tuple[int, int, int, bool, bool],
        cluster: int,
        split_tokens: int,
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
            heads, rows, columns * block_size, device, cluster=cluster, split_tokens=split_tokens
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


_TILES = [0, 1, 15, 16, 17, 33, 48, 49, 64, 80, 130]
"""Tokens of none to several tiles of a warp, more and fewer than its ring has."""


def _ragged(rows: int, window: int, *, gaps: bool = False, most: int = 300) -> list[Row]:
    """Rows whose numbers of tiles follow each other in any order, a few long ones, and padding."""
    drawn = random.Random(rows + window)
    lengths = [drawn.choice(_TILES) for _ in range(rows - 2)] + [most, most // 2 + 1]
    drawn.shuffle(lengths)
    made = [Row(0, 0), Row(7, 1, gap=1)] if gaps else [Row(0, 0)]
    for length in lengths:
        gap = drawn.randrange(window) if gaps else 0
        made.append(Row(length, drawn.randrange(1, window - gap + 1), gap=gap))
    return [*made, Row(most, 0)]


def _sms_of_many(rows: list[Row]) -> int:
    """SMs of a GPU with CTAs for most items, of the warps that CTAs of several items have."""
    return 4 * len(rows) * KV_HEADS - 1


def _bits_of_items(
    case: WindowCase, split_tokens: int, sm_count: int, patch: Callable[..., None]
) -> list[torch.Tensor]:
    """What two launches on a GPU of so many SMs write, one after the other."""
    patch(cuda, "sm_count", lambda index: sm_count)
    kernel, before, written = case.kernel(1, split_tokens), case.cache.clone(), []
    for _ in range(2):
        out = case.attend(kernel)[case.counted]
        written += [out, bits(case.cache).flatten(1, 2)[:, case.mapping[case.counted]]]
        case.cache.copy_(before)
    assert not kernel.workspace[2].any(), "what one launch counts is gone"
    return written


@on_both(
    *("shape", "window", "split_tokens", "rows", "limits", "e4m3"),
    gpu=[
        (shape, window, split_tokens, _ragged(rows, window, gaps=gaps, most=1500), limits, e4m3)
        for n, shape in enumerate(
            [
                (128, 4, 64, False, True),
                (64, 8, 16, True, True),
                (256, 8, 16, False, True),
                (96, 3, 32, True, True),
                (160, 9, 16, False, True),
                (128, 8, 64, False, True),
            ]
        )
        for window, gaps in ((1, False), (2, False), (4, True))
        for rows, split_tokens in ((40, 1024), (120, 64), (300, 1024))
        for limits in [({}, {"window": 40}, {"sinks": True}, {"soft_cap": 0.7})[(n + window) % 4]]
        for e4m3 in (False, True)
    ],
    small=[
        ((32, 2, 16, True, True), 1, 64, _ragged(70, 1), {}, False),
        ((64, 4, 16, False, True), 1, 1024, _ragged(33, 1), {}, True),
        ((64, 8, 16, False, True), 1, 16, _ragged(40, 1), {"window": 40, "sinks": True}, False),
        ((160, 9, 16, False, True), 1, 1024, _ragged(33, 1, most=130), {}, False),
        ((32, 2, 16, True, True), 2, 64, _ragged(36, 2), {"soft_cap": 0.7}, False),
        ((32, 3, 16, False, True), 3, 1024, _ragged(34, 3, gaps=True), {}, True),
        ((80, 8, 16, False, False), 4, 1024, _ragged(33, 4, most=130), {"window": 17}, False),
    ],
)
def test_an_item_has_the_same_bits_behind_any_other(
    device: torch.device,
    shape: tuple[int, int, int, bool, bool],
    window: int,
    split_tokens: int,
    rows: list[Row],
    limits: dict[str, Any],
    e4m3: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of the next item are in the ring while one is attended to, whose number of tiles is any
    other: two CTAs take all items one after the other, or each takes one."""
    case = WindowCase(device, shape, window, rows, limits=limits, e4m3=e4m3)
    alone = _bits_of_items(case, split_tokens, _sms_of_many(rows), monkeypatch.setattr)
    for sm_count in (1, 7):
        behind = _bits_of_items(case, split_tokens, sm_count, monkeypatch.setattr)
        for found, meant in zip(behind, alone, strict=True):
            assert torch.equal(found, meant)
    assert torch.equal(alone[0], alone[2]) and torch.equal(alone[1], alone[3])
    if not e4m3:
        wanted = case.wanted()[0][case.counted]
        assert relative_error(alone[0], wanted) < LIMIT


@emulated
@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("const int count = max(item.count, ST);", "const int count = item.count;"),
        ("if (ahead == 0) blocks = next_blocks;", ""),
        ("if (ahead < next.count) issue(next, ahead);", ""),
        ("= 2 * gridDim.x + taken;", "= 3 * gridDim.x + taken;"),
        ("items - min((int)gridDim.x, items) - 1", "items - 1"),
        ("      token = token_of(item);\n", ""),
    ],
)
def test_the_emulator_notices_what_an_item_leaves_wrong(
    there: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test above can fail."""
    case = WindowCase(torch.device("cpu"), (32, 2, 16, False, True), 1, _ragged(36, 1))
    emulator.install(monkeypatch)
    alone = _bits_of_items(case, 64, _sms_of_many(case.rows), monkeypatch.setattr)
    text = emulator.source_text("attention")
    assert text.count(there) == 1
    monkeypatch.setattr(emulator, "source_text", lambda _: text.replace(there, instead))
    build = emulator.EmulatedKernel
    monkeypatch.setattr(decode_attention, "kernel", lambda source, macros, _: build(source, macros))
    try:
        behind = _bits_of_items(case, 64, 1, monkeypatch.setattr)
    except AssertionError:
        return
    assert not all(torch.equal(*each) for each in zip(behind, alone, strict=True))


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
    embed = Embed(hidden, per_tile, norm, positions=learned, device=device)
    weight = torch.randn(hidden, generator=generator, device=device).bfloat16()
    scaled = torch.full_like(out, float("nan")) if norm == RMS_NORM else None
    embed(
        tokens, places, table, positions if learned else None, out, statistics,
        None if scaled is None else (weight, scaled),
    )  # fmt: skip
    wanted = table[tokens].float()
    if learned:
        wanted += positions[places].float()
    assert torch.equal(out, wanted.bfloat16())
    assert scaled is None or torch.equal(scaled, out * weight)
    expected = statistics_of(out, norm, per_tile)
    if norm == RMS_NORM:
        statistics, expected = statistics[..., 1], expected[..., 1]
    assert relative_error(statistics, expected.double()) < 1e-5
