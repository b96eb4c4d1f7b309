"""Tile configs of more than 64 rows: what ``skinny_gemm_many.cu`` takes, and which are tried."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm import tile_choice
from megatron_async.kernels.gemm.skinny_gemm import defines
from megatron_async.kernels.gemm.tile_choice import choose, find
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    HEURISTIC,
    LAYER_NORM,
    MAX_ROWS,
    MEASURED,
    NO_NORM,
    RMS_NORM,
    SILU_GATE,
    STORE,
    Entry,
    GemmProblem,
    TileConfig,
    measured,
    padded,
)
from megatron_async.kernels.gemm.untuned import many
from megatron_async.kernels.gemm.untuned.ranking import ranked
from megatron_async.kernels.shared_memory import STATIC_BYTES
from megatron_async.models.fused.blocks.gemms import Gemm
from tests.support import emulator
from tests.support.compiled_kernels import LIMITS
from tests.support.cuda_kernels import emulated
from tests.support.kernel_shapes import gemm_shapes

KERNEL, SMS = "skinny_gemm_many", 132
HOPPER: Any = {"tma": True, "sm_count": SMS}
_ASSERTION = re.compile(r'static_assert\((.+), "[^"]*"\);')
_PROBLEMS = [
    GemmProblem(128, 6144, 4096, RMS_NORM, STORE),
    GemmProblem(128, 4096, 14336, NO_NORM, ADD),
    GemmProblem(128, 28672, 4096, RMS_NORM, SILU_GATE),
    GemmProblem(128, 128256, 4096, RMS_NORM, STORE),
    GemmProblem(128, 1024, 2048, NO_NORM, ADD),
]


def _many(*numbers: int, multicast: int, **flags: bool) -> TileConfig:
    """Row tiles, split K and stages."""
    row_tiles, split_k, stages = numbers
    config = TileConfig(row_tiles, 1, 1, split_k, stages, True, tma=True, multicast=multicast)
    return config._replace(**flags)


def taken_by_the_source(
    several: Sequence[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """Whether all assertions of the source hold, for each of several sets of macros."""
    own = cuda.own_text(KERNEL)
    # Those of what it sends are of macros that no config has.
    conditions = [each for each in _ASSERTION.findall(own) if "CAPACITY" not in each]
    assert any("MULTICAST" in each for each in conditions) and len(conditions) > 10
    every = " && ".join(f"({each})" for each in conditions)
    text = re.sub(r"const int shared_bytes = [^;]+;", f"const int shared_bytes = {every};", own)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "own_text", lambda _: text)
        return [bool(each) for each in emulator.shared_bytes(KERNEL, several)]


@emulated
def test_configs_that_fit_are_those_that_the_source_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, macros = [], []
    for config in (
        _many(row_tiles, split_k, stages, multicast=multicast, workspace=ws, persistent=persistent)
        for row_tiles, split_k, stages in itertools.product(
            (1, 5, 8, 9, 16, 17), (1, 2, 5), (1, 2, 3)
        )
        for multicast, ws, persistent in itertools.product((1, 2, 3, 4), (0, 1), (0, 1))
    ):
        for (n, k), rows, norm, epilogue in itertools.product(
            ((5760, 256), (5776, 320)), (64, 128, 192, 256, 512), range(3), (STORE, ADD, SILU_GATE)
        ):
            if (n + k + rows + 7 * norm + sum(config) + epilogue) % 29:
                continue
            cases.append((config, n, k, rows, norm, epilogue))
            macros.append(defines(n, k, rows, norm, epilogue, RMS_NORM, config, SMS))
    found = {True: 0, False: 0}
    for case, taken in zip(cases, taken_by_the_source(macros, monkeypatch), strict=True):
        config, n, k, rows, norm, epilogue = case
        # What the source does not say: statistics and pairs do not stop at the end of the weight,
        # and one CTA alone has nobody to add up with.
        tiles = n / config.weight_rows
        whole = tiles % config.multicast == 0 or epilogue == STORE
        wanted = taken and whole and not (config.workspace and config.split_k == 1)
        assert config.fits(n, k, rows, norm, epilogue, sys.maxsize) == wanted, case
        found[wanted] += 1
    assert min(found.values()) > 60, found


@pytest.mark.parametrize(
    "others",
    [
        {"warps_n": 2}, {"warps_k": 2}, {"tma": False}, {"stream_x": False}, {"multicast": 0},
        {"stages": 0}, {"stages": 1}, {"multicast": 16},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_kernel_of_many_rows_has_fits_nothing(others: dict[str, int]) -> None:
    config, shape = _many(4, 1, 3, multicast=2), (6144, 4096, 128, RMS_NORM, STORE)
    assert config.fits(*shape) and not config._replace(**others).fits(*shape)


def test_few_rows_fit_into_it_too_and_e4m3_does_not() -> None:
    config = _many(4, 1, 3, multicast=2)
    for rows, fits in ((32, False), (48, True), (64, True), (96, False), (128, True)):
        assert config.fits(6144, 4096, rows, RMS_NORM, STORE) is fits, rows
    problem = GemmProblem(128, 6144, 4096, NO_NORM, STORE)
    assert config.can_serve(problem)
    for columns, e4m3_inputs in itertools.product((0, 32, 128, 4096), (False, True)):
        of_e4m3 = problem._replace(scale_columns=columns, e4m3_inputs=e4m3_inputs)
        assert config.can_serve(of_e4m3) == (of_e4m3 == problem)
    without = problem._replace(norm=None, epilogue=None)
    assert config.can_serve(without) and not config.can_serve(without._replace(k=4096 + 32))


@emulated
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_the_bound_of_shared_memory_is_that_of_the_source(rows: int) -> None:
    cases = [
        _many(row_tiles, split_k, stages, multicast=multicast, workspace=ws)
        for row_tiles in (1, 2, 3, 5, 7, 8, 12, 16)
        for split_k, ws in ((1, False), (2, False), (3, True), (4, False), (8, False))
        for stages, multicast in ((2, 1), (3, 2), (12, 1))
    ]
    n, k = 3360 * 16, 1024
    cases = [each for each in cases if each.fits(n, k, rows, NO_NORM, ADD, sys.maxsize)]
    assert len(cases) > 40
    # On a GPU of so few SMs no CTA takes more than it needs.
    macros = [defines(n, k, rows, NO_NORM, ADD, RMS_NORM, each, 1) for each in cases]
    for each, taken in zip(cases, emulator.shared_bytes(KERNEL, macros), strict=True):
        # The word that says which CTA comes last takes 1,024 bytes in front of the others.
        assert 1024 <= each.shared_bytes(k, rows) - taken <= 2048, each


@pytest.mark.sweep
@emulated
@pytest.mark.parametrize("gpu", ["H100", "L40S"])
@pytest.mark.parametrize("part", range(8))
def test_all_that_is_tried_can_be_built(
    gpu: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of shapes of models, for GPUs with much shared memory and little."""
    limit, macros, bounds = LIMITS[gpu], [], []
    for n, k, norm, epilogue in sorted(gemm_shapes())[part::8]:
        problem = GemmProblem(MAX_ROWS, n, k, norm, epilogue)
        found = list(many.configs(problem, SMS, limit))
        assert len(found) == len(set(found))
        if norm == LAYER_NORM:
            assert not found
        for config in found:
            assert config.multicast > 0 and config.can_serve(problem, limit), (problem, config)
        every = many.ranked(problem, SMS, limit)
        assert set(every) <= set(found) and bool(every) == bool(found)
        for config in every[:40]:
            macros.append(defines(n, k, MAX_ROWS, norm, epilogue, RMS_NORM, config, SMS, limit))
            bounds.append(max(config.shared_bytes(k, MAX_ROWS) - 1024, macros[-1]["MIN_SHARED"]))
    assert macros
    for taken, bound in zip(emulator.shared_bytes(KERNEL, macros), bounds, strict=True):
        assert taken <= bound <= limit - STATIC_BYTES
    assert all(taken_by_the_source(macros, monkeypatch))


