"""Whether sums over ranks have one step or two: measured where ranks meet, alike on all of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.errors import ConfigError
from megatron_async.kernels.ranks import peer_memory, peer_sum, sum_costs
from megatron_async.kernels.ranks.peer_sum import PeerSum, PeerWords
from megatron_async.kernels.ranks.sum_costs import SumCost, shown, two_steps_from
from megatron_async.models.fused.blocks.rank_sums import RankSums
from tests.support import emulator
from tests.support.child_environment import child_environment
from tests.support.cuda_kernels import emulated, on_gpu
from tests.support.patience import PATIENCE_SECONDS
from tests.unit.kernels.test_peer_sum import Case, Ranks

CPU = torch.device("cpu")
HIDDEN, ROWS = 256, (1, 2, 4, 8)
QUICK, SLOW = 5.0, 9.0
"""Microseconds, further apart than a GEMM that sends saves."""


def of_rows(one: tuple[float, ...], two: tuple[float, ...]) -> list[SumCost]:
    """Of 4,096 columns and 8 rows, 16, and so on."""
    sizes = [(8 << number) * 4096 for number in range(len(one))]
    return [SumCost(*each) for each in zip(sizes, one, two, strict=True)]


@pytest.mark.parametrize(
    ("one", "two", "rows"),
    [
        ((5.0, 6.0, 8.0, 12.0), (6.5, 6.6, 6.8, 7.5), 64),
        ((5.0, 6.0, 8.1, 12.0), (6.5, 6.6, 6.8, 7.5), 32),
        ((9.0, 12.0, 18.0, 30.0), (7.0, 7.0, 8.0, 9.0), 8),
        ((5.0, 5.5, 6.0, 7.0), (6.5, 6.6, 6.8, 7.5), None),
        ((9.0, 5.0, 8.5, 12.0), (6.5, 6.6, 6.8, 7.5), 32),
        ((9.0, 9.0, 9.0, 8.0), (6.5, 6.6, 6.8, 7.5), None),
        ((), (), None),
    ],
    ids=["from 64", "at once from 32", "always", "never", "one is slow", "not at the end", "none"],
)
def test_two_steps_from_where_they_are_quicker_up_to_the_end(
    one: tuple[float, ...], two: tuple[float, ...], rows: int | None
) -> None:
    """By more than a GEMM saves that sends. A size that is alone in it was disturbed."""
    costs = of_rows(one, two)
    found = two_steps_from(costs)
    assert found == (None if rows is None else rows * 4096)
    assert two_steps_from(costs[::-1]) == found


def test_costs_and_choice_are_a_line() -> None:
    costs = of_rows((5.04, 12.0), (6.5, 7.5))
    assert shown(costs) == (
        "us in one step and in two, by rows of 4096: 8: 5.0 and 6.5, 16: 12.0 and 7.5; "
        "two steps from 65536 elements on"
    )
    assert shown(costs[:1]).endswith("8: 5.0 and 6.5; one step always")


def test_sums_have_the_steps_that_their_words_say() -> None:
    memory = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4))
    words = PeerWords(0, memory, torch.zeros(1, dtype=torch.int32), 64 * 4096)
    for least, steps in ((None, [1, 1, 1]), (32 * 4096, [1, 2, 2]), (0, [2, 2, 2])):
        chosen = words._replace(two_steps_from=least)
        sums = PeerSum(chosen, 4096, CPU)
        assert [sums.steps(rows) for rows in (16, 32, 64)] == steps
        assert [sums.work(rows, 1)[1]["STEPS"] for rows in (16, 32, 64)] == steps
        # A GEMM sends in one step, to all.
        assert [sums.takes_sent(rows) for rows in (16, 32, 64)] == [each == 1 for each in steps]
        assert PeerSum(chosen, 4096, CPU, steps=1).steps(64) == 1
        of_step = RankSums(lambda x: None, chosen, 4096, CPU)
        context: Any = type("Context", (), {"grids_may_wait": True})
        assert (of_step.summing(32, context) is None) == (steps[1] == 2)
        assert (of_step.sending(32) is None) == (steps[1] == 2)
    wide = PeerSum(words._replace(two_steps_from=32 * 4096), 8192, CPU)
    assert [wide.steps(rows) for rows in (8, 16)] == [1, 2], "elements count, not rows"


# --- ranks that measure ------------------------------------------------------------------------


class Meeting:
    """Ranks that are threads of this process: each waits where the others must come.

    Attributes:
        launched: what each has launched, in order: rows and steps.
        events: what happened, of all of them.
    """

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = ranks
        self.rank = threading.local()
        self.launched: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.events: list[str] = []
        self._said: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE_SECONDS)
        self._lock = threading.RLock()
        monkeypatch.setattr(sum_costs, "HIDDEN_SIZE", HIDDEN)
        monkeypatch.setattr(sum_costs, "ROWS", ROWS)
        monkeypatch.setattr(sum_costs, "_Graph", self.graph)
        monkeypatch.setattr(peer_sum, "CTAS", 1)
        monkeypatch.setattr(PeerSum, "__call__", self._at_once(PeerSum.__call__))
        monkeypatch.setattr(PeerSum, "load", self._loading(PeerSum.load))
        monkeypatch.setattr(peer_memory.dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(peer_memory.dist, "all_gather_object", self._gather)

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """``call`` on each rank, in a thread of its own."""

        def of_rank(rank: int) -> Any:
            self.rank.number = rank
            try:
                return call(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            begun = [pool.submit(of_rank, rank) for rank in range(self.ranks)]
        return [each.result() for each in begun]

    def graph(self, add_up: Callable[[], None], device: torch.device) -> Any:
        """In the place of a captured sum: it runs, and then the clock says what it is to say."""
        meeting, (way, rows) = self, add_up.args  # type: ignore[attr-defined]
        two = way.steps(rows) == 2

        class Graph:
            def us(self) -> float:
                meeting.events.append("begun")
                add_up()
                # Two steps are quicker from 4 rows on, for the first rank. Others see it otherwise.
                return QUICK if two == ((rows >= 4) == (meeting.rank.number == 0)) else SLOW

        return Graph()

    def _gather(self, said: list[Any], own: Any, group: Any) -> None:
        self._said[self.rank.number] = own
        self._barrier.wait()
        said[:] = self._said
        self._barrier.wait()

    def _loading(self, load: Callable[..., None]) -> Callable[..., None]:
        def loading(kernel: PeerSum, *given: Any) -> None:
            with self._lock:
                load(kernel, *given)
                self.events.append("loaded")

        return loading

    def _at_once(self, sum_up: Callable[..., None]) -> Callable[..., None]:
        """In the emulator kernels run with the last rank's launch."""

        def launched(kernel: PeerSum, *given: Any, **options: Any) -> None:
            rank, rows = kernel.words.rank, given[2]
            with self._lock:
                self.launched[rank].append((rows, kernel.steps(rows)))
            self._barrier.wait()
            with self._lock:
                sum_up(kernel, *given, **options)
            self._barrier.wait()

        return launched


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Meeting]:
    def made(ranks: int) -> Meeting:
        emulator.install(monkeypatch)
        return Meeting(ranks, monkeypatch)

    return made


