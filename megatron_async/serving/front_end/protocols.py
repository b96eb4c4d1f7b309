"""What text generation needs of the engine's client and of the server's metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from megatron_async.serving.messages import Control, EngineInfo, Generate, Output, Snapshot


class Client(Protocol):
    """What the front end needs of ``EngineClient``."""

    @property
    def state(self) -> str:
        """See there."""

    @property
    def snapshot(self) -> Snapshot | None:
        """See there."""

    @property
    def states(self) -> Mapping[str, bool]:
        """Whether each replica serves, by name; none where there is one engine."""

    def check_ready(self) -> None:
        """Raises EngineDeadError, which says why, while no request can be served."""

    async def info(self) -> EngineInfo:
        """What the engine says of its model."""

    def generate(self, message: Generate) -> AsyncGenerator[Output, None]:
        """The outputs of one request; closing the iterator aborts it."""

    async def abort(self, request_id: int) -> None:
        """End a request with what it has."""

    async def command(self, message: Control) -> dict[str, Any]:
        """Give the whole engine a command."""


class Metrics(Protocol):
    """What is needed of ``ServerMetrics``."""

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""

    def opened(self) -> None:
        """A client's request has begun."""

    def closed(self) -> None:
        """Note that it is over, in whatever way."""

    def refused(self, status: int) -> None:
        """Note that it got an error."""

    def first_token(self, seconds: float) -> None:
        """The first token of a prompt came ``seconds`` after the request."""

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` further tokens of a choice came ``seconds`` after those before."""

    def finished(self, reason: str, usage: dict[str, float] | None, seconds: float) -> None:
        """A choice has ended, ``seconds`` after its request came."""
