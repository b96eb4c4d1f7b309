"""The estimate of a tile config's time, and the ranking by it."""

from __future__ import annotations

import pytest

from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
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
    MEMORY,
    cluster_sms,
    estimated_us,
    load_of,
    ranked,
    registers,
    short_ranking,
)

SMS = 132
PROBLEMS = [
    GemmProblem(1, 7168, 5120, RMS_NORM, STORE),
    GemmProblem(8, 5120, 13824, NO_NORM, ADD),
    GemmProblem(32, 27648, 5120, RMS_NORM, SILU_GATE),
    GemmProblem(64, 5120, 2560, NO_NORM, STORE, 2560, True),
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
    floor = 2 * problem.n * problem.k / (MEMORY * SMS) / (2 if problem.scale_columns else 1)
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
    assert (load.tiles, load.resident, load.waves, load.busiest) == (792, 1, 6, 6)
    load = load_of(problem, wgmma(12, 1, 3, persistent=True), SMS)
    assert (load.resident, load.waves, load.busiest) == (2, 3, 6)


def test_large_clusters_do_not_reach_all_sms() -> None:
    """Those of four reached 120 of 132 SMs: 128 CTAs, alone on their SMs, take two waves."""
    problem = GemmProblem(8, 5120, 5120, NO_NORM, STORE)
    four, two = wgmma(10, 4, 8), wgmma(5, 2, 14)
    assert [config.ctas(problem.n) for config in (four, two)] == [128, 128]
    assert [load_of(problem, config, SMS).waves for config in (four, two)] == [2, 1]
    assert estimated_us(problem, four, SMS) > 1.1 * estimated_us(problem, two, SMS)
    through_memory = four._replace(workspace=True)
    assert load_of(problem, through_memory, SMS).waves == 1
    assert [cluster_sms(SMS, size) for size in (1, 2, 4, 8)] == [132, 132, 120, 112]
    assert cluster_sms(66, 4) == 60


def test_room_for_more_ctas_than_there_are_spreads_them_unevenly() -> None:
    """240 CTAs of which three fit into an SM took 1.28 times as long as 240 of which two do."""
    problem = GemmProblem(1, 15360, 5120, RMS_NORM, STORE)
    many, few = TileConfig(1, 4, 1, 1, 7), TileConfig(1, 4, 1, 1, 11)
    loads = [load_of(problem, config, SMS) for config in (many, few)]
    assert [(load.tiles, load.fitting, load.resident) for load in loads] == [
        (240, 3, 2),
        (240, 2, 2),
    ]
    times = [estimated_us(problem, config, SMS) for config in (many, few)]
    assert times[0] > 1.05 * times[1]


def test_what_would_spill_is_not_ranked() -> None:
    """Sixteen warps with three tiles each took 421 us for 32 rows, others 243."""
    problem = GemmProblem(32, 100352, 5120, RMS_NORM, STORE)
    spills = TileConfig(3, 16, 1, 1, 2, stream_x=True)
    assert registers(spills, 32) * 32 * 16 > 65536 >= registers(spills, 8) * 32 * 8
    assert all(
        registers(config, 32) * 32 * config.warps_n * config.warps_k <= 65536
        for config in ranked(problem, tma=False, sm_count=SMS)
    )


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


@pytest.mark.parametrize("rows", (1, 32, 64))
def test_the_script_that_compares_choices_knows_all_of_a_layer(rows: int) -> None:
    """``scripts/bench_untuned.py`` up to what needs a GPU."""
    from scripts import bench_untuned as script

    layer = script.layer_of("nemo", 2)
    for gemm in layer.gemms.values():
        problem = GemmProblem(rows, *gemm)
        old = script.old_config(problem, 132, SHARED_BYTES)
        assert (old is None) is (rows > ANY_SHAPE_ROWS)
        cases = script.cases_of(problem, 4, 132, SHARED_BYTES)
        assert len({case.config for case in cases}) == len(cases) > 0
        assert all(case.config.can_serve(problem) for case in cases)
        why = script.compile_case(cases[0], 132, SHARED_BYTES, "sm_nowhere")
        assert why is not None and ":" in why, "there is no such GPU"


WIDENED = [
    (32, 28672, 4096, RMS_NORM, SILU_GATE, [(wgmma(8, 1, 4), 0.9), (wgmma(14, 1, 5), 7.0),
     (wgmma(8, 1, 5), 11.8), (wgmma(4, 1, 4), 16.0)]),
    (32, 4096, 14336, NO_NORM, ADD, [(wgmma(4, 8, 2, workspace=True), 5.0),
     (wgmma(4, 2, 9), 9.2), (wgmma(4, 3, 2), 15.1), (wgmma(16, 8, 3, workspace=True), 29.0)]),
    (64, 28672, 4096, RMS_NORM, SILU_GATE, [(wgmma(8, 1, 3), 2.4), (wgmma(14, 1, 4), 18.9),
     (wgmma(14, 2, 3, workspace=True), 45.5)]),
    (64, 6144, 4096, RMS_NORM, STORE, [(wgmma(3, 2, 3), 0.5), (wgmma(7, 2, 6), 5.9),
     (wgmma(15, 4, 3), 11.6), (wgmma(11, 8, 4, workspace=True), 34.0)]),
]  # fmt: skip
"""Llama-8B's GEMMs with weights in e4m3: configs, and microseconds in a step of an H200 more than
with the best one."""


@pytest.mark.parametrize("rows, n, k, norm, epilogue, measured", WIDENED)
def test_what_widening_takes_ranks_a_config_first_that_is_near_the_best(
    rows: int, n: int, k: int, norm: int, epilogue: int, measured: list[tuple[TileConfig, float]]
) -> None:
    problem = GemmProblem(rows, n, k, norm, epilogue, k)
    times = [estimated_us(problem, config, SMS) for config, _ in measured]
    assert times.index(min(times)) == 0 and measured[0][1] <= 5
    as_read = [
        estimated_us(problem._replace(e4m3_inputs=True, norm=NO_NORM), config, SMS)
        for config, _ in measured
    ]
    assert all(time > read for time, read in zip(times, as_read, strict=True))
