"""Who gets what the other ranks answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_async.errors import CheckpointError
from megatron_async.processes.call import Call
from megatron_async.ranks import channel
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.messages import ANSWERS, AskClock, Done, Now, ReadWeights
from tests.support.patience import PATIENCE_SECONDS


@pytest.fixture
def group_and_rank() -> Iterator[tuple[RankGroup, Call]]:
    own, other = socket.socketpair()
    rank, call = Call(other.detach()), Call(own.detach())
    group = RankGroup(Layout(2), channel.ConnectionSender([call.say]), {1: call}, {}, 0)
    yield group, rank
    rank.hang_up()
    group.close()


def test_a_thread_gets_the_answers_to_its_own_message(
    group_and_rank: tuple[RankGroup, Call],
) -> None:
    """New weights are read while another thread begins or ends a timeline."""
    group, rank = group_and_rank
    told, clock_is_known = threading.Event(), threading.Event()
    failed: list[CheckpointError] = []

    def read() -> None:
        group.tell(ReadWeights("a directory", False))
        told.set()
        clock_is_known.wait(PATIENCE_SECONDS)
        try:
            group.await_answers()
        except CheckpointError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert told.wait(PATIENCE_SECONDS)
    group.tell(AskClock())
    rank.say(ANSWERS.encode(Done("CheckpointError", "of another shape")))
    rank.say(ANSWERS.encode(Now(7)))
    ((said, _),) = group.await_answers().values()
    clock_is_known.set()
    thread.join(PATIENCE_SECONDS)
    assert said == Now(7) and "of another shape" in str(failed[0])


def test_answers_that_nobody_has_waited_for_are_not_the_next_ones(
    group_and_rank: tuple[RankGroup, Call],
) -> None:
    group, rank = group_and_rank
    group.tell(ReadWeights("a directory", False))  # rank 0 meets an error of its own meanwhile
    rank.say(ANSWERS.encode(Done("CheckpointError", "of another shape")))
    group.tell(AskClock())
    rank.say(ANSWERS.encode(Now(8)))
    ((said, _),) = group.await_answers().values()
    assert said == Now(8)
