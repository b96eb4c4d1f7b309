"""Partial sums of several ranks, of many rows, that the GEMM which computes them adds up.

All ranks are in this process, as in ``test_peer_sum.py``. What they send each other has no number,
so no word may be left when a launch is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from megatron_async.kernels.gemm.skinny_gemm import Sending, SkinnyGemm
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    STORE,
    TileConfig,
    padded,
)
from tests.support import emulator
from tests.support.cuda_kernels import device, emulated, on_both
from tests.unit.kernels.test_many_rows_gemm import many
from tests.unit.kernels.test_peer_rows import Case as StoredCase
from tests.unit.kernels.test_peer_rows import Ranks
from tests.unit.kernels.test_peer_sum import LARGE
from tests.unit.kernels.test_rank_sum_faults import break_sums, check_fault

__all__ = ["device"]

CPU = torch.device("cpu")
EPS = 1e-5


class Case:
    """One GEMM of each rank that sums where it ends. Its partial sums are those that it stores.

    Args:
        empty: of each rank's weight, the rows that are zeros, whose partial sums are words of 0.
    """

    def __init__(
        self,
        ranks: Ranks,
        rows: int,
        k: int,
        config: TileConfig,
        *,
        norm: int = RMS_NORM,
        bias: bool = False,
        empty: int = 0,
    ) -> None:
        self.ranks, self.rows, self.norm = ranks, rows, norm
        n, where = ranks.hidden, {"device": ranks.device, "dtype": torch.bfloat16}
        count, nan = len(ranks.sums), float("nan")
        self.residual, self.weight = torch.randn(rows, n, **where), torch.randn(n, **where)
        self.bias = torch.randn(n, **where) if bias else None
        self.partial = [torch.full((rows, n), nan, **where) for _ in range(count)]
        self.streams = [self.residual.clone() for _ in range(count)]
        self.scaled = [torch.full((rows, n), nan, **where) for _ in range(count)]
        self.given = [self._operands(rank, k, empty) for rank in range(count)]
        self.gemms = []
        for rank, (x, weight) in enumerate(self.given):
            words = ranks.sums[rank].words
            sums = Sending(words.memory, rank, words.launches, words.capacity, True, True)
            assert sums.takes(config, n)
            shape = n, k, padded(rows), NO_NORM
            SkinnyGemm(*shape, STORE, norm, config, ranks.device)(x, weight, self.partial[rank])
            gemm = SkinnyGemm(*shape, ADD, norm, config, ranks.device, sums)
            assert gemm.runs_at_once
            self.gemms.append(gemm)
        tiles = n // self.gemms[0].statistic_rows
        self.statistics = [
            torch.full((rows, tiles, 2), nan, device=ranks.device) for _ in range(count)
        ]

    def _operands(self, rank: int, k: int, empty: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of three ranks and more fp32 rounds what is between the first and the last one, so that
        another order has other bits."""
        ranks, where = self.ranks, {"device": self.ranks.device, "dtype": torch.bfloat16}
        x = torch.randn(self.rows, k, **where)
        weight = torch.randn(ranks.hidden, k, **where)
        weight[:empty] = 0
        if rank == 0 and len(ranks.sums) > 2:
            self._first = x, weight
            return x * 2**LARGE, weight
        if rank and rank == len(ranks.sums) - 1 > 1:
            return self._first[0] * -(2**LARGE), self._first[1]
        return x, weight

    def launch(self, rank: int) -> None:
        x, weight = self.given[rank]
        stream = self.streams[rank]
        self.gemms[rank](
            x, weight, stream, bias=self.bias, residual=stream,
            scaled=(self.weight, self.scaled[rank]) if self.norm == RMS_NORM else None,
            statistics_out=self.statistics[rank],
        )  # fmt: skip

    def check(self) -> None:
        """All ranks have the same bits, those of the sum in the order of ranks."""
        total = torch.zeros(self.rows, self.ranks.hidden, device=self.ranks.device)
        for part in self.partial:
            total += part.bfloat16().float()
        if self.bias is not None:
            total += self.bias.float()
        expected = (total + self.residual.float()).bfloat16()
        for rank in range(len(self.streams)):
            assert self.streams[rank].equal(expected), f"rank {rank}"
            if self.norm == RMS_NORM:
                assert self.scaled[rank].equal(expected * self.weight)
            assert self.statistics[rank].equal(self.statistics[0])
        tiles = expected.double().view(self.rows, self.statistics[0].shape[1], -1)
        mean = tiles.mean(2) if self.norm == LAYER_NORM else torch.zeros_like(tiles[..., 0])
        square = (tiles - mean[..., None]).square().sum(2)
        found = self.statistics[0].double()
        torch.testing.assert_close(found[..., 0], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[..., 1], square, rtol=1e-4, atol=1e-5)

    def run(self) -> None:
        self.ranks.each(self.launch)
        self.check()
        assert self.ranks.are_empty()