def test_less_shared_memory_leaves_fewer_stages_or_nothing() -> None:
    for problem in _PROBLEMS:
        stages = {}
        for limit in sorted(LIMITS.values()):
            for config in many.configs(problem, SMS, limit):
                assert config.shared_bytes(problem.k, problem.rows) <= limit
                key = config._replace(stages=0)
                assert config.stages >= stages.get(key, 2)
                stages[key] = config.stages
        assert stages
        # Two stages of x alone are 32 KB.
        assert not list(many.configs(problem, SMS, 2 * 16384))


@pytest.mark.parametrize("sm_count", [66, SMS])
@pytest.mark.parametrize("problem", _PROBLEMS, ids=str)
def test_ranked_configs_fill_the_gpu_in_one_wave_or_persist(
    problem: GemmProblem, sm_count: int
) -> None:
    found = ranked(problem, tma=True, sm_count=sm_count)
    assert len(found) == len(set(found)) > 5
    times = [many.estimated_us(problem, config, sm_count) for config in found]
    assert times == sorted(times)
    for config in found:
        ctas, cluster = config.ctas(problem.n), config.multicast
        cluster *= 1 if config.workspace else config.split_k
        at_once = many.cluster_sms(sm_count, cluster)
        assert config.persistent == (ctas > at_once)
        assert ctas >= many.LEAST_BUSY * sm_count or all(
            each.ctas(problem.n) < many.LEAST_BUSY * sm_count for each in found
        )
    floor = 2 * problem.n * problem.k / many.MEMORY
    assert floor < times[0] < 3 * floor + 20


