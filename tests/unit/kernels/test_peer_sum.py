"""Partial sums of several ranks into the residual stream, over each other's memory.

The ranks here are of one process. In the emulator their launches run as one grid; on a GPU each
rank has a stream, and all CTAs of all ranks fit onto it at once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from megatron_async.kernels.ranks import peer_sum
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords, word_count
from tests.support import emulator
from tests.support.child_environment import child_environment
from tests.support.cuda_kernels import device, emulated, on_both, on_gpu
from tests.support.patience import PATIENCE_SECONDS

__all__ = ["device"]

EPS = 1e-5
LARGE = 20
"""A power of two next to whose products fp32 loses bits of the others."""
AHEAD = 16
"""Launches in a row in which, of words without halves, one is overwritten before it is read."""


class Ranks:
    """All ranks of a group, each with a stream of its own."""

    def __init__(
        self,
        ranks: int,
        hidden: int,
        device: torch.device,
        capacity: int,
        *,
        ctas: int = peer_sum.CTAS,
        launches: int | None = None,
        threads: int = peer_sum.THREADS,
        steps: int | None = None,
    ) -> None:
        count = word_count(ranks, capacity)
        memory = tuple(torch.zeros(count, dtype=torch.int64, device=device) for _ in range(ranks))
        self.device, self.hidden, self.most = device, hidden, capacity // hidden
        self.sums = [
            PeerSum(
                PeerWords(
                    rank,
                    memory,
                    torch.zeros(launches or ctas, dtype=torch.int32, device=device),
                    capacity,
                ),
                hidden,
                device,
                threads,
                steps,
                ctas,
            )
            for rank in range(ranks)
        ]
        self.streams: list[Any] = [None] * ranks
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def each(self, call: Callable[[int], None]) -> None:
        """``call`` for each rank, on its stream, and wait for all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                call(rank)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compile(self, rows: list[int]) -> None:
        """Nothing may be compiled or loaded while a kernel waits for another rank's. Launches of no
        rows wait for nobody."""
        if self.device.type == "cuda":
            none = torch.empty(0, self.hidden, dtype=torch.bfloat16, device=self.device)
            empty = torch.empty(0, device=self.device)
            for each in self.sums:
                for most in {padded(count) for count in rows}:
                    each(none, none, most)
                    each(none, none, most, statistics=empty)
                    each(none, none, most, statistics=empty, scaled=(none, none))
            torch.cuda.synchronize()

    def padded(self, rows: int) -> int:
        """What kernels are compiled for; few of them in the emulator."""
        return padded(rows) if self.device.type == "cuda" else self.most


class Case:
    """One sum over the ranks.

    Args:
        norm: what reads the statistics, "rms", "layer" or None.
    """

    def __init__(self, ranks: Ranks, rows: int, norm: str | None, *, bias: bool = False) -> None:
        self.ranks, self.rows, self.norm = ranks, rows, norm
        self.sent = False
        hidden = ranks.hidden
        where: Any = {"device": ranks.device, "dtype": torch.bfloat16}
        count = len(ranks.sums)
        self.partial = [torch.randn(rows, hidden, **where) for _ in range(count)]
        if count > 2:  # fp32 rounds what is between these two, so another order has other bits
            self.partial[0] *= 2**LARGE
            self.partial[-1] = -self.partial[0]
        self.residual = torch.randn(rows, hidden, **where)
        self.bias = torch.randn(hidden, **where) if bias else None
        self.weight = torch.randn(hidden, **where)
        self.streams = [self.residual.clone() for _ in range(count)]
        tiles = hidden // ranks.sums[0].statistic_rows
        nan = float("nan")
        self.statistics = [
            torch.full((rows, tiles, 2), nan, device=ranks.device) for _ in range(count)
        ]
        self.scaled = [torch.full((rows, hidden), nan, **where) for _ in range(count)]

    def launch(self, rank: int) -> None:
        self.ranks.sums[rank](
            None if self.sent else self.partial[rank], self.streams[rank],
            self.ranks.padded(self.rows), bias=self.bias,
            statistics=self.statistics[rank] if self.norm else None,
            scaled=(self.weight, self.scaled[rank]) if self.norm == "rms" else None,
        )  # fmt: skip

    def check(self) -> None:
        """All ranks have the same bits, and those of the sum in the order of ranks."""
        total = torch.zeros(self.rows, self.ranks.hidden, device=self.ranks.device)
        for part in self.partial:
            total += part.float()
        if self.bias is not None:
            total += self.bias.float()
        expected = (total + self.residual.float()).bfloat16()
        for rank in range(len(self.streams)):
            assert self.streams[rank].equal(expected), f"rank {rank}"
            if self.norm == "rms":
                assert self.scaled[rank].equal(expected * self.weight)
            if self.norm is not None:
                assert self.statistics[rank].equal(self.statistics[0])
        if self.norm is not None:
            self.check_statistics(expected.double(), self.statistics[0].double())

    def check_statistics(self, hidden: Tensor, found: Tensor) -> None:
        tiles = hidden.view(self.rows, found.shape[1], -1)
        mean = tiles.mean(2) if self.norm == "layer" else torch.zeros_like(found[..., 0])
        square = (tiles - mean[..., None]).square().sum(2)
        torch.testing.assert_close(found[..., 0], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[..., 1], square, rtol=1e-4, atol=1e-5)

    def run(self) -> None:
        self.ranks.each(self.launch)
        self.check()


