"""Time sums over ranks: the kernel over each other's memory next to an all-reduce of NCCL and the
kernel that adds its sum to the residual stream.

    torchrun --nproc-per-node 2 scripts/bench_peer_sum.py
    python scripts/bench_peer_sum.py --streams 2
    torchrun --nproc-per-node 2 scripts/bench_peer_sum.py --one-gpu

Each number is the mean of calls in a CUDA graph, of the slowest rank. With ``--streams`` the ranks
are streams of one GPU: what a sum takes without NVLink, and without NCCL. With ``--one-gpu``
processes take turns on a GPU, and nothing is timed. Before, each result is compared with the sum
that torch computes, bit for bit. If it differs, or if the ranks do not reach each other's memory,
the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import padded
from megatron_async.kernels.norm.add_statistics import add_statistics
from megatron_async.kernels.ranks import peer_memory, peer_sum
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords, word_count

HIDDEN_SIZES, ROWS = (2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64)
CALLS, WARM_UP, REPLAYS = 64, 3, 20


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
        memory = tuple(
            torch.zeros(word_count(ranks, capacity), dtype=torch.int64, device="cuda")
            for _ in range(ranks)
        )
        self.words = [
            PeerWords(
                rank, memory, torch.zeros(peer_sum.CTAS, dtype=torch.int32, device="cuda"), capacity
            )
            for rank in range(ranks)
        ]
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


class Bench:
    """Sums of one size.

    Args:
        group: the ranks of this process.
    """

    def __init__(self, group: Streams | Processes, rows: int, hidden: int) -> None:
        self._group = group
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

    def _timed(self, calls: list[Callable[[], None]]) -> float:
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, help="ranks on one GPU, 2 to 8")
    parser.add_argument("--one-gpu", action="store_true", help="for processes of one GPU")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=HIDDEN_SIZES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    given = parser.parse_args(arguments)
    group: Streams | Processes
    if given.streams is not None:
        group = Streams(given.streams)
    else:
        group = Processes(one_gpu=given.one_gpu)
    shows, failed = group.words[0].rank == 0, False
    if shows:
        print(f"{group.words[0].ranks} ranks, microseconds of a call")
        print(f"{'hidden':>7} {'rows':>5} {'kernel':>8} {'all-reduce and addition':>24}")
    for hidden in given.hidden_sizes:
        for rows in given.rows:
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
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
