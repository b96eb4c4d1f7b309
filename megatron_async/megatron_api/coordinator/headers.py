"""What messages between clients and a coordinator begin with, in each release of megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from megatron_async.megatron_compat import installed


class Headers(IntEnum):
    """Kinds of messages, with the numbers that megatron-core has since 0.19. Those from 100 on are
    ours, and 0.16's."""

    CONNECT = 0
    CONNECT_ACK = 1
    SUBMIT_REQUEST = 20
    ENGINE_REPLY = 21
    ENGINE_REPLY_PARTIAL = 22
    ABORT_REQUEST = 23
    SUBMIT_REQUEST_WITH_KV = 24
    RELEASE_KV = 25
    SEND_KV = 26
    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    SET_GENERATION_EPOCH = 44
    STOP = 45
    START_CUDA_PROFILER = 46
    STOP_CUDA_PROFILER = 47
    DISCONNECT = 60
    SHUTDOWN = 61
    TP_BROADCAST = 80
    KV_HANDOFF_COMPLETE = 81
    PAUSE_ACK = 100
    STOP_ACK = 101
    OUTCOME = 102
    """To our own client: what became of a signal."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the clients of some releases talk.

    Attributes:
        since: minor number of the first release, 0.``since``.
        numbers: of each kind of message.
        is_ours: the client is :class:`~megatron_async.megatron_api.InferenceClient`.
    """

    since: int
    numbers: Mapping[Headers, int]
    is_ours: bool = False

    def header(self, number: object) -> Headers | None:
        """The kind of a message; None if there is none of this number."""
        found = (header for header, known in self.numbers.items() if known == number)
        return next(found, None)


def _counted(names: str) -> dict[Headers, int]:
    return {Headers[name]: number for number, name in enumerate(names.split(), 1)}


OF_0_16 = Dialect(
    16,
    _counted(
        "CONNECT CONNECT_ACK SUBMIT_REQUEST ENGINE_REPLY PAUSE PAUSE_ACK UNPAUSE SUSPEND RESUME "
        "STOP STOP_ACK"
    ),
)
OF_0_17 = Dialect(
    17,
    _counted(
        "CONNECT CONNECT_ACK SUBMIT_REQUEST ENGINE_REPLY PAUSE UNPAUSE SUSPEND RESUME "
        "SET_GENERATION_EPOCH STOP DISCONNECT SHUTDOWN TP_BROADCAST"
    ),
)
OF_0_19 = Dialect(19, {header: header.value for header in Headers if header < Headers.PAUSE_ACK})
OURS = Dialect(19, {header: header.value for header in Headers}, is_ours=True)
OUR_NAME = "megatron_async"
"""What our client adds to the message that connects it."""


def dialect_of(first: list[object]) -> Dialect | None:
    """How a client talks, by its first message; None if that does not connect it. Releases 0.16 and
    0.17 begin alike, so the installed one decides between them."""
    if first == [OURS.numbers[Headers.CONNECT], OUR_NAME]:
        return OURS
    if first == [OF_0_19.numbers[Headers.CONNECT]]:
        return OF_0_19
    if first == [OF_0_17.numbers[Headers.CONNECT]]:
        return OF_0_17 if installed().since(17) else OF_0_16
    return None