def test_other_rows_norms_and_weights_have_other_kernels_or_none() -> None:
    problem = _PROBLEMS[0]
    assert ranked(problem, tma=False, sm_count=SMS) == ()
    for others in ({"norm": LAYER_NORM}, {"scale_columns": 128}, {"scale_columns": 4096}):
        assert ranked(problem._replace(**others), tma=True, sm_count=SMS) == ()
        assert find(problem._replace(**others), sm_count=SMS) is None
    assert find(problem, False, sm_count=SMS) is None
    few = ranked(problem._replace(rows=32), tma=True, sm_count=SMS)
    assert few and {config.multicast for config in few} == {0}
    kinds = [
        {config.multicast > 0 for config in ranked(problem._replace(rows=rows, **others), **HOPPER)}
        for rows in (48, 64)
        for others in ({}, {"norm": NO_NORM, "scale_columns": 4096, "e4m3_inputs": True})
    ]
    assert kinds == [{True}, {False}] * 2


def test_a_shape_takes_what_was_measured_or_what_is_ranked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for problem in _PROBLEMS:
        others = {each: entry for each, entry in measured().items() if each != problem}
        monkeypatch.setattr(tile_choice, "measured", functools.partial(dict, others))
        first, second, *_ = ranked(problem, tma=True, sm_count=SMS)
        assert find(problem, sm_count=SMS) == Entry(problem, first, HEURISTIC)
        _, n, k, norm, epilogue, *_ = problem
        assert norm is not None and epilogue is not None
        at_65 = choose.__wrapped__(n, k, padded(65), norm, epilogue, sm_count=SMS)
        assert at_65 == first
        entry = Entry(problem, second, MEASURED)
        assert Entry.from_json(json.loads(entry.to_json())) == entry
        table = {**others, problem: entry}
        monkeypatch.setattr(tile_choice, "measured", functools.partial(dict, table))
        assert find(problem, sm_count=SMS) == entry
        assert find(problem._replace(rows=64), sm_count=SMS) != entry
        gemm = Gemm(n, k, norm, epilogue, found={problem: second}, sm_count=SMS)
        assert gemm.tiling(128) == second
        assert replace(gemm, tma=False).tiling(128) is None
