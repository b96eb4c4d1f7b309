"""Faults of kernels that sum over ranks where they end, each of which the checks of
``test_peer_sum.py`` and ``test_moe_row.py`` notice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest
import torch

from megatron_async.kernels.gemm.tile_config import TileConfig
from tests.support import emulator
from tests.support.cuda_kernels import emulated
from tests.support.interpreter import HAS_TRITON, INTERPRETED
from tests.unit.kernels.test_moe_row import SMALL as EXPERTS
from tests.unit.kernels.test_moe_row import RanksOfExperts
from tests.unit.kernels.test_peer_sum import (
    AHEAD,
    SMALL,
    Case,
    Ranks,
    SummedCase,
    run_in_a_row,
)

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    not HAS_TRITON or INTERPRETED, reason="experts need triton, and are not its kernels"
)


def break_sums(monkeypatch: pytest.MonkeyPatch, there: str, instead: str) -> None:
    """Break the source of each kernel with ``SUMS``."""
    whole = emulator.program

    def program(source: str, defines: Mapping[str, int]) -> str:
        text = whole(source, defines)
        return text.replace(there, instead) if defines.get("SUMS") else text

    @functools.cache
    def made(source: str, defines: tuple[tuple[str, int], ...]) -> emulator.EmulatedKernel:
        return emulator.EmulatedKernel(source, dict(defines))

    emulator.install(monkeypatch)
    monkeypatch.setattr(emulator, "program", program)
    monkeypatch.setattr(emulator, "_kernel", made)


def check_fault(
    monkeypatch: pytest.MonkeyPatch,
    fault: tuple[str, str, Callable[[], None]],
    *sources: str,
) -> None:
    """A text, once in each of these sources, in whose place stands another, is noticed."""
    there, instead, run = fault
    assert {emulator.source_text(source).count(there) for source in sources} == {1}
    break_sums(monkeypatch, there, instead)
    with pytest.raises(AssertionError):
        run()


def of_gemms(
    k: int,
    config: TileConfig,
    rows: int,
    *,
    ranks: int = 2,
    scale_columns: int = 0,
    counted: int = 0,
) -> None:
    """Sums where GEMMs end, and in between one that has a kernel, from a number of launches on."""
    torch.manual_seed(ranks)
    group = Ranks(ranks, 64, CPU, 16 * 64, launches=64, **SMALL)
    for each in group.sums:
        each.words.launches.fill_(counted)
    for norm in ("rms", "layer"):
        SummedCase(
            group, rows, norm, k, config, bias=norm == "layer", scale_columns=scale_columns
        ).run()
        if norm == "rms":
            Case(group, rows, norm).run()
    assert all((each.words.launches == each.words.launches[0]).all() for each in group.sums)


def of_gemms_ahead() -> None:
    """A rank is a launch ahead."""
    torch.manual_seed(2)
    group = Ranks(2, 64, CPU, 8 * 64, launches=64, **SMALL)
    cases = [SummedCase(group, 3, "rms", 64, TileConfig(1, 4, 1, 1, 2)) for _ in range(AHEAD)]
    cases[0].gemms[0][0].kernel.in_a_row = AHEAD
    run_in_a_row(group, cases)


PLAIN = functools.partial(of_gemms, 128, TileConfig(1, 2, 1, 1, 2), 6)
SMALL_CTAS = functools.partial(of_gemms, 64, TileConfig(1, 1, 1, 1, 2), 3)
THREE = functools.partial(of_gemms, 64, TileConfig(1, 1, 1, 1, 2), 3, ranks=3)
CLUSTERS = functools.partial(of_gemms, 256, TileConfig(1, 2, 1, 4, 2), 1)
WORKSPACE = functools.partial(of_gemms, 128, TileConfig(1, 2, 1, 2, 2, workspace=True), 9)
E4M3 = functools.partial(of_gemms, 256, TileConfig(4, 1, 1, 1, 2, tma=True), 6, scale_columns=256)
LAST = functools.partial(of_gemms, 64, TileConfig(1, 1, 1, 1, 2), 3, counted=-1)

_ROUNDED = "pairs[0] = pack(v[0], v[1]), pairs[1] = pack(v[2], v[3]);"
_ADDED = "low(of_rank[i][from][half]), v[half * 2 + 1] += high(of_rank[i][from][half])"
_BIAS = """if (bias != nullptr)
  for (int j = 0; j < 4; j++) v[j] += widen(bias[row_tile * 16 + 2 * t + j % 2 + j / 2 * 8]);
