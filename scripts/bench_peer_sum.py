"""Time sums over ranks: the kernel over each other's memory next to an all-reduce of NCCL and the
kernel that adds its sum to the residual stream.

    torchrun --nproc-per-node 2 scripts/bench_peer_sum.py
    python scripts/bench_peer_sum.py --streams 2
    torchrun --nproc-per-node 2 scripts/bench_peer_sum.py --one-gpu
    torchrun --nproc-per-node 2 scripts/bench_peer_sum.py --many-rows
    torchrun --nproc-per-node 8 scripts/bench_peer_sum.py --steps

Each number is the mean of calls in a CUDA graph, of the slowest rank. With ``--streams`` the ranks
are streams of one GPU: what a sum takes without NVLink, and without NCCL. With ``--one-gpu``
processes take turns on a GPU, and nothing is timed. Before, each result is compared with the sum
that torch computes, bit for bit. If it differs, or if the ranks do not reach each other's memory,
the exit status is 1.

With ``--many-rows`` a product is in front of each sum, and the residual addition and RMSNorm behind
it, as in a step whose layers are computed by their modules. The numbers are what all that takes
more than the product alone:

    words         zeros, ``peer_sum.py`` (two elements and a number in each word) and the norm
    all-reduce    NCCL's, and the norm
    rows          ``peer_rows.py``, and the norm
    rows, norm    ``peer_rows.py`` with the norm in the same kernel

With ``--steps`` it prints what sums take in one step and in two, as engines of three ranks and more
measure it when they start (``sum_costs.py``), and what they choose.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.gemm.tile_config import padded
from megatron_async.kernels.norm.add_norm import add_norm
from megatron_async.kernels.norm.add_statistics import add_statistics
from megatron_async.kernels.ranks import peer_memory, peer_rows, peer_sum, sum_costs
from megatron_async.kernels.ranks.peer_rows import PeerRows, RowWords
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords, word_count

HIDDEN_SIZES, ROWS = (2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64)
MANY_ROWS, DEPTHS = (65, 96, 128, 256, 512), (2048, 7168)
"""With ``--many-rows``; the latter are K of Llama-8B's halves."""
CALLS, WARM_UP, REPLAYS = 64, 3, 20
EPS = 1e-5


