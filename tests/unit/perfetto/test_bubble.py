"""The bubble of a pipeline, from the timelines of its stages."""

from __future__ import annotations

import pytest

from megatron_async.device.protocol import Span
from megatron_async.perfetto.bubble import Stage, bubble, by_stage, said
from megatron_async.ranks.timelines import RankTimeline


def launch(name: str, ticket: int, start: int, end: int, sampled: int = -1) -> Span:
    return Span(name, ticket, start, end, sampled)


FIRST = [
    launch("H2D F", 0, 0, 10),
    launch("H2D F", 1, 10, 20),
    launch("T H2D F", 2, 22, 40, sampled=0),
    launch("T H2D F", 3, 40, 50, sampled=1),
]
LAST = [
    launch("H2D F", 0, 4, 20),
    launch("S H2D F", 1, 30, 38, sampled=0),
    launch("S H2D F", 2, 38, 50, sampled=1),
]


def test_a_stage_idles_between_launches_and_while_it_waits_for_another_one() -> None:
    """From 4 to 50: the first stage pauses from 20 to 22, and F2 begins with T0, which the last
    stage samples from 30 on. That one waits for F0 until 10, pauses from 20 to 30, and waits for F2
    until 40."""
    assert bubble([Stage(FIRST), Stage(LAST)]) == pytest.approx([10 / 46, (6 + 10 + 2) / 46])


def test_received_messages_are_timed_where_they_are_seen() -> None:
    receives = [Span("receive", -1, 5, 9), Span("send", -1, 9, 10), Span("receive", -1, 39, 60)]
    found = bubble([Stage(FIRST), Stage(LAST, receives)])
    assert found == pytest.approx([10 / 46, (10 + 4 + 11) / 46])


def test_what_began_before_is_left_out() -> None:
    """From 30 to 50: the first stage is in F2 and F3, the last one waits for F2 until 40."""
    assert bubble([Stage(FIRST), Stage(LAST)], 22) == pytest.approx([0, 2 / 20])


@pytest.mark.parametrize("stages", [[FIRST], [FIRST, []], [FIRST, [launch("H2D F", 0, 60, 70)]]])
def test_too_little_tells_nothing(stages: list[list[Span]]) -> None:
    assert bubble([Stage(each) for each in stages]) is None


def test_the_first_rank_of_a_stage_stands_for_it() -> None:
    others = [RankTimeline(1, 0, [], [], []), RankTimeline(2, 1, [], LAST, [LAST[0]])]
    others.append(RankTimeline(3, 1, [], [], []))
    assert by_stage(Stage(FIRST), others) == [Stage(FIRST), Stage(LAST, [LAST[0]])]


def test_it_is_said_by_stage() -> None:
    assert said([0.125, 0.03]) == "stage 0 12.5 %, stage 1 3.0 %"
