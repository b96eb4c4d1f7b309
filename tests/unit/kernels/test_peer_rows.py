"""Sums of many rows over several ranks, and the norm behind them.

All ranks are in this process, as in ``test_peer_sum.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.norm.add_norm import add_norm, add_norm_reference
from megatron_async.kernels.ranks import peer_rows
from megatron_async.kernels.ranks.peer_rows import PeerRows, RowWords, threads_of, word_count
from tests.support import emulator
from tests.support.child_environment import child_environment
from tests.support.cuda_kernels import device, emulated, on_both, on_gpu
from tests.support.patience import PATIENCE_SECONDS

__all__ = ["device"]

EPS = 1e-5
SMALL = 2


class Ranks:
    """All ranks of a group, each with a stream of its own."""

    def __init__(
        self,
        ranks: int,
        hidden: int,
        device: torch.device,
        rows: int,
        ctas: int = peer_rows.CTAS,
        launches: int | None = None,
    ) -> None:
        capacity = -(-rows * hidden // 256) * 256
        count = word_count(ranks, capacity)
        self.memory = tuple(
            torch.zeros(count, dtype=torch.int64, device=device) for _ in range(ranks)
        )
        self.device, self.hidden = device, hidden
        self.sums = [
            PeerRows(
                RowWords(
                    rank,
                    self.memory,
                    torch.zeros(launches or ctas, dtype=torch.int32, device=device),
                    capacity,
                ),
                hidden,
                device,
                ctas,
            )
            for rank in range(ranks)
        ]
        self.streams: list[Any] = [None] * ranks
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def each(self, call: Any) -> None:
        """``call`` for each rank, on its stream, and wait for all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                call(rank)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def load(self, rows: list[int]) -> None:
        """Nothing may be compiled, loaded or allocated while a kernel waits for another rank's."""
        if self.device.type != "cuda":
            return
        for stream in self.streams:
            with torch.cuda.stream(stream):
                for count in rows:
                    where: Any = {"device": self.device, "dtype": torch.bfloat16}
                    kept = [torch.empty(count, self.hidden, **where) for _ in range(4)]
                    del kept
        for sums in self.sums:
            for count in rows:
                for norm in (False, True):
                    source, macros = sums.work(count, norm=norm)
                    peer_rows.kernel(source, macros, self.device)

    def are_empty(self) -> bool:
        """No word is left that a later launch could take for its own."""
        return not any(memory.any() for memory in self.memory)


class Case:
    """One sum over the ranks.

    Args:
        norm: with the residual addition and the norm behind it.
        partial: of each rank; None draws them.
    """

    def __init__(
        self,
        ranks: Ranks,
        rows: int,
        *,
        norm: bool,
        bias: bool = False,
        offset: float = 0.0,
        partial: list[Tensor] | None = None,
    ) -> None:
        self.ranks, self.rows, self.norm, self.offset = ranks, rows, norm, offset
        hidden = ranks.hidden
        where: Any = {"device": ranks.device, "dtype": torch.bfloat16}
        self.partial = partial or [torch.randn(rows, hidden, **where) for _ in ranks.sums]
        self.residual = torch.randn(rows, hidden, **where)
        self.bias = torch.randn(hidden, **where) if bias else None
        self.weight = torch.randn(hidden, **where)
        self.given = [part.clone() for part in self.partial]
        # As add_norm has them, and allocated before a kernel waits.
        self.hidden = [torch.full((rows, hidden), float("nan"), **where) for _ in ranks.sums]
        self.normed = [torch.full((rows, hidden), float("nan"), **where) for _ in ranks.sums]

    def launch(self, rank: int) -> None:
        sums = self.ranks.sums[rank]
        if not self.norm:
            self.hidden[rank] = sums.sum_(self.given[rank])
            return
        self.hidden[rank], self.normed[rank] = sums.add_norm(
            self.given[rank], self.residual, self.weight, EPS, self.bias, self.offset
        )

    def check(self) -> None:
        """All ranks have the same bits, and those of the sum in the order of ranks."""
        total = torch.zeros(self.rows, self.ranks.hidden, device=self.ranks.device)
        for part in self.partial:
            total += part.float()
        expected = total.bfloat16()
        if self.norm:
            wide = expected.float()
            if self.bias is not None:
                wide = wide + self.bias.float()
            expected = (wide + self.residual.float()).bfloat16()
        for rank in range(len(self.partial)):
            assert same_bits(self.hidden[rank], expected), f"rank {rank}"
            assert same_bits(self.normed[rank], self.normed[0])
        if self.norm:
            self.check_norm(expected)
        assert self.ranks.are_empty()

    def check_norm(self, hidden: Tensor) -> None:
        """On a GPU the bits are those of Triton's kernel."""
        norm = add_norm if hidden.is_cuda else add_norm_reference
        _, expected = norm(hidden, None, self.weight, None, EPS, center=False, offset=self.offset)
        if hidden.is_cuda:
            assert same_bits(self.normed[0], expected)
        torch.testing.assert_close(self.normed[0], expected, rtol=2**-7, atol=1e-6)

    def run(self) -> None:
        self.ranks.each(self.launch)
        self.check()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.view(torch.int16).equal(b.view(torch.int16))


