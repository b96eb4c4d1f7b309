"""Which tile configs the GEMMs of the fused decode forward take."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest

from megatron_async.kernels.gemm import tile_choice
from megatron_async.kernels.gemm.skinny_gemm import defines
from megatron_async.kernels.gemm.tile_choice import (
    FALLBACK_ROWS,
    candidates,
    choose,
    find,
    heuristic_config,
)
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
    BUILT_IN,
    GELU_TANH,
    HEURISTIC,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SHARED_BYTES,
    SILU_GATE,
    STORE,
    Entry,
    GemmProblem,
    TileConfig,
    format_table,
    lookup,
    measured,
    padded,
)
from megatron_async.kernels.gemm.untuned.ranking import ranked
from megatron_async.kernels.gemm.untuned.search import known_configs
from tests.support import emulator
from tests.support.cuda_kernels import emulated
from tests.support.known_gemms import GEMMS

SMS = 132
UNKNOWN_SHAPES = (
    *((384, 128), (4608, 3584), (3584, 18944), (37888, 3584), (152064, 3584), (50272, 4096)),
    *((1003, 192), (5120, 8192), (96, 32)),
)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rows", "digest"),
    [
        (1, "c44133f8b9a67a84"),
        (2, "435c07f64bfe2855"),
        (4, "f705a7801e707c52"),
        (8, "34e3c2a90ec77068"),
        (16, "23ff309bf4c691de"),
        (32, "60e0c0d21b58cf0d"),
        (48, "62132243412e181d"),
        (64, "62132243412e181d"),
    ],
)
def test_choices_are_those_that_were_measured_with(rows: int, digest: str) -> None:
    """On 132 SMs, of all measured shapes and some others, with and without TMA. A change here is a
    change of speed, and of how sums round: measure first."""
    known = sorted({(problem.n, problem.k) for problem in measured()})
    cases = [*itertools.product(known, (RMS_NORM,), range(5), (False, True))]
    cases += itertools.product(UNKNOWN_SHAPES, range(3), range(3), (False, True))
    lines = []
    for (n, k), norm, epilogue, tma in cases:
        config = choose(n, k, rows, norm, epilogue, tma, sm_count=SMS)
        assert config is None or rows > ANY_SHAPE_ROWS or config.multicast == 0
        numbers = None if config is None else [int(value) for value in config[:9]]
        if config is not None and config.multicast:
            numbers = [*map(int, config)]
        lines.append(f"{n} {k} {norm} {epilogue} {int(tma)} {numbers}")
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("sm_count", [78, 114, 160])
def test_other_gpus_are_filled_too(sm_count: int) -> None:
    for (n, k), rows in itertools.product(((4608, 3584), (3584, 18944), (37888, 3584)), (1, 8, 32)):
        config = heuristic_config(n, k, rows, RMS_NORM, STORE, sm_count=sm_count)
        assert config is not None
        waves = config.ctas(n) / sm_count
        assert config.persistent or 0.6 < waves < 2.3, (n, k, rows, config)
    macros = [
        defines(1024, 1024, 8, NO_NORM, STORE, RMS_NORM, TileConfig(1, 1, 4, 1, 4), sms)
        for sms in (64, 80, 132)
    ]
    alone = [macro["MIN_SHARED"] > 0 for macro in macros]
    assert alone == [True, True, False], "64 CTAs, on 64 to 84 SMs one each"


def test_the_built_in_table_is_in_the_format_that_tune_writes() -> None:
    assert format_table({"NVIDIA H200": list(measured().values())}) == BUILT_IN.read_text()
    assert {entry.source for entry in measured().values()} == {"measured"}


def test_entries_say_where_they_come_from() -> None:
    found = find(GemmProblem(8, 4096, 4096, NO_NORM, ADD), sm_count=SMS)
    assert found is not None and found.source == "measured"
    assert found == measured()[GemmProblem(8, 4096, 4096)]
    problem = GemmProblem(8, 4608, 3584, RMS_NORM, STORE)
    found = find(problem, sm_count=SMS)
    assert found is not None and (found.source, found.problem) == ("heuristic", problem)
    many = find(problem._replace(rows=64), sm_count=SMS)
    assert many is not None and many.source == "heuristic" and many.config.multicast
    assert find(problem._replace(rows=64, norm=LAYER_NORM), sm_count=SMS) is None
    assert find(problem._replace(rows=64), False, sm_count=SMS) is None


def test_known_configs_are_those_of_all_rows() -> None:
    found = known_configs(28672, 4096)
    assert TileConfig(1, 14, 1, 1, 5) in found and len(set(found)) == len(found) > 3


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
def test_every_shape_has_a_config_that_fits(
    n: int, k: int, norm: int, epilogue: int, rows: int
) -> None:
    most = padded(rows)
    assert rows <= most < 2 * rows
    config = choose(n, k, most, norm, epilogue, sm_count=SMS)
    assert config is not None
    assert config.fits(n, k, most, norm, epilogue)


@emulated
def test_configs_of_many_models_fit_into_shared_memory() -> None:
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
    several: dict[str, list[dict[str, int]]] = {}
    for hidden, width, heads, kv_heads, head_dim, vocabulary, gated in models:
        norm = RMS_NORM if gated else LAYER_NORM
        gemms = [
            ((heads + 2 * kv_heads) * head_dim, hidden, norm, STORE),
            (hidden, heads * head_dim, NO_NORM, ADD),
            (width * (1 + gated), hidden, norm, SILU_GATE if gated else GELU_TANH),
            (hidden, width, NO_NORM, ADD),
            (vocabulary, hidden, norm, STORE),
        ]
        for (n, k, of, epilogue), (rows, tma) in itertools.product(
            gemms, ((1, True), (4, False), (8, True), (16, False), (32, False), (32, True))
        ):
            config = choose(n, k, rows, of, epilogue, tma, sm_count=SMS)
            assert config is not None
            macros = defines(n, k, rows, of, epilogue, norm, config, SMS)
            several.setdefault(config.kernel, []).append(macros)
    assert len(several) == 2
    for kernel, macros_of_all in several.items():
        assert max(emulator.shared_bytes(kernel, macros_of_all)) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("n", "k", "rows", "epilogue", "takes_tma"),
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
def test_unknown_shapes_take_balanced_tma_configs_where_these_did_well(
    n: int, k: int, rows: int, epilogue: int, takes_tma: bool
) -> None:
    """By the heuristic for weights that the ranking was not fitted to."""
    shape = (n, k, padded(rows), RMS_NORM if epilogue != ADD else NO_NORM, epilogue)
    config = heuristic_config(*shape, sm_count=SMS)
    assert config is not None and config.tma == takes_tma
    if takes_tma:
        ctas = config.ctas(n)
        slots = SMS * (2 if config.persistent else 1)
        assert ctas / slots / math.ceil(ctas / slots) > 0.8
        assert config.stages >= 3
    by_mma = heuristic_config(*shape, False, sm_count=SMS)
    assert by_mma is not None and not by_mma.tma
    with_mean = heuristic_config(n, k, padded(rows), LAYER_NORM, epilogue, sm_count=SMS)
    assert with_mean is not None and not with_mean.tma, "the wgmma kernel knows no means"


def test_small_tiles_are_not_persistent() -> None:
    # 2 x 16 rows at a time would be even, and took four layers 126 to 138 us more than 16 x 16.
    for rows in (1, 8, 16, 32):
        shape = (37888, 3584, rows, RMS_NORM, SILU_GATE)
        assert heuristic_config(*shape, sm_count=SMS) == TileConfig(
            16, 1, 1, 1, 3, stream_x=True, tma=True
        )
        chosen = choose(*shape, sm_count=SMS)
        assert chosen is not None and not chosen.persistent and chosen.weight_rows >= 96
    head = choose(152064, 3584, 32, RMS_NORM, STORE, sm_count=SMS)
    assert head is not None and head.weight_rows >= 128


@pytest.mark.parametrize(
    ("problem", "first"),
    [
        (GemmProblem(8, 5120, 13824, NO_NORM, ADD), True),
        (GemmProblem(32, 27648, 5120, RMS_NORM, SILU_GATE), True),
        (GemmProblem(8, 5120, 13824, NO_NORM, ADD, 128), False),
        (GemmProblem(8, 1280, 1280, NO_NORM, STORE), False),
    ],
    ids=str,
)
def test_large_bfloat16_weights_take_what_is_ranked_first(
    problem: GemmProblem, first: bool
) -> None:
    entry = find(problem, sm_count=SMS)
    assert entry is not None and entry.source == "heuristic"
    rows, n, k, norm, epilogue, columns, _ = problem
    assert norm is not None and epilogue is not None
    by_rank = ranked(problem, tma=True, sm_count=SMS)[0]
    estimate = heuristic_config(n, k, rows, norm, epilogue, sm_count=SMS, scale_columns=columns)
    assert by_rank != estimate and entry.config == (by_rank if first else estimate)
    if first:
        without = find(problem, False, sm_count=SMS)
        assert without is not None and not without.config.tma


def test_a_weight_too_narrow_for_the_kernel_has_no_config() -> None:
    assert list(candidates(256, 32, 1, NO_NORM, STORE, sm_count=SMS)) == []


ROWS = sorted({problem.rows for problem in measured()})


def entry_of(rows: int, n: int, k: int) -> Entry | None:
    """What the table has for a GEMM of a known model."""
    _, _, norm, epilogue, _ = GEMMS[n, k]
    return lookup(measured(), GemmProblem(rows, n, k, norm, epilogue))


def shapes_at(rows: int) -> set[tuple[int, int]]:
    return {(problem.n, problem.k) for problem in measured() if problem.rows == rows}


@pytest.mark.parametrize("rows", ROWS)
def test_measured_configs_are_chosen_where_they_can_be_built(rows: int) -> None:
    assert shapes_at(rows) <= shapes_at(FALLBACK_ROWS[rows][-1])
    for n, k in shapes_at(rows):
        _, _, norm, epilogue, _ = GEMMS[n, k]
        entry = entry_of(rows, n, k)
        if entry is None:
            continue  # it has another GEMM of this shape
        config = entry.config
        assert choose(n, k, rows, norm, epilogue, sm_count=SMS) == config
        other = choose(n, k, rows, norm, epilogue, False, sm_count=SMS)
        if rows > ANY_SHAPE_ROWS:
            assert other is None
            continue
        assert other is not None and not other.tma
        assert (other == config) == (not config.tma)


@pytest.mark.parametrize("rows", list(FALLBACK_ROWS))
def test_every_measured_shape_has_the_first_config_that_fits(rows: int) -> None:
    likes = FALLBACK_ROWS[rows]
    assert likes[0] == rows or rows not in ROWS
    shapes = set().union(*(shapes_at(like) for like in likes))
    assert shapes == shapes_at(likes[-1])
    for n, k in shapes:
        _, _, norm, epilogue, _ = GEMMS[n, k]
        entries = [entry_of(like, n, k) for like in likes]
        fitting = [e.config for e in entries if e and e.config.fits(n, k, rows, norm, epilogue)]
        if fitting:
            assert choose(n, k, rows, norm, epilogue, sm_count=SMS) == fitting[0]


@pytest.mark.parametrize(
    ("like", "n", "k"),
    [(like, *shape) for like in (4, 8, 16, 48) for shape in sorted(shapes_at(like))],
)
def test_no_entry_stands_where_it_would_be_chosen_anyway(
    like: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, norm, epilogue, _ = GEMMS[n, k]
    users = [rows for rows, likes in FALLBACK_ROWS.items() if like in likes]
    chosen = [choose(n, k, rows, norm, epilogue, sm_count=SMS) for rows in users]
    entry = entry_of(like, n, k)
    if entry is None:
        pytest.skip("the entry is for another GEMM of this shape")
    others = {problem: each for problem, each in measured().items() if each is not entry}
    assert len(others) == len(measured()) - 1
    monkeypatch.setattr(tile_choice, "measured", lambda: others)
    without = choose.__wrapped__
    assert [without(n, k, rows, norm, epilogue, sm_count=SMS) for rows in users] != chosen


@pytest.mark.parametrize("scale_columns", [0, 128, 4096])
@pytest.mark.parametrize("e4m3_inputs", [False, True])
def test_more_rows_than_a_kernel_takes_have_no_config(
    scale_columns: int, e4m3_inputs: bool
) -> None:
    """With bfloat16 alone 128 rows have one."""
    for rows in (72, 192, 256, 512, *((128,) if scale_columns or e4m3_inputs else ())):
        assert choose(
            6144, 4096, rows, 0, 0, sm_count=132, scale_columns=scale_columns,
            e4m3_inputs=e4m3_inputs,
        ) is None  # fmt: skip


@pytest.mark.parametrize("rows", [16, 32, 48, 64])
@pytest.mark.parametrize(("n", "k", "norm", "epilogue"), [
    (24576, 4096, RMS_NORM, SILU_GATE), (4096, 12288, NO_NORM, ADD), (5120, 5120, NO_NORM, ADD),
    (7168, 5120, RMS_NORM, STORE),
])  # fmt: skip
def test_many_rows_of_e4m3_weights_that_nobody_measured_take_wgmma(
    rows: int, n: int, k: int, norm: int, epilogue: int
) -> None:
    """With mma the GEMMs of a layer of Llama-8B took 43 us longer at 32 rows, and 102 at 64."""
    problem = GemmProblem(rows, n, k, norm, epilogue, k)
    found = find(problem, sm_count=SMS)
    assert found is not None and found.source == HEURISTIC and found.config.can_serve(problem)
    assert found.config.tma == (rows >= 32)
    without = find(problem, False, sm_count=SMS)
    assert without is not None and not without.config.tma
    of_blocks = find(problem._replace(scale_columns=128), sm_count=SMS)
    assert of_blocks is not None and not of_blocks.config.tma