def group_of(
    ranks: int, n: int, device: torch.device, rows: tuple[int, ...], launches: int = 1024
) -> Ranks:
    """Ranks with room for what GEMMs of ``n`` columns send of ``rows``."""
    torch.manual_seed(ranks)
    ctas = {"ctas": 2} if device.type == "cpu" else {}
    group = Ranks(ranks, n, device, max(64, *map(padded, rows)), launches=launches, **ctas)
    group.load(list(rows))
    return group


@pytest.mark.sweep(of=2)
@on_both(
    *("ranks", "shape", "config", "rows"),
    gpu=[
        (2, (2048, 2048), many(2, 1, 9, 1), (128, 65, 100)),
        (2, (2048, 7168), many(4, 2, 4, 1), (128, 65, 127)),
        (2, (2048, 1024), many(4, 2, 4, 2), (64, 50)),
        (3, (1024, 1024), many(4, 2, 4, 1, workspace=True), (70, 128)),
        (4, (1024, 1024), many(2, 1, 4, 2), (128, 66)),
    ],
    small=[
        (2, (64, 128), many(2, 1, 2, 1), (65, 128)),
        (2, (96, 192), many(3, 1, 2, 1), (100,)),
        (2, (64, 128), many(1, 1, 2, 2), (127, 70)),
        (2, (64, 192), many(2, 2, 2, 1), (65, 128)),
        (2, (64, 256), many(1, 4, 2, 2), (70,)),
        (2, (32, 512), many(2, 8, 2, 1), (90,)),
        (2, (64, 192), many(2, 3, 2, 1, workspace=True), (66,)),
        (2, (64, 192), many(2, 2, 2, 2, workspace=True), (128,)),
        (2, (64, 192), many(2, 2, 2, 1), (50, 64)),
        (2, (64, 192), many(2, 2, 2, 2), (40, 33)),
        (2, (64, 128), many(1, 1, 2, 1), (129, 255)),
        (3, (64, 128), many(2, 1, 2, 1), (65,)),
        (4, (32, 128), many(1, 2, 2, 1), (70,)),
    ],
)
def test_gemms_sum_where_they_end(
    device: torch.device,
    ranks: int,
    shape: tuple[int, int],
    config: TileConfig,
    rows: tuple[int, ...],
) -> None:
    """Launches of the kernel that sums stored rows come between, over the same words, and count on,
    with another grid."""
    n, k = shape
    group = group_of(ranks, n, device, rows)
    for turn, count in enumerate([*rows, *rows]):
        norm = (RMS_NORM, LAYER_NORM)[turn % 2]
        Case(group, count, k, config, norm=norm, bias=turn % 3 == 1, empty=turn % 2 * 16).run()
        if turn % 2 == 0:
            StoredCase(group, count, norm=False).run()
    assert all((each.words.launches == each.words.launches[0]).all() for each in group.sums)


AHEAD = 16
"""Launches in a row, of which one is overwritten before it is read where words have no halves."""


def in_a_row(config: TileConfig, k: int = 128, launches: int = 64) -> None:
    """Each rank has several launches, at its own pace."""
    group = group_of(2, 64, CPU, (50,), launches)
    cases = [Case(group, 50, k, config) for _ in range(AHEAD)]
    kernel = cases[0].gemms[0].kernel
    kernel.in_a_row = AHEAD

    def launch(rank: int) -> None:
        for case in cases:
            case.launch(rank)

    try:
        group.each(launch)
    finally:
        kernel.in_a_row = 1
    for case in cases:
        case.check()
    assert group.are_empty()