@on_both(
    *("ranks", "hidden", "rows", "ctas"),
    gpu=[
        (2, 4096, [65, 96, 128, 256, 512, 127, 1], 128),
        (2, 8192, [128, 256, 65], 128),
        (2, 2880, [512, 65, 300], 128),
        (3, 256, [65, 512], 128),
        (4, 4096, [128, 65], 128),
    ],
    small=[
        (2, 64, [3, 8, 1, 5], SMALL),
        (2, 4096, [65, 66], 64),
        (2, 1040, [3, 2], SMALL),
        (3, 256, [7, 2], SMALL),
        (4, 520, [3, 1], SMALL),
    ],
)
def test_all_ranks_have_the_sum(
    device: torch.device, ranks: int, hidden: int, rows: list[int], ctas: int
) -> None:
    """Launches of other numbers of rows, with the norm and without, follow each other."""
    torch.manual_seed(ranks)
    group = Ranks(ranks, hidden, device, max(rows), ctas)
    group.load(rows)
    for turn, count in enumerate([*rows, *rows]):
        Case(group, count, norm=False).run()
        if group.sums[0].norms:
            Case(group, count, norm=True, bias=turn % 2 == 0, offset=float(turn % 3 == 0)).run()


@on_both("rows", gpu=[(512,), (300,), (129,)], small=[(512,), (300,), (129,)])
def test_a_cta_may_have_several_rows(device: torch.device, rows: int) -> None:
    """Of a grid as large as on a GPU, where the last row of some CTAs is missing."""
    torch.manual_seed(rows)
    group = Ranks(2, 64, device, rows)
    group.load([rows])
    for _ in range(2):
        Case(group, rows, norm=False).run()


@on_both("norm", gpu=[(False,), (True,)], small=[(False,), (True,)])
def test_zeros_of_either_sign_arrive(device: torch.device, norm: bool) -> None:
    """A word of zeros says that nothing has come, and is not sent as such."""
    torch.manual_seed(0)
    group = Ranks(2, 256, device, 16, SMALL if device.type == "cpu" else peer_rows.CTAS)
    group.load([16])
    zero = torch.tensor([0.0, -0.0, 0.0, 1.0, float("inf")], device=device).bfloat16()
    for _ in range(4):
        picked = [torch.randint(5, (16, 256), device=device) for _ in range(2)]
        partial = [zero[each] for each in picked]
        for part in partial:
            part[3] = 0.0
            part[4] = -0.0
        Case(group, 16, norm=False, partial=partial).run()
        finite = [part.nan_to_num(posinf=2.0) for part in partial]
        if norm:
            Case(group, 16, norm=True, partial=finite).run()