def operands(
    ranks: Ranks, rows: int, k: int, scale_columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of x, a rank's weight, and its scales if it is e4m3."""
    x = torch.randn(rows, k, device=ranks.device, dtype=torch.bfloat16)
    weight = torch.randn(ranks.hidden, k, device=ranks.device, dtype=torch.bfloat16)
    if not scale_columns:
        return x, weight, None
    scale = torch.rand(ranks.hidden, k // scale_columns, device=ranks.device)
    return x, weight.to(torch.float8_e4m3fn), scale


SMALL = {"ctas": 2, "threads": 32}


def of_gemms(
    ranks: int, n: int, device: torch.device, rows: tuple[int, ...], launches: int | None = None
) -> Ranks:
    """Ranks whose kernel is built, with room for what GEMMs of ``n`` columns send of ``rows``."""
    torch.manual_seed(ranks)
    most = max(8, *map(padded, rows))
    grid = SMALL if device.type == "cpu" else {}
    group = Ranks(ranks, n, device, -(-most * n // 256) * 256, launches=launches, **grid)
    group.compile(list(rows))
    return group


TWO_STEPS = {**SMALL, "steps": 2}


@on_both(
    *("ranks", "hidden", "grid", "steps"),
    gpu=[
        (
            2,
            4096,
            {},
            [(1, "rms", False), (32, "rms", False), (33, "layer", True), (2, None, True)],
        ),
        (2, 64, {}, [(64, "layer", False), (1, "rms", True), (2, None, True)]),
        (4, 8192, {}, [(48, "rms", False), (64, "rms", True)]),
        (4, 8192, {"steps": 2}, [(48, "rms", False), (64, "rms", True)]),
        (4, 4096, {"steps": 2}, [(1, "rms", False), (64, "layer", True)]),
        (8, 2880, {}, [(1, "rms", False), (17, "rms", True), (5, "layer", False)]),
        (8, 2880, {"steps": 2}, [(1, "rms", False), (17, "rms", True), (5, "layer", False)]),
    ],
    small=[
        (2, 64, SMALL, [(1, "rms", False), (6, "layer", True), (3, None, False), (8, "rms", True)]),
        (3, 128, TWO_STEPS, [(8, "layer", False), (1, "layer", True)]),
        (8, 256, {"ctas": 1, "threads": 32}, [(1, "rms", True)]),
    ],
)
def test_all_ranks_have_the_sum(
    device: torch.device,
    ranks: int,
    hidden: int,
    grid: dict[str, int],
    steps: list[tuple[int, str | None, bool]],
) -> None:
    """Launches of other numbers of rows follow each other, so halves hold words of older ones."""
    torch.manual_seed(ranks)
    most = max(padded(rows) for rows, *_ in steps)
    group = Ranks(ranks, hidden, device, -(-most * hidden // 256) * 256, **grid)
    group.compile([rows for rows, *_ in steps])
    for rows, norm, bias in [*steps, *steps]:
        Case(group, rows, norm, bias=bias).run()


@on_both(
    *("ranks", "shape", "config", "rows", "scale_columns"),
    gpu=[
        (2, (4096, 1024), TileConfig(2, 4, 1, 1, 4), (1, 32, 7), 0),
        (2, (4096, 2048), TileConfig(4, 1, 1, 1, 4, tma=True), (32, 5), 0),
        (4, (2880, 640), TileConfig(1, 4, 1, 2, 3), (8, 17), 0),
        (2, (4096, 2048), TileConfig(4, 1, 1, 1, 4, tma=True), (32, 5), 2048),
        (2, (4096, 1024), TileConfig(2, 4, 1, 1, 4), (16, 7), 128),
    ],
    small=[
        (2, (64, 128), TileConfig(1, 2, 1, 1, 2), (1, 6, 8), 0),
        (2, (64, 128), TileConfig(1, 1, 2, 1, 2), (9,), 0),
        (3, (64, 64), TileConfig(1, 1, 1, 1, 2), (3,), 0),
        (2, (64, 192), TileConfig(1, 2, 1, 2, 2), (6,), 0),
        (2, (64, 128), TileConfig(4, 1, 1, 1, 2, tma=True), (6,), 0),
        (2, (64, 256), TileConfig(4, 1, 1, 1, 2, tma=True), (6,), 256),
        (2, (64, 256), TileConfig(1, 2, 1, 2, 2), (9,), 128),
    ],
)
def test_what_gemms_have_sent_is_added_up(
    device: torch.device,
    ranks: int,
    shape: tuple[int, int],
    config: TileConfig,
    rows: tuple[int, ...],
    scale_columns: int,
) -> None:
    """Each rank's GEMM rounds its partial sums, as it does where it stores them. Launches that send
    words of stored sums come between."""
    n, k = shape
    group = of_gemms(ranks, n, device, rows)
    for count, stored in zip([*rows, *rows], [*reversed(rows), *rows], strict=True):
        case = Case(group, count, "rms" if n % 64 == 0 else None)
        gemms = []
        for rank, part in enumerate(case.partial):
            words = group.sums[rank].words
            assert group.sums[rank].takes_sent(group.padded(count))
            sends = Sending(words.memory, rank, words.launches, words.capacity)
            x, weight, scale = operands(group, count, k, scale_columns)
            both = [
                SkinnyGemm(
                    n, k, padded(count), NO_NORM, STORE, LAYER_NORM, config, device, to,
                    scale_columns,
                )
                for to in (None, sends)
            ]  # fmt: skip
            both[0](x, weight, part, weight_scale=scale)
            gemms.append((both[1], x, weight, scale))
        for gemm, x, weight, scale in gemms:
            gemm(x, weight, None, weight_scale=scale)
        case.sent = True
        case.run()
        Case(group, stored, "rms" if n % 64 == 0 else None).run()


class SummedCase(Case):
    """One GEMM of each rank that sums where it ends. Its partial sums are those that it stores."""

    def __init__(
        self,
        ranks: Ranks,
        rows: int,
        norm: str | None,
        k: int,
        config: TileConfig,
        *,
        bias: bool = False,
        scale_columns: int = 0,
    ) -> None:
        super().__init__(ranks, rows, norm, bias=bias)
        self.statistics = []
        self.gemms = []
        statistics = RMS_NORM if norm == "rms" else LAYER_NORM
        for rank, part in enumerate(self.partial):
            words, device = ranks.sums[rank].words, ranks.device
            sums = Sending(words.memory, rank, words.launches, words.capacity, sums=True)
            assert ranks.sums[rank].takes_sent(padded(rows)) and sums.takes(config, ranks.hidden)
            x, weight, scale = operands(ranks, rows, k, scale_columns)
            if len(self.partial) > 2 and rank == len(self.partial) - 1:
                x, weight, scale = -self.gemms[0][1], *self.gemms[0][2:]
            elif len(self.partial) > 2 and rank == 0:
                x *= 2**LARGE
            given = ranks.hidden, k, padded(rows), NO_NORM
            stores = SkinnyGemm(
                *given, STORE, statistics, config, device, None, scale_columns
            )  # fmt: skip
            stores(x, weight, part, weight_scale=scale)
            gemm = SkinnyGemm(*given, ADD, statistics, config, device, sums, scale_columns)
            assert gemm.runs_at_once
            self.gemms.append((gemm, x, weight, scale))
            tiles = ranks.hidden // gemm.statistic_rows
            self.statistics.append(torch.full((rows, tiles, 2), float("nan"), device=device))

    def launch(self, rank: int) -> None:
        gemm, x, weight, scale = self.gemms[rank]
        stream = self.streams[rank]
        gemm(
            x, weight, stream, bias=self.bias, residual=stream, weight_scale=scale,
            scaled=(self.weight, self.scaled[rank]) if self.norm == "rms" else None,
            statistics_out=self.statistics[rank],
        )  # fmt: skip


@on_both(
    *("ranks", "shape", "config", "rows", "scale_columns"),
    gpu=[
        (2, (4096, 1024), TileConfig(2, 2, 2, 2, 4), (1, 32, 7), 0),
        (2, (2048, 2048), TileConfig(4, 1, 1, 2, 4, tma=True), (32, 5), 0),
        (2, (2048, 1024), TileConfig(4, 1, 1, 2, 4, tma=True), (32, 5), 1024),
        (2, (2048, 1024), TileConfig(2, 4, 1, 1, 4), (16, 7), 128),
    ],
    small=[
        (2, (64, 128), TileConfig(1, 2, 1, 1, 2), (1, 6, 8), 0),
        (2, (64, 128), TileConfig(1, 1, 2, 1, 2), (9,), 0),
        (3, (64, 64), TileConfig(1, 1, 1, 1, 2), (3,), 0),
        (2, (64, 192), TileConfig(1, 2, 1, 2, 2), (6, 9), 0),
        (2, (64, 256), TileConfig(1, 2, 1, 4, 2), (1,), 0),
        (2, (64, 128), TileConfig(1, 2, 1, 2, 2, workspace=True), (9,), 0),
        (2, (64, 128), TileConfig(4, 1, 1, 1, 2, tma=True), (6,), 0),
        (2, (64, 256), TileConfig(2, 1, 1, 2, 2, tma=True), (12,), 0),
        (2, (64, 256), TileConfig(4, 1, 1, 1, 2, tma=True), (6,), 256),
        (2, (64, 256), TileConfig(1, 2, 1, 2, 2), (9,), 128),
    ],
)
def test_gemms_sum_where_they_end(
    device: torch.device,
    ranks: int,
    shape: tuple[int, int],
    config: TileConfig,
    rows: tuple[int, ...],
    scale_columns: int,
) -> None:
    """The bits are those of partial sums that are stored. Launches of the kernel that sums stored
    ones come between, and count on, with another grid."""
    n, k = shape
    group = of_gemms(ranks, n, device, rows, launches=peer_sum.LAUNCHES)
    for number, count in enumerate([*rows, *rows]):
        norm, bias = ("rms", "layer")[number % 2], number % 3 == 1
        SummedCase(group, count, norm, k, config, bias=bias, scale_columns=scale_columns).run()
        if number % 2 == 0:
            Case(group, count, norm).run()
    assert all((each.words.launches == each.words.launches[0]).all() for each in group.sums)


@emulated
@pytest.mark.parametrize(
    ("config", "k"),
    [
        (TileConfig(1, 1, 1, 2, 2), 128),
        (TileConfig(1, 4, 1, 1, 2), 64),
        (TileConfig(2, 1, 1, 2, 2, tma=True), 128),
    ],
)
def test_a_rank_whose_gemms_sum_may_be_a_launch_ahead(
    config: TileConfig, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    torch.manual_seed(2)
    group = Ranks(2, 64, torch.device("cpu"), 8 * 64, launches=64, **SMALL)
    kernel = SummedCase(group, 3, "rms", k, config).gemms[0][0].kernel
    for in_a_row in (AHEAD, AHEAD - 1):
        cases = [SummedCase(group, 3, "rms", k, config) for _ in range(in_a_row)]
        monkeypatch.setattr(kernel, "in_a_row", in_a_row)
        run_in_a_row(group, cases)
        monkeypatch.setattr(kernel, "in_a_row", 1)


def test_a_hidden_size_that_it_does_not_take_is_said() -> None:
    """A model of such is summed over ranks in another way."""
    memory = tuple(torch.zeros(word_count(2, 512), dtype=torch.int64) for _ in range(2))
    words = PeerWords(0, memory, torch.zeros(8, dtype=torch.int32), 512)
    cpu = torch.device("cpu")
    assert PeerSum(words, 96, cpu).why_not(1) == "a hidden size of 96 is not a multiple of 64"
    assert PeerSum(words, 192, cpu).why_not(1) is None


@on_both("ranks", gpu=[(2,)], small=[(2,)])
def test_launches_count_on_past_the_largest_number(device: torch.device, ranks: int) -> None:
    """0 is the number of words that nobody has sent."""
    torch.manual_seed(0)
    group = Ranks(ranks, 64, device, 512, **(SMALL if device.type == "cpu" else {}))
    group.compile([4])
    for each in group.sums:
        each.words.launches.fill_(-2)  # 2**32 - 2
    for rows in (1, 4, 4, 4):
        Case(group, rows, "rms").run()
    assert all((each.words.launches == 4).all() for each in group.sums)


@emulated
@pytest.mark.parametrize(("ranks", "hidden", "grid"), [(2, 64, SMALL), (3, 128, TWO_STEPS)])
def test_a_rank_may_be_a_launch_ahead(
    ranks: int, hidden: int, grid: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has several launches, and waits for the others' words alone."""
    emulator.install(monkeypatch)
    torch.manual_seed(2)
    norm, kind = ("rms", 1) if ranks == 2 else ("layer", 2)
    group = Ranks(ranks, hidden, torch.device("cpu"), 8 * hidden, **grid)
    source, macros = group.sums[0].work(group.most, kind)
    kernel = peer_sum.kernel(source, macros, group.device)
    for in_a_row in (5, 4, 3, 2):
        monkeypatch.setattr(kernel, "in_a_row", in_a_row)
        run_in_a_row(group, [Case(group, 3, norm) for _ in range(in_a_row)])


def run_in_a_row(group: Ranks, cases: list[Case]) -> None:
    def launch(rank: int) -> None:
        for case in cases:
            case.launch(rank)

    group.each(launch)
    for case in cases:
        case.check()


class Steps:
    """Sums of two ranks that depend on each other: what one puts out, times a constant, goes into
    the next one."""

    COUNT, ROWS, FACTORS = 20, 5, (0.25, -0.25)

    def __init__(self, ranks: Ranks) -> None:
        self.case = Case(ranks, self.ROWS, "rms")
        self.first = [part.clone() for part in self.case.partial]
        self.last = self._expected()

    def reset(self) -> None:
        for rank in range(2):
            self.case.streams[rank].copy_(self.case.residual)
            self.case.partial[rank].copy_(self.first[rank])

    def launch(self, rank: int) -> None:
        """One sum. Takes no memory."""
        self.case.launch(rank)
        torch.mul(self.case.streams[rank], self.FACTORS[rank], out=self.case.partial[rank])

    def _expected(self) -> Tensor:
        """The residual stream after all of them."""
        parts, stream = self.first, self.case.residual
        for _ in range(self.COUNT):
            total = parts[0].float() + parts[1].float()
            stream = (total + stream.float()).bfloat16()
            parts = [
                torch.mul(stream, factor, out=torch.empty_like(stream)) for factor in self.FACTORS
            ]
        return stream


@pytest.mark.parametrize("captured", [pytest.param(x, marks=on_gpu) for x in (False, True)])
def test_ranks_run_at_their_own_pace(captured: bool) -> None:
    """The host waits for neither between the sums, with graphs or without."""
    torch.manual_seed(1)
    group = Ranks(2, 2048, torch.device("cuda"), 64 * 2048)
    group.compile([Steps.ROWS])
    steps = Steps(group)
    graphs: list[Any] = []
    for stream in group.streams if captured else ():
        rank, graph = len(graphs), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(steps.COUNT):
                steps.launch(rank)
        graphs.append(graph)
    for _ in range(50):
        steps.reset()
        torch.cuda.synchronize()
        for _ in range(1 if captured else steps.COUNT):
            for rank, stream in enumerate(group.streams):
                with torch.cuda.stream(stream):
                    graphs[rank].replay() if captured else steps.launch(rank)
        torch.cuda.synchronize()
        assert all(each.equal(steps.last) for each in steps.case.streams)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--one-gpu", "--rows", "1", "32"], marks=on_gpu, id="one GPU"),
        pytest.param(["--rows", "1", "7", "64"], marks=[*on_gpu, needs_two], id="two GPUs"),
    ],
)
def test_two_processes_reach_each_others_memory(options: list[str]) -> None:
    script = Path(__file__).parents[3] / "scripts" / "bench_peer_sum.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    subprocess.run(
        [*command, "--hidden-sizes", "64", "2880", "4096", *options],
        env=child_environment(),
        check=True,
        timeout=PATIENCE_SECONDS,
    )
