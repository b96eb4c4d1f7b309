"""Two streams of one device: the main one decodes, the side one runs stop checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a host buffer and the device tensor to copy into it."""

Work = Callable[[], Copies]


class Ticket(Protocol):
    """Work on the side stream, and the copies of its results to the host."""

    def ready(self) -> bool:
        """Whether the copies are complete. Never waits."""
        ...

    def wait(self) -> None:
        """Block the host until the copies are complete."""
        ...


class Streams(Protocol):
    """What asynchronous stopping asks of a device. Tests have one whose results come late."""

    def submit(self, work: Work) -> Ticket:
        """Run ``work`` on the side stream, after what the main stream has been given so far."""
        ...

    def fetch(self, host: Tensor, source: Tensor) -> Ticket:
        """Copy ``source`` to a host buffer, on the main stream: the least work for the host."""
        ...

    def join(self, ticket: Any) -> None:
        """Make the main stream wait for the work of ``ticket``; the host goes on."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies can go to asynchronously."""
        ...

    def rng_state(self) -> Any: ...

    def set_rng_state(self, state: Any) -> None: ...

    def close(self) -> None:
        """Order all work submitted before what the main stream is given from now on."""
        ...


class CudaTicket:
    """Two events: results computed, which the main stream waits for, and copied, for the host."""

    def __init__(self, computed: torch.cuda.Event, copied: torch.cuda.Event) -> None:
        self.computed = computed
        self.copied = copied

    def ready(self) -> bool:
        return bool(self.copied.query())

    def wait(self) -> None:
        self.copied.synchronize()


class CudaStreams:
    """The current stream of a CUDA device, and one of high priority beside it.

    WAR: what ``work`` reads must be kept alive until it is joined, or the streams are closed; what
    it copies to the host must be memory of its own. Then memory that either stream frees is reused
    after the other has read it, without ``record_stream``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Work) -> CudaTicket:
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(self.side):
            copies = work()
            computed.record(self.side)
            for host, source in copies:
                host.copy_(source, non_blocking=True)
            copied.record(self.side)
        return CudaTicket(computed, copied)

    def fetch(self, host: Tensor, source: Tensor) -> CudaTicket:
        host.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return CudaTicket(copied, copied)

    def join(self, ticket: CudaTicket) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket.computed)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def rng_state(self) -> tuple[Tensor, Tensor]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: tuple[Tensor, Tensor]) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.device)

    def close(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.side)


class AlternatingStreams(CudaStreams):
    """Two streams of a CUDA device that take turns: the work of a token stays on the stream that
    computed it, and what is launched afterwards goes to the other one, which waits for the token
    alone.

    WAR: what one stream frees is reused on that stream, by launches that come after it has waited
    for all that the other one had read by then; ``work`` reads on, as in the base class.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._callers: torch.cuda.Stream | None = None

    def submit(self, work: Work) -> CudaTicket:
        current = torch.cuda.current_stream(self.device)
        if self._callers is None:
            self._callers = current
        other = self.side if current == self._callers else self._callers
        selected, computed, copied = (torch.cuda.Event() for _ in range(3))
        selected.record(current)
        copies = work()
        computed.record(current)
        for host, source in copies:
            host.copy_(source, non_blocking=True)
        copied.record(current)
        other.wait_event(selected)
        torch.cuda.set_stream(other)
        return CudaTicket(computed, copied)

    def close(self) -> None:
        """Close as the base class does; the caller's stream is the current one again."""
        if self._callers is not None:
            self._callers.wait_stream(self.side)
            torch.cuda.set_stream(self._callers)
            self._callers = None


def alternating_streams(device: torch.device) -> Streams | None:
    """Return what :func:`streams_of` does, of streams that take turns."""
    return AlternatingStreams(device) if device.type == "cuda" else None


def streams_of(device: torch.device) -> Streams | None:
    """Streams of ``device``; None where work cannot be deferred, as on the CPU."""
    return CudaStreams(device) if device.type == "cuda" else None
