"""What rank 0 tells the others: it arrives as it was sent, in order, whoever sleeps."""

from __future__ import annotations

import os
import threading

import pytest
from msgspec.msgpack import encode as msgpack

from megatron_async.config.engine_config import EngineConfig
from megatron_async.config.testing_options import TestingOptions
from megatron_async.device.kernel_profiler import DeviceKernel
from megatron_async.device.protocol import Span
from megatron_async.errors import ConfigError, IntegrityError
from megatron_async.ranks import messages
from megatron_async.ranks.channel import RingReceiver, RingSender
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.ranks.messages import ANSWERS, MESSAGES, Done, Failed
from megatron_async.ranks.rendezvous.call import BEAT
from megatron_async.step.extras import Extras, SlotExtras
from megatron_async.step.plan import (
    Admission,
    BlockAssignment,
    Guess,
    Plan,
    PrefillChunk,
    RowMap,
    SlotUpdate,
    StateCopy,
)

EXTRAS = Extras(
    log_probs=1, min_p=0.1, stop_ids=(3, 4), bias=((5, -1.5),), allowed=(1, 2), banned=(9,),
    bad_words=((1, 2), (3, 4, 5)), guided=True,
)  # fmt: skip
COSTS = TestingOptions(speculative_step_costs=((1, 1, 0.5),))
VALUES = (0, 30, 0, (2, -1), 1.25, 0, 0.5, -(2**63))
PLAN = Plan(
    7,
    RowMap((3, 1), (0, 2), (10, 11), (2, 1)),
    1,
    (BlockAssignment(3, 0, 8),),
    (PrefillChunk(1, 1, 16, (4, 5, 6), True, (5, 6)),),
    (Admission(1, VALUES, SlotExtras(EXTRAS, 2, (4, 5)), (4,)),),
    (SlotUpdate(3, True, None), SlotUpdate(1, False, (0.1, 5, 0.2, 2**63 - 1))),
    True,
    2,
    1,
    "why",
    (StateCopy(1, 0, 16),),
    (StateCopy(3, 1, 32),),
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        messages.Launch(2, PLAN),
        messages.Launch(1, Plan(0, RowMap((0,), (0,), (0,)), 1, ())),
        messages.Sample(1, 7),
        messages.Masks(1, bytes(range(256)) * 3),
        messages.Guesses(1, [Guess(3, 17, ((4, 5, 6), ()))]),
        messages.LoadModel("tiny\0\n", EngineConfig(depth=2, testing=COSTS)),
        messages.PoisonFreed(1, [4, 5], []),
        messages.ReadShards(b"\0handles", False, True),
        messages.AwaitTensors([["decoder.weight", "bfloat16", [2, 3]]], True),
        messages.WakeUp(1, "kv_cache"),
        messages.Stop(),
    ],
)
def test_messages_arrive_as_they_were_sent(message: messages.Message) -> None:
    found = MESSAGES.decode(MESSAGES.encode(message))
    assert found == message and repr(found) == repr(message)


SPAN = Span("S H2D F", 4, 2**60, 2**60 + 1, 3)


@pytest.mark.parametrize(
    "answer",
    [
        Done(), Done("ConfigError", "why"), Failed("why"), messages.Now(2**62),
        messages.Timeline([SPAN], [SPAN, SPAN], [], [DeviceKernel("k", 1, 2)]),
    ],
)  # fmt: skip
def test_answers_arrive_as_they_were_given(answer: messages.Answer | Failed) -> None:
    data = ANSWERS.encode(answer)
    assert ANSWERS.decode(data) == answer and len(data) > len(BEAT)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'["os.system", "true"]',
        msgpack(["os.system", "true"]),
        msgpack(["Stop", "more"]),
        msgpack(["Sample", 1]),
        msgpack(["Sample", 1, "7"]),
        msgpack(["Launch", 1, list(range(14))]),
        b"\x91" * 10_000,
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        MESSAGES.decode(data)


def test_ring_hands_everything_to_sleepers_and_to_the_late() -> None:
    """More than the ring holds goes through it; who is late makes the sender wait."""
    sent = [bytes([n % 251]) * (1 + n * 37 % 900) for n in range(400)]
    wakes = [threading.Event(), threading.Event()]
    sender = RingSender(2, lambda place: wakes[place].set(), lambda: None, size=2000)
    receivers = [RingReceiver(os.dup(sender.descriptor), n, 2, wakes[n], 1e-5) for n in range(2)]
    found: list[list[bytes]] = [[], []]

    def read(place: int) -> None:
        found[place] = [receivers[place].receive() for _ in sent]

    threads = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for data in sent:
        sender.send(data)
    for thread in threads:
        thread.join()
    assert found == [sent, sent]
    with pytest.raises(IntegrityError, match="exceeds the ring"):
        sender.send(bytes(3000))
    for end in (sender, *receivers):
        end.close()


def test_layouts() -> None:
    assert Layout(2, 2).world_size == 4 and Layout(2, 2).sampling_ranks == (2, 3)
    assert Layout(1, 2, 2).world_size == 4 and Layout(1, 2, 2).sampling_ranks == (2,)
    assert Layout(2, 1, 4).listeners(1) == Layout(2, 1, 4).copies(1) == (1, 3)
    assert Layout(1, 2, 2).listeners(0) == (0, 1, 2, 3) and Layout(1, 2, 2).copies(0) == (2, 3)
    assert [Layout(2, 2).stage(rank) for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="multiple of tensor_model_parallel_size=2"):
        Layout(2, 1, 3)


@pytest.mark.parametrize(
    ("layout", "config", "reason"),
    [
        (Layout(2), EngineConfig(device="cuda:1"), "device='cuda:1' is one GPU"),
        (Layout(1, 2), EngineConfig(num_speculative_tokens=2), "speculative_method='ngram'"),
        (
            Layout(1, 2),
            EngineConfig(num_speculative_tokens=2, draft_model="tiny"),
            "pipeline_model_parallel_size",
        ),
    ],
)
def test_what_goes_with_no_layout_names_the_option(
    layout: Layout, config: EngineConfig, reason: str
) -> None:
    check_supported(Layout(), config)
    with pytest.raises(ConfigError, match=reason):
        check_supported(layout, config)
