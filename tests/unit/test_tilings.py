"""How the products of the fused decode forward are cut up."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron_async.kernels.gemm import tilings
from megatron_async.kernels.gemm.estimated_tilings import candidates
from megatron_async.kernels.gemm.measured_tilings import LIKE, MEASURED, choose
from megatron_async.kernels.gemm.skinny_gemm import defines
from megatron_async.kernels.gemm.tilings import (
    ADD,
    GELU_TANH,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    Tiling,
    padded,
)
from tests.support import emulator
from tests.support.cuda_kernels import emulated
from tests.support.known_products import PRODUCTS


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
        (50272, 4096, LAYER_NORM, STORE),
        (256000, 6144, LAYER_NORM, STORE),
        (50257, 12288, LAYER_NORM, STORE),
        (384, 128, RMS_NORM, STORE),
        (256, 256, NO_NORM, ADD),
    ],
)
def test_every_shape_has_a_tiling_that_fits(
    n: int, k: int, norm: int, epilogue: int, rows: int
) -> None:
    most = padded(rows)
    assert rows <= most < 2 * rows
    tiling = choose(n, k, most, norm, epilogue)
    assert tiling is not None
    assert tiling.fits(n, k, most, norm, epilogue)


@emulated
def test_tilings_of_many_models_fit_into_shared_memory() -> None:
    models = [  # hidden and MLP width, query and KV heads, head dimension, vocabulary, gated
        (128, 256, 4, 2, 32, 1003, True),
        (576, 1536, 9, 3, 64, 49152, True),
        (768, 3072, 12, 12, 64, 50257, False),
        (896, 4864, 14, 2, 64, 151936, True),
        (1600, 6400, 25, 25, 64, 50257, False),
        (2048, 16384, 8, 1, 256, 256000, True),
        (3072, 8192, 32, 32, 96, 32064, True),
        (3584, 18944, 28, 4, 128, 152064, True),
        (4096, 14336, 32, 8, 128, 128256, True),
        (5120, 13824, 40, 40, 128, 32000, True),
        (8192, 28672, 64, 8, 128, 128256, True),
        (16384, 53248, 128, 8, 128, 128256, True),
        (6144, 24576, 48, 4, 128, 256000, False),
    ]
    several = []
    for hidden, width, heads, kv_heads, head_dim, vocabulary, gated in models:
        norm = RMS_NORM if gated else LAYER_NORM
        products = [
            ((heads + 2 * kv_heads) * head_dim, hidden, norm, STORE),
            (hidden, heads * head_dim, NO_NORM, ADD),
            (width * (1 + gated), hidden, norm, SILU_GATE if gated else GELU_TANH),
            (hidden, width, NO_NORM, ADD),
            (vocabulary, hidden, norm, STORE),
        ]
        for (n, k, of, epilogue), rows, boxes in itertools.product(
            products, (1, 2, 4, 8, 16, 32), (False, True)
        ):
            tiling = choose(n, k, rows, of, epilogue, boxes)
            assert tiling is not None
            several.append(defines(n, k, rows, of, epilogue, norm, tiling))
    assert max(emulator.shared_bytes("linear", several)) <= tilings.SHARED_BYTES


@pytest.mark.parametrize(
    ("n", "k", "rows", "epilogue", "is_box"),
    [
        (4608, 3584, 32, STORE, True),
        (3584, 3584, 17, ADD, True),
        (3584, 3584, 16, ADD, False),
        (3584, 18944, 32, ADD, False),
        (28672, 5120, 16, SILU_GATE, True),
        (152064, 3584, 13, STORE, True),
        (4608, 3584, 16, STORE, False),
        (28672, 5120, 8, SILU_GATE, True),
        (152064, 3584, 1, STORE, True),
        (3584, 18944, 1, ADD, False),
        (4608, 3584, 1, STORE, False),
    ],
)
def test_unknown_shapes_are_cut_into_even_boxes_where_these_did_well(
    n: int, k: int, rows: int, epilogue: int, is_box: bool
) -> None:
    shape = (n, k, padded(rows), RMS_NORM if epilogue != ADD else NO_NORM, epilogue)
    tiling = choose(*shape)
    assert tiling is not None and tiling.box == is_box
    if is_box:
        blocks = tiling.blocks(n)
        slots = tilings.MULTIPROCESSORS * (2 if tiling.persistent else 1)
        assert blocks / slots / math.ceil(blocks / slots) > 0.8
        assert tiling.stages >= 3
    by_lanes = choose(*shape, boxes=False)
    assert by_lanes is not None and not by_lanes.box
    with_mean = choose(n, k, padded(rows), LAYER_NORM, epilogue)
    assert with_mean is not None and not with_mean.box, "boxes know no means"


def test_small_blocks_do_not_go_on_and_on() -> None:
    # 2 x 16 rows at a time would be even, and took four layers 126 to 138 us more than 16 x 16.
    for rows in (1, 8, 16, 32):
        assert choose(37888, 3584, rows, RMS_NORM, SILU_GATE) == Tiling(
            16, 1, 1, 1, 3, stream=True, box=True
        )
    head = choose(152064, 3584, 32, RMS_NORM, STORE)
    assert head is not None and head.persistent and head.row_tiles >= 8


def test_a_weight_too_narrow_for_the_kernel_has_no_tiling() -> None:
    assert list(candidates(256, 32, 1, NO_NORM, STORE)) == []


@pytest.mark.parametrize("rows", list(MEASURED))
def test_measured_tilings_are_chosen_where_they_can_be_built(rows: int) -> None:
    assert MEASURED[rows].keys() <= MEASURED[LIKE[rows][-1]].keys()
    for (n, k), tiling in MEASURED[rows].items():
        _, _, norm, epilogue, _ = PRODUCTS[n, k]
        assert choose(n, k, rows, norm, epilogue) == tiling
        other = choose(n, k, rows, norm, epilogue, boxes=False)
        if rows > tilings.ANY_SHAPE_ROWS:
            assert other is None
            continue
        assert other is not None and not other.box
        assert (other == tiling) == (not tiling.box)


@pytest.mark.parametrize("rows", list(LIKE))
def test_every_measured_shape_has_the_first_tiling_that_fits(rows: int) -> None:
    likes = LIKE[rows]
    assert likes[0] == rows or rows not in MEASURED
    shapes = set().union(*(MEASURED[like] for like in likes))
    assert shapes == MEASURED[likes[-1]].keys()
    for n, k in shapes:
        _, _, norm, epilogue, _ = PRODUCTS[n, k]
        known = [MEASURED[like].get((n, k)) for like in likes]
        fitting = [tiling for tiling in known if tiling and tiling.fits(n, k, rows, norm, epilogue)]
        assert choose(n, k, rows, norm, epilogue) == fitting[0]


@pytest.mark.parametrize(
    ("like", "n", "k"),
    [(like, *shape) for like in (4, 8, 16, 48) for shape in MEASURED[like]],
)
def test_no_tiling_stands_where_it_would_be_chosen_anyway(
    like: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, norm, epilogue, _ = PRODUCTS[n, k]
    users = [rows for rows, likes in LIKE.items() if like in likes]
    chosen = [choose(n, k, rows, norm, epilogue) for rows in users]
    monkeypatch.delitem(MEASURED[like], (n, k))
    without = choose.__wrapped__
    assert [without(n, k, rows, norm, epilogue) for rows in users] != chosen
