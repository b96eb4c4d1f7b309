"""Drafts of guided rows on their way to the host, and guesses on theirs to the device."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.runner.guided_drafts import GuidedDrafts, follow_guesses, packed
from megatron_async.step.extras import Extras, SlotExtras
from megatron_async.step.plan import Guess, Plan, RowMap
from tests.support.cuda_rings import CudaRingsDevice
from tests.support.guided_rows import play, workload
from tests.support.oracle import decode_alone

SLOTS, DRAFTS, ENTRIES = 6, 3, 3
GUIDED_SLOT = SlotExtras(Extras(guided=True), 1, (1,))


def plan(number: int, *windows: int) -> Plan:
    """Of row r in slot r."""
    rows = tuple(range(len(windows)))
    return Plan(number, RowMap(rows, rows, rows, windows), len(rows), (), window=4, extended=True)


class Rig:
    def __init__(self, kind: type[CpuDevice]) -> None:
        self.device = kind()
        self.tables: Any = SimpleNamespace(addresses=None, automata=None)
        self.state: Any = SimpleNamespace(
            drafts=torch.zeros(SLOTS + 1, DRAFTS, dtype=torch.int64),
            last_token=torch.zeros(SLOTS + 1, dtype=torch.int64),
            kv_length=torch.zeros(SLOTS + 1, dtype=torch.int64),
        )
        self.drafts = GuidedDrafts(self.device, self.state, ENTRIES, SLOTS, self.tables)
        self.drafts.admit(1, GUIDED_SLOT)

    def show(self, number: int) -> None:
        """A launch whose drafts are all ``number``."""
        self.device.enqueue(lambda: self.state.drafts.fill_(number), "S")
        self.drafts.show(plan(number, 4, 4))

    def take(self, number: int) -> list[int] | None:
        found = self.drafts.take(number)
        return None if found is None else sorted({int(each) for each in found.flatten()})


@pytest.fixture(params=(CpuDevice, CudaRingsDevice))
def rig(request: pytest.FixtureRequest) -> Any:
    made = Rig(request.param)
    yield made
    made.device.close()


def test_drafts_of_each_ticket_are_taken_as_often_as_asked(rig: Rig) -> None:
    for number in range(4 * ENTRIES):
        rig.show(number)
        assert rig.take(number) == [number] == rig.take(number)
        rig.drafts.leave(number)


def test_drafts_that_nobody_takes_make_room(rig: Rig) -> None:
    for number in range(0, 40, 2):
        for each in (number, number + 1):
            rig.show(each)
        if number % 3:
            assert rig.take(number) == [number]
        rig.drafts.leave(number)
        if number % 5:
            assert rig.take(number + 1) == [number + 1]
        rig.drafts.leave(number + 1)
    rig.device.synchronize()
    rig.drafts.restart()
    rig.drafts.admit(1, GUIDED_SLOT)
    rig.show(0)
    assert rig.take(0) == [0]


def test_a_graph_follows_the_guesses_of_its_launch_and_shows_what_comes_of_them(rig: Rig) -> None:
    """A launch after the other, with guesses and without, some of which nobody takes."""
    device, state, followed = rig.device, rig.state, 0
    between = device.capture(rig.drafts.work_between, "drafts")
    for number in range(1, 6 * ENTRIES):
        device.results_taken = number - 1  # type: ignore[attr-defined]

        def sampled(number: int = number) -> None:
            state.drafts.fill_(number)
            state.last_token.fill_(50)
            state.kv_length.fill_(9)

        device.enqueue(sampled, "S")
        right = number % 4
        if right in (1, 2):
            run = (49 + right, 91, 92)
            runs = ((), run) if number % 3 else (run,)
            guess = Guess(1, 8 if number % 3 else 9, runs)
            rig.drafts.guess(number - 1, (Guess(0, 9, ((1, 2),)), guess))
        rig.drafts.ride(plan(number, 4, 4), number - 1)
        between.replay()
        if number % 5:
            found = rig.drafts.take(number)
            assert found is not None
            wanted = [[number] * DRAFTS for _ in range(SLOTS + 1)]
            if right == 1:
                wanted[1][:2], followed = (91, 92), followed + 1
            assert found.tolist() == wanted
        rig.drafts.leave(number)
    assert followed >= 4


def test_only_drafts_of_guided_rows_with_windows_are_shown(rig: Rig) -> None:
    drafts = rig.drafts
    assert drafts.come_between(plan(0, 4, 4)) and drafts.come_between(plan(0, 1, 2))
    for windows in ((4, 1), (4,), ()):
        assert not drafts.come_between(plan(0, *windows))
        drafts.show(plan(0, *windows))
        assert drafts.take(0) is None
    drafts.admit(1, None)
    assert not drafts.come_between(plan(0, 4, 4))
    drafts.guess(3, (Guess(1, 4, ((7, 8),)),))
    assert drafts.come_between(plan(4, 1))
    drafts.leave(3)
    assert not drafts.come_between(plan(4, 1))


def test_they_say_nothing_of_the_steps_that_are_over() -> None:
    rig = Rig(CudaRingsDevice)
    device: Any = rig.device
    device.results_taken = 5
    for number in range(3):
        rig.show(number)
        assert device.results_taken == 5 and rig.take(number) == [number]
        rig.drafts.leave(number)
    rig.drafts.restart()
    assert device.results_taken == 5
    device.close()


@pytest.mark.parametrize("taken", (False, True))
@pytest.mark.parametrize("depth", (0, 2))
def test_an_interrupt_while_the_host_waits_for_drafts_loses_nothing(
    depth: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the drafts are taken, or just behind it: the next step goes on."""
    interrupted: list[int] = []
    take = GuidedDrafts.take

    def interrupted_take(self: GuidedDrafts, ticket: int) -> Any:
        ring = self._ring
        wait = ring.wait

        def interrupted_wait(number: int, width: int) -> Any:
            interrupted.append(ticket)
            if len(interrupted) % 5 == 3:
                if taken:
                    wait(number, width)
                raise KeyboardInterrupt
            return wait(number, width)

        ring.wait = interrupted_wait  # type: ignore[method-assign]
        try:
            return take(self, ticket)
        finally:
            del ring.wait

    monkeypatch.setattr(GuidedDrafts, "take", interrupted_take)
    asks, requests, _ = play(depth, ignore=(KeyboardInterrupt,))
    assert len(interrupted) > 10 and len(set(interrupted)) < len(interrupted)
    for ask, request in zip(asks, requests, strict=True):
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)