class Rows:
    """What one rank adds up.

    Args:
        rank, ranks: this one's place; all ranks draw the partial sums of all.
    """

    def __init__(self, rank: int, ranks: int, rows: int, hidden: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda").bfloat16()

        parts = [drawn(rows, hidden) for _ in range(ranks)]
        self.weight, self.residual = drawn(hidden), drawn(rows, hidden)
        self.partial, self.stream = parts[rank], self.residual.clone()
        self.scaled = torch.empty_like(self.stream)
        self.statistics = torch.empty(rows * hidden // 64 * 2, device="cuda")
        total = torch.zeros(rows, hidden, device="cuda")
        for part in parts:
            total += part.float()
        self.expected = (total + self.residual.float()).bfloat16()

    def by_kernel(self, sums: PeerSum) -> None:
        """One call of the kernel."""
        rows, hidden = self.stream.shape
        tiles = hidden // sums.statistic_rows
        sums(
            self.partial, self.stream, padded(rows), scaled=(self.weight, self.scaled),
            statistics=self.statistics[: rows * tiles * 2].view(rows, tiles, 2),
        )  # fmt: skip

    def by_all_reduce(self) -> None:
        """The same in two kernels."""
        rows = len(self.stream)
        dist.all_reduce(self.partial)
        add_statistics(
            self.partial, self.stream, self.stream, scaled=(self.weight, self.scaled),
            statistics=self.statistics[: rows * 2].view(rows, 1, 2),
        )  # fmt: skip

    def is_right(self) -> bool:
        """Whether the sum is right after the first call."""
        return self.stream.equal(self.expected) and self.scaled.equal(self.expected * self.weight)


class Streams:
    """All ranks of one GPU, each with a stream."""

    def __init__(self, ranks: int) -> None:
        capacity = peer_memory.MOST_ELEMENTS
        of_rows = peer_rows.capacity_of(ranks)

        def of_all(count: int) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(ranks))

        def launches(ctas: int) -> Tensor:
            return torch.zeros(ctas, dtype=torch.int32, device="cuda")

        memory = of_all(word_count(ranks, capacity))
        memory_of_rows = of_all(peer_rows.word_count(ranks, of_rows))
        self.words = [
            PeerWords(
                rank, memory, launches(peer_sum.CTAS), capacity, None,
                RowWords(rank, memory_of_rows, launches(peer_sum.LAUNCHES), of_rows)
                if of_rows else None,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]


class Processes:
    """This process's rank; the others are processes too.

    Args:
        one_gpu: they take turns on one, which NCCL does not let them do.
    """

    def __init__(self, *, one_gpu: bool) -> None:
        device = torch.device("cuda", 0 if one_gpu else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        if one_gpu:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("nccl", device_id=device)
        words = peer_memory.open_words(dist.group.WORLD, device)
        if words is None:
            sys.exit(f"the ranks do not add up over each other's memory; this one says: "
                     f"{peer_memory.why_not(dist.get_world_size(), device)}")  # fmt: skip
        self.words, self.streams = [words], [torch.cuda.Stream()]


class Timed:
    """Times what ranks do together.

    Args:
        group: the ranks of this process.
    """

    def __init__(self, group: Streams | Processes) -> None:
        self._group = group

    def _timed(self, calls: list[Callable[[], object]]) -> float:
        graphs = []
        for stream, call in zip(self._group.streams, calls, strict=True):
            graphs.append(torch.cuda.CUDAGraph())
            torch.cuda.synchronize()
            with torch.cuda.graph(graphs[-1], stream=stream):
                for _ in range(CALLS):
                    call()
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in graphs] for _ in range(2))
        self._replay(graphs, WARM_UP)
        self._meet()
        for stream, begin in zip(self._group.streams, begins, strict=True):
            begin.record(stream)
        self._replay(graphs, REPLAYS)
        for stream, end in zip(self._group.streams, ends, strict=True):
            end.record(stream)
        torch.cuda.synchronize()
        longest = max(map(torch.cuda.Event.elapsed_time, begins, ends))
        taken = torch.tensor(longest, device="cuda")
        if dist.is_initialized():
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return 1e3 * float(taken) / CALLS / REPLAYS

    def _replay(self, graphs: list[torch.cuda.CUDAGraph], count: int) -> None:
        for _ in range(count):
            for stream, graph in zip(self._group.streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()

    def _meet(self) -> None:
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
            torch.cuda.synchronize()


class Bench(Timed):
    """Sums of one size."""

    def __init__(self, group: Streams | Processes, rows: int, hidden: int) -> None:
        super().__init__(group)
        ranks = group.words[0].ranks
        self._rows = [Rows(words.rank, ranks, rows, hidden) for words in group.words]
        device = torch.device("cuda", torch.cuda.current_device())
        self._sums = [PeerSum(words, hidden, device) for words in group.words]
        none = torch.empty(0, hidden, dtype=torch.bfloat16, device="cuda")
        for sums in self._sums:  # loaded, while no kernel waits
            sums(
                none, none, padded(rows), statistics=torch.empty(0, device="cuda"),
                scaled=(none, none),
            )  # fmt: skip

    def is_right(self) -> bool:
        """Whether all ranks of this process have the sum."""
        self._meet()
        for stream, rows, sums in zip(self._group.streams, self._rows, self._sums, strict=True):
            with torch.cuda.stream(stream):
                rows.by_kernel(sums)
        torch.cuda.synchronize()
        return all(rows.is_right() for rows in self._rows)

    def kernel(self) -> float:
        """Microseconds of a call."""
        pairs = zip(self._rows, self._sums, strict=True)
        return self._timed([partial(rows.by_kernel, sums) for rows, sums in pairs])

    def all_reduce(self) -> float:
        """Microseconds of an all-reduce and the addition; between processes."""
        for rows in self._rows:
            rows.by_all_reduce()
            rows.partial.zero_()  # sums of sums would not stay finite
        return self._timed([rows.by_all_reduce for rows in self._rows])


class ManyRows:
    """What one rank computes: a product, the sum over ranks, the residual addition and the norm.

    Args:
        words: of the rank; all ranks draw the partial sums of all.
    """

    def __init__(self, words: PeerWords, rows: int, hidden: int, depth: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda").bfloat16()

        parts = [drawn(rows, hidden) for _ in range(words.ranks)]
        self._part = parts[words.rank]
        self._partial = torch.empty_like(self._part)
        self._residual, self._norm_weight = drawn(rows, hidden), drawn(hidden)
        self._x, self._weight = drawn(rows, depth), drawn(hidden, depth) / 64
        self._capacity_for = 1 << (rows - 1).bit_length()
        device = self._part.device
        self._words = PeerSum(words, hidden, device)
        self._rows = None if words.of_rows is None else PeerRows(words.of_rows, hidden, device)
        total = torch.zeros(rows, hidden, device="cuda")
        for part in parts:
            total += part.float()
        expected = (total.bfloat16().float() + self._residual.float()).bfloat16()
        self._expected = expected, self._normed(expected, None)[1]

    def ways(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        """By name what adds up over ranks and norms; each returns the stream and its norm."""
        found: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
        if self._words.why_not(self._capacity_for) is None:
            found["words"] = self._by_words
        if dist.is_initialized() and dist.get_backend() == "nccl":
            found["all-reduce"] = self._by_all_reduce
        if self._rows is not None and self._rows.why_not(len(self._part)) is None:
            found["rows"] = self._by_rows
            if self._rows.norms:
                found["rows, norm"] = self._by_rows_with_norm
        return found

    def load(self) -> None:
        """Nothing may be loaded or allocated while a kernel waits for another rank's."""
        device, rows = self._part.device, len(self._part)
        kept = [torch.zeros_like(self._partial) for _ in range(4)]
        self.multiply()
        self._normed(self._partial, self._residual)
        del kept
        if "words" in self.ways():
            cuda.kernel(*self._words.work(self._capacity_for, 0), device)
        for norm in (False, True):
            if self._rows is not None:
                cuda.kernel(*self._rows.work(rows, norm=norm), device)

    def multiply(self) -> None:
        """The product, to where the partial sums are."""
        torch.mm(self._x, self._weight.t(), out=self._partial)

    def is_right_later(self, way: str) -> Callable[[], bool]:
        """Go this way with the drawn partial sums; returns what says whether the bits are those of
        the kernels apart, to be asked when all ranks are through."""
        self._partial.copy_(self._part)
        found = self.ways()[way]()
        return lambda: all(map(torch.equal, found, self._expected))

    def _normed(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, self._norm_weight, None, EPS, center=False)

    def _by_words(self) -> tuple[Tensor, Tensor]:
        total = torch.zeros_like(self._partial)
        self._words(self._partial, total, self._capacity_for)
        return self._normed(total, self._residual)

    def _by_all_reduce(self) -> tuple[Tensor, Tensor]:
        dist.all_reduce(self._partial)
        return self._normed(self._partial, self._residual)

    def _by_rows(self) -> tuple[Tensor, Tensor]:
        assert self._rows is not None
        return self._normed(self._rows.sum_(self._partial), self._residual)

    def _by_rows_with_norm(self) -> tuple[Tensor, Tensor]:
        assert self._rows is not None
        return self._rows.add_norm(self._partial, self._residual, self._norm_weight, EPS)


class ManyBench(Timed):
    """All ways for one size."""

    def __init__(self, group: Streams | Processes, rows: int, hidden: int, depth: int) -> None:
        super().__init__(group)
        self._ranks = [ManyRows(words, rows, hidden, depth) for words in group.words]
        for stream, rank in zip(group.streams, self._ranks, strict=True):
            with torch.cuda.stream(stream):
                rank.load()
        torch.cuda.synchronize()
        self.ways = list(self._ranks[0].ways())

    def is_right(self, way: str) -> bool:
        """Whether all ranks of this process have the right bits, twice. NCCL's have others where it
        adds up more than two ranks."""
        if way == "all-reduce" and self._group.words[0].ranks > 2:
            return True
        right = []
        for _ in range(2):
            self._meet()
            found = []
            for stream, rank in zip(self._group.streams, self._ranks, strict=True):
                with torch.cuda.stream(stream):
                    found.append(rank.is_right_later(way))
            torch.cuda.synchronize()
            right += [check() for check in found]
        return all(right)

    def product(self) -> float:
        """Microseconds of the product alone."""
        return self._timed([rank.multiply for rank in self._ranks])

    def way(self, name: str) -> float:
        """Microseconds of the product and what is behind it."""

        def both(rank: ManyRows) -> None:
            rank.multiply()
            rank.ways()[name]()

        return self._timed([partial(both, rank) for rank in self._ranks])


def compare_ways(
    group: Streams | Processes, hidden_sizes: Sequence[int], rows: Sequence[int], *, times: bool
) -> bool:
    """Print what each way takes behind a product; returns whether all were right."""
    all_ways = "words", "all-reduce", "rows", "rows, norm"
    shows, right = group.words[0].rank == 0, True
    if shows:
        print(f"{group.words[0].ranks} ranks, microseconds of a call behind the product")
        titles = " ".join(f"{way:>11}" for way in all_ways)
        print(f"{'hidden':>7} {'depth':>6} {'rows':>5} {'product':>8} {titles}")
    for hidden in hidden_sizes:
        for depth in DEPTHS:
            for count in rows:
                bench = ManyBench(group, count, hidden, depth)
                wrong = [way for way in bench.ways if not bench.is_right(way)]
                right &= not wrong
                cells = ["-"] * (1 + len(all_ways))
                if times:
                    alone = bench.product()
                    cells = [f"{alone:.2f}"] + [
                        f"{bench.way(way) - alone:.2f}" if way in bench.ways else "-"
                        for way in all_ways
                    ]
                if shows or wrong:
                    line = " ".join(f"{cell:>11}" for cell in cells[1:])
                    note = f" WRONG: {', '.join(wrong)}" if wrong else ""
                    print(f"{hidden:7} {depth:6} {count:5} {cells[0]:>8} {line}{note}", flush=True)
    return right


def compare_with_all_reduce(group: Streams | Processes, given: argparse.Namespace) -> bool:
    """Print what sums take; returns whether all were right."""
    shows, failed = group.words[0].rank == 0, False
    if shows:
        print(f"{group.words[0].ranks} ranks, microseconds of a call")
        print(f"{'hidden':>7} {'rows':>5} {'kernel':>8} {'all-reduce and addition':>24}")
    for hidden in given.hidden_sizes or HIDDEN_SIZES:
        for rows in given.rows or ROWS:
            reason = peer_sum.why_not(hidden, padded(rows), group.words[0])
            if reason is not None:
                if shows:
                    print(reason)
                continue
            bench = Bench(group, rows, hidden)
            is_right = bench.is_right()
            failed |= not is_right
            taken = "       -" if given.one_gpu else f"{bench.kernel():8.2f}"
            other = ""
            if given.streams is None and not given.one_gpu:
                other = f"{bench.all_reduce():24.2f}"
            if shows or not is_right:
                note = "" if is_right else "WRONG"
                print(f"{hidden:7} {rows:5} {taken} {other}", note, flush=True)
    return not failed


def show_steps(words: PeerWords) -> None:
    """Print what each rank finds, and the seconds that it takes."""
    begun = time.monotonic()
    timed = sum_costs.TimedSums(words, torch.device("cuda", torch.cuda.current_device()))
    loaded = time.monotonic() - begun
    dist.barrier()
    begun = time.monotonic()
    costs = timed.costs()
    took = f"{loaded:.2f} s to load, {time.monotonic() - begun:.2f} s to measure"
    print(f"rank {words.rank} of {words.ranks}, {took}: {sum_costs.shown(costs)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, help="ranks on one GPU, 2 to 8")
    parser.add_argument("--one-gpu", action="store_true", help="for processes of one GPU")
    parser.add_argument("--many-rows", action="store_true", help="sums between product and norm")
    parser.add_argument("--steps", action="store_true", help="one step and two, as at a start")
    parser.add_argument("--hidden-sizes", type=int, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+")
    given = parser.parse_args(arguments)
    if given.steps and given.streams is not None:
        parser.error("--steps needs ranks in processes: start it by torchrun, without --streams")
    group: Streams | Processes
    if given.streams is not None:
        group = Streams(given.streams)
    else:
        group = Processes(one_gpu=given.one_gpu)
    if given.steps:
        show_steps(group.words[0])
        right = True
    elif given.many_rows:
        right = compare_ways(
            group, given.hidden_sizes or (4096,), given.rows or MANY_ROWS, times=not given.one_gpu
        )
    else:
        right = compare_with_all_reduce(group, given)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
