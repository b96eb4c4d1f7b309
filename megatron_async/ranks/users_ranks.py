"""The link between ranks that are all processes of the user's: the model is divided already, and
torch.distributed stays as it is."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_async.errors import RankDiedError
from megatron_async.models.parallel import ModelParallel
from megatron_async.processes.call import Call
from megatron_async.ranks.channel import ConnectionSender, Sender
from megatron_async.ranks.follower import SPIN_SECONDS, Group
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.messages import Message, Ready, Where
from megatron_async.ranks.rendezvous.call import LAST, Line
from megatron_async.ranks.rendezvous.meeting import accept_all, connect
from megatron_async.ranks.rendezvous.shared import Shared
from megatron_async.ranks.start import Common

APART_SECONDS = 600.0
"""For the users of all ranks to make the same call, as long as torch's collectives wait."""

_engines: Counter[str] = Counter()
"""Links of this process until now, by the ranks that they are among."""


class UsersRanks(RankGroup):
    """Rank 0's hold on the others, which its user has started, and which outlive it.

    Attributes:
        calling: the call that rank 0's user is in; empty between two.
    """

    def __init__(
        self,
        place: ModelParallel,
        sender: Sender,
        calls: dict[int, Call],
        timeout_seconds: float,
        folder: str | None,
    ) -> None:
        self.calling = ""
        self._told = 0
        self._apart: dict[int, float] = {}
        self._ready: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        super().__init__(place.layout, sender, calls, {}, timeout_seconds, folder, place)

    def tell(self, message: Message) -> None:
        super().tell(message)
        self._told += 1

    def await_ready(self) -> dict[int, bytes]:
        """Wait until all build their engines; the sizes of their caches by rank.

        Raises:
            RankDiedError: one has died, or does not come.
        """
        found: dict[int, bytes] = {}
        until = time.monotonic() + APART_SECONDS
        while len(found) < len(self._calls):
            try:
                rank, sizes = self._ready.get(timeout=0.1)
                found[rank] = sizes
            except queue.Empty:
                self.check()
                if time.monotonic() > until:
                    missing = min(self._calls.keys() - found.keys())
                    raise RankDiedError(
                        f"rank {missing} of the model builds no engine; build it on all ranks"
                    ) from None
        return found

    def _heard(self, rank: int, said: object) -> None:
        if isinstance(said, Ready):
            self._ready.put((rank, said.sizes))
            return
        assert isinstance(said, Where)
        if not self.calling or said.call or said.taken >= self._told:
            self._apart.pop(rank, None)
        else:
            now = time.monotonic()
            seconds = now - self._apart.setdefault(rank, now)
            if seconds > APART_SECONDS:
                self._died(
                    rank,
                    f"makes no call of the engine for {seconds:.0f} s, while rank 0 waits in "
                    f"{self.calling}(); its last one was {said.last}(): make the same calls on all "
                    "ranks, or close() it there while rank 0 alone makes them",
                )

    def _died(self, rank: int, reason: str | None) -> None:
        if self._closed or self.failure is not None:
            return
        said = f"rank {rank} of the model {reason or 'is gone'}"
        for call in self._calls.values():
            call.say_at_once(LAST + said.encode())
        super()._died(rank, reason)


def lead_users_ranks(place: ModelParallel, timeout_seconds: float) -> UsersRanks:
    """Be rank 0 for one more engine; the others :func:`join_users_ranks` at the same time.

    Args:
        timeout_seconds: see :class:`RankGroup`.

    Raises:
        ConfigError: they are on several hosts and have no secret, or one does not come.
    """
    layout, calls = place.layout, dict[int, Call]()
    made: list[Common] = []

    def share() -> Shared:
        made.append(Common(layout.world_size, calls))
        return made[0].shared

    try:
        calls.update(accept_all(_store(place), layout.world_size, share, lambda: None)[0])
        if not made:
            sender: Sender = ConnectionSender([calls[rank].say for rank in sorted(calls)])
            return UsersRanks(place, sender, calls, timeout_seconds, None)
        sender, folder = made[0].sender, made[0].shared.folder
        group = UsersRanks(place, sender, calls, timeout_seconds, folder)
        made[0].belongs_to(group)
        return group
    except BaseException:
        for each in made:
            each.remove()
        raise


def join_users_ranks(
    place: ModelParallel, device: str, check: Callable[[], None]
) -> tuple[Group, Line]:
    """Follow rank 0 for one more engine.

    Args:
        device: "cpu" or "cuda".
        check: called now and then in waits for rank 0; what it raises ends them.
    """
    call, shared = connect(_store(place), place.rank)
    line = Line(call, ends_process=False)
    ring = None if shared is None else shared.ring
    followers = place.layout.world_size - 1
    return Group(place.rank, line, ring, followers, SPIN_SECONDS[device], check), line


def _store(place: ModelParallel) -> dist.Store:
    """Where the ranks of one more engine meet."""
    name = f"megatron-async {place.ranks}"
    _engines[name] += 1
    return dist.PrefixStore(f"{name} {_engines[name]}", _get_default_store())
