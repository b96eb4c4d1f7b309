"""The estimate of a tile config's time, and the ranking by it."""

from __future__ import annotations

import math

import pytest

from megatron_async.kernels.gemm.tile_config import (
    ADD,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    SHARED_BYTES,
    SILU_GATE,
    STORE,
    GemmProblem,
    TileConfig,
)
from megatron_async.kernels.gemm.untuned.ranking import (
    CONSTANTS,
    estimated_us,
    load_of,
    ranked,
    short_ranking,
)

SMS = 132
PROBLEMS = [
    GemmProblem(1, 7168, 5120, RMS_NORM, STORE),
    GemmProblem(8, 5120, 13824, NO_NORM, ADD),
    GemmProblem(32, 27648, 5120, RMS_NORM, SILU_GATE),
    GemmProblem(64, 5120, 2560, NO_NORM, STORE),
    GemmProblem(8, 152064, 5120, RMS_NORM, STORE),
    GemmProblem(4, 5760, 1920, LAYER_NORM, STORE),
    GemmProblem(32, 15360, 5120, RMS_NORM, STORE, 128),
]


def wgmma(tiles: int, split_k: int, stages: int, **others: bool) -> TileConfig:
    return TileConfig(tiles, 1, 1, split_k, stages, stream_x=True, tma=True, **others)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ranked_configs_can_be_built_and_fill_the_gpu(problem: GemmProblem) -> None:
    found = ranked(problem, tma=True, sm_count=SMS)
    assert len(found) == len(set(found)) > 5
    assert all(config.can_serve(problem) for config in found)
    times = [estimated_us(problem, config, SMS) for config in found]
    assert times == sorted(times)
    for config in found[:10]:
        assert config.persistent or 0.5 < config.ctas(problem.n) / SMS <= 4
    assert not any(config.tma for config in ranked(problem, tma=False, sm_count=SMS))
    floor = 2 * problem.n * problem.k / CONSTANTS.memory / (2 if problem.scale_columns else 1)
    assert floor < times[0] < 1.5 * floor + 10


def test_the_sm_with_most_of_the_weight_is_waited_for() -> None:
    problem = GemmProblem(1, 132 * 64, 4096, RMS_NORM, STORE)
    even, uneven = wgmma(4, 1, 8), wgmma(3, 1, 8)  # 132 CTAs, and 176 on 132 SMs
    assert load_of(problem, even, SMS).busiest == 1
    assert load_of(problem, uneven, SMS).busiest == 2
    assert estimated_us(problem, even, SMS) < estimated_us(problem, uneven, SMS)


def test_persistent_ctas_share_what_there_is() -> None:
    problem = GemmProblem(8, 152064, 5120, RMS_NORM, STORE)
    load = load_of(problem, wgmma(12, 1, 4, persistent=True), SMS)
    assert (load.tiles, load.resident) == (792, 1 if load.alone else 2)
    assert load.busiest == math.ceil(792 / (SMS * load.resident)) * load.resident


def test_bytes_in_flight_hide_latency() -> None:
    problem = GemmProblem(1, 132 * 64, 4096, RMS_NORM, STORE)
    times = [estimated_us(problem, wgmma(4, 1, stages), SMS) for stages in (2, 3, 4, 8)]
    assert times == sorted(times, reverse=True) and times[0] > 1.2 * times[-1]


def test_many_rows_want_tall_tiles() -> None:
    """Each CTA reads all rows of x: of 64 as many bytes as of 64 rows of the weight."""
    few, many = (GemmProblem(rows, 8192, 8192, NO_NORM, STORE) for rows in (8, 64))
    small, tall = wgmma(2, 1, 12), wgmma(4, 2, 10)
    loads = [load_of(many, config, SMS) for config in (small, tall)]
    assert [load.x / load.weight for load in loads] == [2.0, 1.0]

    def more(problem: GemmProblem) -> float:
        return estimated_us(problem, small, SMS) / estimated_us(problem, tall, SMS)

    assert more(many) > 1.1 * more(few)


def test_less_shared_memory_leaves_fewer_stages() -> None:
    problem = PROBLEMS[2]
    for config in ranked(problem, tma=True, sm_count=SMS, limit=99 * 1024)[:5]:
        assert config.can_serve(problem, 99 * 1024)
    assert ranked(problem, tma=True, sm_count=SMS)[0].can_serve(problem, SHARED_BYTES)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_short_ranking_has_both_kernels_and_few_alike(problem: GemmProblem) -> None:
    everything = ranked(problem, tma=True, sm_count=SMS)
    found = short_ranking(problem, 9, tma=True, sm_count=SMS)
    assert found[0] == everything[0] and 3 < len(found) == len(set(found)) <= 9
    kinds = {config.tma for config in everything}
    assert {config.tma for config in found} == kinds
    alike = [(config.weight_rows, config.split_k, config.tma) for config in found]
    assert max(map(alike.count, alike)) <= 2