"""
FAULTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "CTAs that come too early do not count": (
        "if (before != SPLIT_K - 1) count_launch(launches, number);", "", WORKSPACE,
    ),
    "CTAs that own nothing do not count": (
        "__syncthreads();\n      count_launch(launches, number);", "__syncthreads();", CLUSTERS,
    ),
    "CTAs count for their own grid": ("i < LAUNCHES;", "i < gridDim.x;", SMALL_CTAS),
    "0 is a number": ("return number ? number : 2;", "return number;", LAST),
    "one half": (
        "(size_t)(number & 1) * RANKS + sender) * SENT_WORDS + ((size_t)row_tile",
        "(size_t)RANKS + sender) * SENT_WORDS + ((size_t)row_tile",
        of_gemms_ahead,
    ),
    "the first word alone": (
        "is_of(upper, number) && is_of(lower, number)", "is_of(upper, number)", PLAIN,
    ),
    "the second word alone": (
        "is_of(upper, number) && is_of(lower, number)", "is_of(lower, number)", PLAIN,
    ),
    "the bias of each rank": (_ROUNDED, _BIAS + _ROUNDED, PLAIN),
    "from its own rank on": (_ADDED, _ADDED.replace("[from]", "[(from + place) % RANKS]"), THREE),
    "another rank's words": (
        "poll_peer(received + words_of(row_tile, mt, from), upper",
        "poll_peer(received + words_of(row_tile, mt, RANKS - 1 - from), upper",
        THREE,
    ),
    "rows that nobody sends": ("from == place || mt * 8 + g >= M ||", "from == place ||", PLAIN),
    "sums are scaled as well": ("#if !SUMS\n", "#if 1\n", E4M3),
    "no scales": (
        "[[maybe_unused]] const int column = min(row_tile * 16", "continue; int column = min(16",
        E4M3,
    ),
}  # fmt: skip
"""Text and what takes its place, and what finds it."""


@pytest.mark.sweep(of=3)
@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_gemms_that_sum_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fault(monkeypatch, FAULTS[fault], "skinny_gemm_mma", "skinny_gemm_wgmma")


@pytest.mark.sweep(of=3)
@emulated
@pytest.mark.parametrize(
    "run",
    dict.fromkeys(run for *_, run in FAULTS.values()),
    ids=lambda run: str(getattr(run, "args", "ahead")),
)
def test_and_without_them_nothing_does(
    run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_sums(monkeypatch, "", "")
    run()


def of_experts(case: int, ranks: int = 2) -> None:
    shape, rows, options = EXPERTS[case]
    group = RanksOfExperts(ranks, shape, rows, CPU, **options)
    for _ in range(2):
        group.check()
    assert all((each.launches == 2).all() for each in group.sums)


ONE_ROW = functools.partial(of_experts, 0)
TWO_ROWS = functools.partial(of_experts, 1)
FOUR_ROWS = functools.partial(of_experts, 2)  # one of them dead
THREE_RANKS = functools.partial(of_experts, 1, ranks=3)

_STREAM = "added = 0.f, stream = widen("
OF_EXPERTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "not counted": (
        "count_launch(rank_launches, number);", "", ONE_ROW,
    ),
    "whatever is there": (
        "is_missing |= !is_of(got[from], number);", "", ONE_ROW,
    ),
    "the last tile is forgotten": (
        "if (threadIdx.x < (ROWS * TILE + 31) / 32 * 32) add_up();", "",
        ONE_ROW,
    ),
    "the residual of each rank": (
        _STREAM, "added = stream = widen(", ONE_ROW,
    ),
    "the residual of the next tile": (
        "sent_own) + sent_stream", "sent_own) + stream", TWO_ROWS,
    ),
    "from its own rank on": (
        "sum += widen((u16)got[from]);", "sum += widen((u16)got[(from + place) % RANKS]);",
        THREE_RANKS,
    ),
    "rows that nobody sends": (
        "if (row < ROWS) ranks.send(", "if (row < live) ranks.send(", FOUR_ROWS,
    ),
}  # fmt: skip


@pytest.mark.sweep(of=3)
@needs_triton
@emulated
@pytest.mark.parametrize("fault", OF_EXPERTS)
def test_faults_of_experts_that_sum_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fault(monkeypatch, OF_EXPERTS[fault], "moe_row")