@on_both("ranks", gpu=[(2,), (4,)], small=[(2,), (3,)])
def test_nan_arrives_and_stays(device: torch.device, ranks: int) -> None:
    """Whatever its bits are."""
    group = Ranks(ranks, 64, device, 8, SMALL if device.type == "cpu" else peer_rows.CTAS)
    group.load([8])
    for bits in (-1, 0x7FC1, 0x7FFF):
        nan = torch.full((8, 64), bits, dtype=torch.int16, device=device).view(torch.bfloat16)
        partial = [nan if rank == 1 else torch.ones_like(nan) for rank in range(ranks)]
        case = Case(group, 8, norm=False, partial=partial)
        group.each(case.launch)
        assert all(found.isnan().all() for found in case.hidden)
        assert all(same_bits(found, case.hidden[0]) for found in case.hidden)
        assert group.are_empty()


@emulated
@pytest.mark.parametrize(
    ("ranks", "hidden", "norm"), [(2, 64, False), (2, 512, True), (3, 64, False)]
)
@pytest.mark.parametrize("rows", [(4, 4, 4, 4, 4), (1, 4, 1, 3, 4), (4, 1, 4, 1, 4)])
def test_a_rank_may_be_a_launch_ahead(
    ranks: int, hidden: int, norm: bool, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has several launches, at its own pace, and waits for the others' words alone. Words
    of the launch after the next lie where those of this one are."""
    emulator.install(monkeypatch)
    torch.manual_seed(2)
    group = Ranks(ranks, hidden, torch.device("cpu"), 4, SMALL)
    source, macros = group.sums[0].work(4, norm=norm)
    monkeypatch.setattr(
        group.sums[0].__class__, "work", lambda self, rows, *, norm: (source, macros)
    )
    kernel = peer_rows.kernel(source, macros, group.device)
    for in_a_row in (5, 4, 3, 2):
        monkeypatch.setattr(kernel, "in_a_row", in_a_row)
        cases = [Case(group, count, norm=norm) for count in rows[:in_a_row]]

        def launch(rank: int, cases: list[Case] = cases) -> None:
            for case in cases:
                case.launch(rank)

        group.each(launch)
        for case in cases:
            case.check()


@emulated
@pytest.mark.parametrize(("ranks", "late"), [(2, 0), (2, 1), (3, 1)])
def test_a_rank_may_be_late(ranks: int, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any time: the others have sent all there is to send, and wait."""
    emulator.install(monkeypatch)
    torch.manual_seed(late)
    group = Ranks(ranks, 256, torch.device("cpu"), 4, SMALL)
    kernel = peer_rows.kernel(*group.sums[0].work(4, norm=True), group.device)
    monkeypatch.setattr(kernel, "late_rank", late)
    for in_a_row in (1, 3):
        monkeypatch.setattr(kernel, "in_a_row", in_a_row)
        cases = [Case(group, 4, norm=True) for _ in range(in_a_row)]

        def launch(rank: int, cases: list[Case] = cases) -> None:
            for case in cases:
                case.launch(rank)

        group.each(launch)
        for case in cases:
            case.check()


@on_both("ranks", gpu=[(2,)], small=[(2,)])
def test_launches_count_on_past_the_largest_number(device: torch.device, ranks: int) -> None:
    """Halves go on in turns, 0 is left out, and launches of no rows do not count."""
    torch.manual_seed(0)
    group = Ranks(ranks, 64, device, 4, SMALL if device.type == "cpu" else peer_rows.CTAS)
    group.load([4, 0])
    for each in group.sums:
        each.words.launches.fill_(-2)  # 2**32 - 2
    for rows in (1, 4, 0, 4, 4):
        Case(group, rows, norm=False).run()
    assert all((each.words.launches == 4).all() for each in group.sums)


class Steps:
    """Sums of two ranks that depend on each other: what one puts out, times a constant, goes into
    the next one."""

    COUNT, ROWS, FACTORS = 20, (96, 512, 65), (0.25, -0.125)

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        where: Any = {"device": ranks.device, "dtype": torch.bfloat16}
        most = max(self.ROWS)
        self.first = [torch.randn(most, ranks.hidden, **where) for _ in range(2)]
        self.parts = [part.clone() for part in self.first]
        self.last = self._expected()

    def reset(self) -> None:
        for part, first in zip(self.parts, self.first, strict=True):
            part.copy_(first)

    def launch(self, rank: int, turn: int) -> None:
        """One sum of the first rows. Takes no memory."""
        part = self.parts[rank][: self.ROWS[turn % len(self.ROWS)]]
        self.ranks.sums[rank].sum_(part)
        part.mul_(self.FACTORS[rank]).add_(1)

    def _expected(self) -> list[Tensor]:
        parts = [part.clone() for part in self.first]
        for turn in range(self.COUNT):
            rows = self.ROWS[turn % len(self.ROWS)]
            total = (parts[0][:rows].float() + parts[1][:rows].float()).bfloat16()
            for part, factor in zip(parts, self.FACTORS, strict=True):
                part[:rows] = (total * factor).add_(1)
        return parts


@pytest.mark.parametrize("captured", [pytest.param(x, marks=on_gpu) for x in (False, True)])
def test_ranks_run_at_their_own_pace(captured: bool) -> None:
    """The host waits for neither between the sums, with graphs or without; one of them is late."""
    torch.manual_seed(1)
    group = Ranks(2, 2048, torch.device("cuda"), max(Steps.ROWS), 64)  # all CTAs at once
    group.load(list(Steps.ROWS))
    steps = Steps(group)
    graphs: list[Any] = []
    for stream in group.streams if captured else ():
        rank, graph = len(graphs), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for turn in range(steps.COUNT):
                steps.launch(rank, turn)
        graphs.append(graph)
    for late in range(50):
        steps.reset()
        torch.cuda.synchronize()
        for turn in range(1 if captured else steps.COUNT):
            for rank, stream in enumerate(group.streams):
                with torch.cuda.stream(stream):
                    if rank == late % 2 and turn % 3 == late % 3:
                        torch.cuda._sleep(late * 10_000)  # cycles
                    graphs[rank].replay() if captured else steps.launch(rank, turn)
        torch.cuda.synchronize()
        for part, last in zip(steps.parts, steps.last, strict=True):
            assert same_bits(part, last)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--one-gpu"], marks=on_gpu, id="one GPU"),
        pytest.param([], marks=[*on_gpu, needs_two], id="two GPUs"),
    ],
)
def test_processes_have_the_bits_of_kernels_apart(options: list[str]) -> None:
    script = Path(__file__).parents[3] / "scripts" / "bench_peer_sum.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    subprocess.run(
        [
            *command,
            "--many-rows",
            "--hidden-sizes",
            "2880",
            "4096",
            "--rows",
            "65",
            "512",
            *options,
        ],
        env=child_environment(),
        check=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.parametrize(("hidden", "threads"), [(64, 32), (1024, 64), (2880, 256), (4096, 256)])
def test_a_row_has_the_threads_of_tritons_norm(hidden: int, threads: int) -> None:
    assert threads_of(hidden) == threads
    assert threads_of(8192) == 512 and threads_of(256) == 32


def test_what_does_not_fit_is_refused() -> None:
    capacity = peer_rows.capacity_of(2)
    memory = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(2))
    words = RowWords(0, memory, torch.zeros(1, dtype=torch.int32), capacity)
    assert peer_rows.why_not(4096, 512, words) is None
    assert peer_rows.why_not(8192, 256, words) is None
    assert "257 rows of 8192 are more" in str(peer_rows.why_not(8192, 257, words))
    assert "513 rows of 64 are more" in str(peer_rows.why_not(64, 513, words))
    assert "not a multiple of 8" in str(peer_rows.why_not(100, 65, words))
    assert peer_rows.capacity_of(5) == 0
    for ranks in (2, 3, 4):
        assert word_count(ranks, peer_rows.capacity_of(ranks)) * 8 <= 16 << 20, "bytes on each rank"
    with pytest.raises(ValueError, match="capacity 2000 must be a multiple of 256"):
        word_count(2, 2000)
