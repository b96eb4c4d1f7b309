"""Memory that the GPUs of a group's ranks reach each other's of: torch's symmetric memory.

No multicast is needed, and none is set up: on some hosts it is a thing that the whole host shares.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async.kernels.ranks import mailbox, peer_best, peer_rows, peer_sum, sum_costs
from megatron_async.kernels.ranks.mailbox import Mailbox
from megatron_async.kernels.ranks.peer_best import PeerBest
from megatron_async.kernels.ranks.peer_rows import RowWords
from megatron_async.kernels.ranks.peer_sum import PeerWords, word_count
from megatron_async.kernels.ranks.peers import MOST_RANKS

logger = logging.getLogger(__name__)

MOST_ELEMENTS = 64 * 8192
"""Rows times hidden size of a sum. Each rank has 8 bytes for each of them and of its group."""
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_opened: dict[str, Any] = {}
"""By the group's name, until the process ends: torch waits for the device before it frees such
memory, and a kernel there may wait for a rank that has died."""


def why_not(ranks: int, device: torch.device) -> str | None:
    """Why this process's GPU does not add up over ``ranks`` ranks by :mod:`.peer_sum`; None if it
    does, as far as it can know alone."""
    if not 2 <= ranks <= MOST_RANKS:
        return f"{ranks} ranks are not from 2 to {MOST_RANKS}"
    return peer_sum.runs_on(device)


def open_words(group: Any, device: torch.device) -> PeerWords | None:
    """Words for the ranks of a torch.distributed group; None on all of them if one has a reason
    against it. To be called by all, at the same time.

    Of three ranks and more it is measured from how many elements on sums have two steps.

    Args:
        device: this rank's.
    """
    words: PeerWords | None = _open(group, device, _meet)
    if words is None or dist.get_world_size(group) == 2:
        return words
    return _choosing_steps(words, group, device)


def open_mail(group: Any, device: torch.device, to: tuple[int, ...]) -> Mailbox | None:
    """Messages between the ranks of a group, as :func:`open_words`.

    Args:
        to: places in the group of the ranks that this one posts to.
    """

    def meet(group: Any, ranks: int, device: torch.device) -> Mailbox:
        rank, memory = _memory_of_all(group, ranks, device, mailbox.WORD_COUNT)
        return Mailbox(rank, memory, to)

    mail: Mailbox | None = _open(group, device, meet)
    return mail


def _open(group: Any, device: torch.device, meet: Callable[..., Any]) -> Any:
    ranks = dist.get_world_size(group)
    if ranks == 1 or device.type != "cuda":
        return None
    own = why_not(ranks, device) or _known_before(group)
    reason = _first_reason(_all_say(group, own, platform.node()))
    met = None
    if reason is None:
        try:
            met = _opened[group.group_name] = meet(group, ranks, device)
        except RuntimeError as error:  # no access to a peer, or no such memory: torch has no type
            reason = str(error).partition("\n")[0]
        # Nobody sends before all are here, and all words zeros.
        reason = _first_reason(_all_say(group, reason))
    if reason is not None:
        logger.warning("%d ranks use NCCL, and not each other's memory: %s", ranks, reason)
        return None
    return met


def _known_before(group: Any) -> str | None:
    """torch keeps where the ranks of a group meet by its name, and names those of the next model as
    those of the last one."""
    name = group.group_name
    if name in _opened:
        return "this process had ranks of another model before"
    _opened[name] = None
    return None


def _all_say(group: Any, reason: str | None, *place: object) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (reason, *place), group=group)
    return said


def _first_reason(said: list[Any]) -> str | None:
    """The same on all ranks."""
    for reason, *_ in said:
        if reason is not None:
            return str(reason)
    hosts = {place[0] for _, *place in said if place}
    return "they are on several hosts" if len(hosts) > 1 else None


def _meet(group: Any, ranks: int, device: torch.device) -> PeerWords:
    """Words for sums, behind them those for the best of all, and those for sums of many rows."""
    capacity = peer_rows.capacity_of(ranks)
    counts = (
        word_count(ranks, MOST_ELEMENTS), peer_best.word_count(ranks),
        peer_rows.word_count(ranks, capacity),
    )  # fmt: skip
    rank, memory = _memory_of_all(group, ranks, device, sum(counts))
    of_sums, of_best, of_rows = zip(*(each.split(counts) for each in memory), strict=True)

    def launches() -> Tensor:
        return torch.zeros(peer_sum.LAUNCHES, dtype=torch.int32, device=device)

    many = RowWords(rank, of_rows, launches(), capacity) if capacity else None
    best = PeerBest(rank, of_best)
    return PeerWords(rank, of_sums, launches(), MOST_ELEMENTS, best, many)


def _choosing_steps(words: PeerWords, group: Any, device: torch.device) -> PeerWords:
    """Words that say from how many elements on sums have two steps, by the times of the group's
    first rank."""
    timed = sum_costs.TimedSums(words, device)
    _all_say(group, None)  # nobody's kernels wait before all ranks have theirs
    costs = _all_say(group, None, timed.costs())[0][1]
    if words.rank == 0:
        logger.info("sums over %d ranks: %s", words.ranks, sum_costs.shown(costs))
    return words._replace(two_steps_from=sum_costs.two_steps_from(costs))


def _memory_of_all(
    group: Any, ranks: int, device: torch.device, words: int
) -> tuple[int, tuple[Tensor, ...]]:
    """Allocate this rank's memory, zeros, and find the others'."""
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault(_NO_MULTICAST, "1")
    own = symmetric.empty(words, dtype=torch.int64, device=device)
    handle = symmetric.rendezvous(own, group)
    own.zero_()
    torch.cuda.synchronize(device)
    memory = tuple(own if r == handle.rank else _of_peer(handle, r, own) for r in range(ranks))
    return int(handle.rank), memory


def _of_peer(handle: Any, rank: int, like: Tensor) -> Tensor:
    """A peer's memory as this rank reaches it."""
    get = getattr(handle, "get_remote_tensor", handle.get_buffer)  # the latter in older torch
    found: Tensor = get(rank, like.shape, like.dtype)
    return found