@emulated
@pytest.mark.parametrize("config", [many(2, 1, 2, 1), many(2, 2, 2, 2)])
def test_a_rank_may_be_a_launch_ahead(config: TileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    in_a_row(config)


def one(
    config: TileConfig, rows: int = 66, ranks: int = 2, *, counted: int = 0, empty: int = 0
) -> None:
    """A sum of GEMMs, one of stored rows, and another one of GEMMs."""
    group = group_of(ranks, 64, CPU, (rows,), 64)
    for each in group.sums:
        each.words.launches.fill_(counted)
    Case(group, rows, 192, config, empty=empty).run()
    StoredCase(group, rows, norm=False).run()
    Case(group, rows, 192, config, norm=LAYER_NORM, bias=True, empty=empty).run()
    assert all((each.words.launches == each.words.launches[0]).all() for each in group.sums)


PLAIN = functools.partial(one, many(2, 1, 2, 1))
SPLIT = functools.partial(one, many(2, 3, 2, 1))
WORKSPACE = functools.partial(one, many(2, 2, 2, 1, workspace=True))
ZEROS = functools.partial(one, many(2, 1, 2, 1), empty=32)
THREE = functools.partial(one, many(2, 1, 2, 1), 65, 3)
ROWS_AHEAD = functools.partial(in_a_row, many(2, 1, 2, 1))

FAULTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "CTAs that come too early do not count": (
        "count_launch(launches, number);\n#endif\n  if (before != SPLIT_K - 1) return;\n  // All",
        "{}\n#endif\n  if (before != SPLIT_K - 1) return;\n  // All",
        WORKSPACE,
    ),
    "CTAs count for their own grid": ("i < LAUNCHES;", "i < gridDim.x;", PLAIN),
    "one half": (
        "(size_t)(number & 1) * RANKS + sender) * (CAPACITY / 4)",
        "(size_t)RANKS + sender) * (CAPACITY / 4)",
        ROWS_AHEAD,
    ),
    "words that have not arrived": ("return both != 0;", "return true;", PLAIN),
    "words stay": ("    clear_received(row_tile, mt);\n", "", PLAIN),
    "own words are read": (
        "pairs[0] = own[0], pairs[1] = own[1];\n    if (from == place || ",
        "pairs[0] = own[0], pairs[1] = own[1];\n    if (",
        PLAIN,
    ),
    "words of other rows": (
        "own = WK * CLUSTER == 1 ? GROUP(i / WARP_TILES) * TILES",
        "own = WK * CLUSTER == 1 ? i / WARP_TILES * TILES",
        PLAIN,
    ),
    "zeros are sent as they are": ("pair ? pair : 0x80008000u", "pair", ZEROS),
    "another rank's words": (
        "poll_peer(received + words_of(row_tile, mt, from));",
        "poll_peer(received + words_of(row_tile, mt, RANKS - 1 - from));",
        THREE,
    ),
    "rows that nobody sends": (
        "if (from == place || mt * 8 + g >= M || row_tile * 16 >= N) return true;",
        "if (from == place) return true;",
        PLAIN,
    ),
    "those that own nothing do not count": (
        "__syncthreads();\n      count_launch(launches, number);", "__syncthreads();",
        functools.partial(one, many(2, 3, 2, 1), 128),
    ),
}  # fmt: skip
"""Text and what takes its place, and what finds it."""


@pytest.mark.sweep(of=3)
@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fault(monkeypatch, FAULTS[fault], "skinny_gemm_many")


@pytest.mark.sweep(of=3)
@emulated
@pytest.mark.parametrize(
    "run",
    dict.fromkeys(run for *_, run in FAULTS.values()),
    ids=lambda run: str(getattr(run, "args", "")),
)
def test_and_without_them_nothing_does(
    run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_sums(monkeypatch, "", "")
    run()