def test_guesses_are_followed_where_the_last_token_is_the_guessed_one() -> None:
    rng = random.Random(1)
    seen = {"followed": 0, "another token": 0, "another place": 0, "no run": 0}
    for _ in range(60):
        drafts = torch.tensor([[rng.randrange(9) for _ in range(DRAFTS)] for _ in range(SLOTS + 1)])
        last = torch.tensor([rng.randrange(2) for _ in range(SLOTS + 1)])
        length = torch.tensor([rng.randrange(20, 24) for _ in range(SLOTS + 1)])
        guesses = []
        for slot in rng.sample(range(SLOTS), rng.randrange(1, SLOTS)):
            runs = [
                tuple(rng.randrange(2) + 10 * n for n in range(rng.choice((0, 2, 3, 4, 9))))
                for _ in range(rng.randrange(1, 4))
            ]
            guesses.append(Guess(slot, rng.randrange(19, 23), tuple(runs)))
        wanted = drafts.tolist()
        for slot, before, tokens in guesses:
            place = int(length[slot]) - before
            if not 0 <= place < len(tokens):
                seen["another place"] += 1
            elif not tokens[place]:
                seen["no run"] += 1
            elif tokens[place][0] != last[slot]:
                seen["another token"] += 1
            else:
                following = tokens[place][1 : 1 + DRAFTS]
                wanted[slot][: len(following)] = following
                seen["followed"] += 1
        follow_guesses(drafts, last, length, torch.from_numpy(packed(guesses, 1 + DRAFTS)))
        assert drafts.tolist() == wanted
    assert min(seen.values()) > 5, seen


def test_the_workload_has_rows_of_both_kinds() -> None:
    kinds = [ask.regex is not None for ask in workload()]
    assert 0 < sum(kinds) < len(kinds)
