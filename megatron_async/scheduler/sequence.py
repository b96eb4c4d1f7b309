"""The scheduler's own record of one request."""

from __future__ import annotations

from megatron_async.requests import FinishReason


class Sequence:
    """One request from arrival to retirement.

    Launch-side fields (``prefilled``, ``launched``, ``kv_bound``, ``blocks``, ``last_ticket``) are
    advanced by ``plan`` and run ahead of the commit-side fields (``committed``, ``reason``).
    ``kv_bound`` is an upper bound: the device has the true KV length.
    """

    __slots__ = (
        "blocks",
        "committed",
        "epoch",
        "key",
        "kv_bound",
        "last_ticket",
        "launched",
        "max_new",
        "prefilled",
        "prompt",
        "reason",
        "sampling",
        "slot",
        "stop_ids",
    )

    def __init__(
        self,
        key: int,
        prompt: tuple[int, ...],
        max_new: int,
        stop_ids: tuple[int, ...],
        sampling: tuple[float, int, float, int],
    ) -> None:
        self.key = key
        self.prompt = prompt
        self.max_new = max_new
        self.stop_ids = frozenset(stop_ids)
        self.sampling = sampling
        self.slot = -1
        self.epoch = -1
        self.prefilled = 0
        self.launched = 0
        self.kv_bound = 0
        self.blocks: list[int] = []
        self.last_ticket = -1
        self.committed = 0
        self.reason: FinishReason | None = None

    def worst_case_blocks(self, block_size: int) -> int:
        """Blocks of the longest this request can get; its last token is never written."""
        return -(-(len(self.prompt) + self.max_new - 1) // block_size)
