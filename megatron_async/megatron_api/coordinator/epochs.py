"""Which generation epoch tokens are of, as megatron-core counts them for its trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_async.request.request import DynamicInferenceRequest


class FinishedRequestRecord(NamedTuple):
    """What a trainer asks about a request that has ended, by its ``uid``."""

    policy_epoch: list[tuple[int, int]] | None
    kv_cache_epoch: list[tuple[int, int]] | None
    num_evictions: int


@dataclass(slots=True)
class _Stamped:
    request: DynamicInferenceRequest
    evictions: int = 0


@dataclass(slots=True)
class Epochs:
    """Stamps requests: ``(position, epoch)`` says from which position of prompt and generated
    tokens on a forward was of an epoch, ``policy_epoch`` for the tokens and ``kv_cache_epoch`` for
    the keys and values. The two differ for a request whose cache is computed again.

    Attributes:
        epoch: that trainers have set last; None before, and then no request is stamped.
    """

    epoch: int | None = None
    _live: dict[int, _Stamped] = field(default_factory=dict)

    def opened(self, request: DynamicInferenceRequest) -> None:
        """A request begins."""
        self._live[request.request_id] = _Stamped(request)
        if self.epoch is not None:
            request.policy_epoch = [(0, self.epoch)]
            request.kv_cache_epoch = [(0, self.epoch)]

    def set(self, epoch: int, holds_cache: Callable[[int], bool]) -> None:
        """A new epoch begins; nothing is in flight.

        Args:
            holds_cache: whether a request, by its id, has keys and values.
        """
        for request_id, stamped in self._live.items():
            self._settle(stamped)
            request = stamped.request
            if request.finish_reason is not None:
                continue  # it has ended, and the coordinator has not been told yet
            boundary = (len(request.prompt_tokens) + len(request.generated_tokens) - 1, epoch)
            if request.policy_epoch is None:
                request.policy_epoch = [(0, epoch)]
            else:
                request.policy_epoch.append(boundary)
            if request.kv_cache_epoch is None or not holds_cache(request_id):
                request.kv_cache_epoch = [(0, epoch)]
            else:
                request.kv_cache_epoch.append(boundary)
        self.epoch = epoch

    def ended(self, request: DynamicInferenceRequest) -> None:
        """A request has ended, and is stamped no more."""
        stamped = self._live.pop(request.request_id, None)
        if stamped is not None:
            self._settle(stamped)

    def _settle(self, stamped: _Stamped) -> None:
        """Keys and values of a request that was evicted are of the epoch in which it came back."""
        evictions = stamped.request.counters.evictions
        if evictions > stamped.evictions and self.epoch is not None:
            stamped.request.kv_cache_epoch = [(0, self.epoch)]
        stamped.evictions = evictions
