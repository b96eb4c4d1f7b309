"""Streams on the CPU whose work runs late and whose copies arrive later still."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch
from torch import Tensor

from megatron_async.contrib.transformers.stopping.streams import Copies, Work

POISON = {torch.bool: True, torch.long: -(2**40)}


class LateTicket:
    def __init__(self, streams: LateStreams, work: Work, polls: int) -> None:
        self._streams = streams
        self.work: Work | None = work
        self.copies: Copies = ()
        self.polls = polls
        self.arrived = False

    def ready(self) -> bool:
        self._streams.polls += 1
        self.polls -= 1
        if self.polls < 0:
            self._streams.arrive(self)
        return self.arrived

    def wait(self) -> None:
        self._streams.waits += 1
        self._streams.arrive(self)


class LateStreams:
    """Work runs when it is joined or waited for, in order; a copy's target holds poison until its
    ticket has been polled a random number of times, or waited for."""

    def __init__(self, seed: int = 0, most_polls: int = 4) -> None:
        self.waits = self.polls = self.submitted = self.closed = 0
        self._random = random.Random(seed)
        self._most_polls = most_polls
        self._queue: deque[LateTicket] = deque()

    def __call__(self, device: torch.device) -> LateStreams:
        return self

    def submit(self, work: Work) -> LateTicket:
        self.submitted += 1
        ticket = LateTicket(self, work, self._random.randint(0, self._most_polls))
        self._queue.append(ticket)
        return ticket

    def fetch(self, host: torch.Tensor, source: torch.Tensor) -> LateTicket:
        held = source.clone()  # in order with what the main stream has been given so far
        return self.submit(lambda: [(host, held)])

    def join(self, ticket: LateTicket) -> None:
        for earlier in self._queue:
            self._run(earlier)
            if earlier is ticket:
                break

    def _run(self, ticket: LateTicket) -> None:
        if ticket.work is None:
            return
        work, ticket.work = ticket.work, None
        ticket.copies = [(host, source.clone()) for host, source in work()]
        for host, _ in ticket.copies:
            host.fill_(POISON[host.dtype])

    def arrive(self, ticket: LateTicket) -> None:
        """Copies arrive in the order of submission."""
        while not ticket.arrived:
            first = self._queue.popleft()
            self._run(first)
            for host, source in first.copies:
                host.copy_(source)
            first.arrived = True

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, POISON[dtype], dtype=dtype)

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def close(self) -> None:
        self.closed += 1
        self._queue.clear()