def choosing(ranks: Ranks) -> Callable[[int], PeerWords]:
    return lambda rank: peer_memory._choosing_steps(ranks.sums[rank].words, None, CPU)


@emulated
@pytest.mark.parametrize("ranks", (3, 4, 8))
def test_all_ranks_measure_in_one_order_and_the_first_ones_times_count(
    ranks: int, meet: Callable[[int], Meeting], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(ranks)
    group, meeting = Ranks(ranks, HIDDEN, CPU, 8 * HIDDEN, ctas=1), meet(ranks)
    with caplog.at_level("INFO", peer_memory.logger.name):
        chosen = meeting.run(choosing(group))
    assert [words.two_steps_from for words in chosen] == [4 * HIDDEN] * ranks
    rounds = [(rows, steps) for rows in ROWS for _ in range(sum_costs.ROUNDS) for steps in (1, 2)]
    assert meeting.launched == [rounds] * ranks
    loaded = [number for number, what in enumerate(meeting.events) if what == "loaded"]
    assert len(loaded) == 2 * len(ROWS) * ranks
    assert "begun" not in meeting.events[: loaded[-1]], "nobody waits while another one loads"
    (line,) = [each.message for each in caplog.records if each.name == peer_memory.logger.name]
    assert line.startswith(
        f"sums over {ranks} ranks: us in one step and in two, by rows of 256: 1:"
    )
    assert line.endswith("4: 9.0 and 5.0, 8: 9.0 and 5.0; two steps from 1024 elements on")
    counted = [words.launches.tolist() for words in chosen]
    assert counted == [[len(rounds)]] * ranks

    group.sums = [PeerSum(words, HIDDEN, CPU, ctas=1) for words in chosen]
    meeting.launched = [[] for _ in range(ranks)]
    for rows in (8, 1, 4, 2):
        case = Case(group, rows, "rms", bias=rows == 4)
        group.padded = lambda rows: rows  # type: ignore[method-assign]
        meeting.run(case.launch)
        case.check()
    assert meeting.launched == [[(8, 2), (1, 1), (4, 2), (2, 1)]] * ranks


@emulated
def test_sums_of_one_step_and_of_two_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.install(monkeypatch)
    found = []
    for steps in (1, 2):
        torch.manual_seed(0)
        group = Ranks(4, HIDDEN, CPU, 8 * HIDDEN, ctas=1, threads=32, steps=steps)
        case = Case(group, 7, "rms", bias=True)
        case.run()
        found.append((*case.streams, *case.scaled, *case.statistics))
    assert all(map(torch.equal, *found))


def test_of_two_ranks_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where ranks do not reach each other."""
    memory = (torch.zeros(1, dtype=torch.int64),) * 2
    words = PeerWords(0, memory, torch.zeros(1, dtype=torch.int32), 256)
    monkeypatch.setattr(sum_costs, "TimedSums", None)
    for ranks, opened in ((2, words), (2, None), (4, None)):
        monkeypatch.setattr(peer_memory.dist, "get_world_size", lambda group, n=ranks: n)
        monkeypatch.setattr(peer_memory, "_open", lambda *_, found=opened: found)
        assert peer_memory.open_words(None, torch.device("cuda")) is opened
    assert words.two_steps_from is None


@emulated
def test_a_rank_whose_kernels_do_not_compile_ends_the_start(
    meet: Callable[[int], Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is not a reason for NCCL, of which the others would know nothing."""
    group, meeting = Ranks(4, HIDDEN, CPU, 8 * HIDDEN, ctas=1), meet(4)
    load = PeerSum.load

    def loading(kernel: PeerSum, *given: Any) -> None:
        if kernel.words.rank == 2:
            raise ConfigError("peer_sum.cu does not compile")
        load(kernel, *given)

    monkeypatch.setattr(PeerSum, "load", loading)
    monkeypatch.setattr(peer_memory, "_open", lambda *_: group.sums[meeting.rank.number].words)
    errors: list[BaseException] = []

    def opened(rank: int) -> None:
        try:
            peer_memory.open_words(None, CPU)
        except BaseException as error:
            errors.append(error)
            raise

    with pytest.raises((ConfigError, threading.BrokenBarrierError)):
        meeting.run(opened)
    assert sorted(type(error).__name__ for error in errors) == [
        *["BrokenBarrierError"] * 3, "ConfigError",
    ]  # fmt: skip
    assert meeting.launched == [[]] * 4, "no kernel waits for the rank that has none"


@pytest.mark.parametrize(
    ("ranks", "gpus", "options"),
    [
        pytest.param(2, 1, ["--one-gpu", "--steps"], marks=on_gpu),
        pytest.param(4, 1, ["--one-gpu", "--rows", "1", "32"], marks=on_gpu),
        pytest.param(2, 2, ["--steps"], marks=on_gpu),
        pytest.param(4, 4, ["--rows", "1", "16", "64"], marks=on_gpu),
    ],
)
def test_processes_measure_and_add_up(ranks: int, gpus: int, options: list[str]) -> None:
    """Four of them measure when they meet. What they have chosen gives the right bits."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    script = Path(__file__).parents[3] / "scripts" / "bench_peer_sum.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    subprocess.run(
        [*command, str(script), "--hidden-sizes", "4096", *options],
        env=child_environment(),
        check=True,
        timeout=PATIENCE_SECONDS,
    )
