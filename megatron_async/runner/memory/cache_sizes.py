"""How large an engine's cache is, in blocks, slots and tokens. Data alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.config.engine_config import (
    DEFAULT_BLOCK_SIZE_TOKENS,
    MAX_COUNT,
    MAX_DRAFTS,
    MAX_REQUESTS,
    check_buffer_size,
    check_integer,
    check_paused_buffer_size,
)
from megatron_async.device.memory import GIB
from megatron_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """The sizes of a KV cache and of the state of its slots, the same on all ranks of a model.

    Attributes:
        max_sequence_length: most tokens of a request.
        max_requests: most rows of a forward.
        max_tokens: most tokens of a forward; None leaves it to the engine.
        slot_count: slots. A slot is held until the last ticket of its request has retired, so
            ``max_requests * (depth + 1)`` never run short.
        block_size_tokens: tokens of a block.
        block_count: usable blocks, the null block not counted.
        paused_block_count: of them those that requests may keep which wait for a block; None is
            all.
        asked: the argument that says how many blocks there are, as ``name=value``.
        num_cuda_graphs: most row buckets to capture; None is all.
        num_speculative_tokens: drafts that each decode row brings along.
        batch_invariant: every token attends as a row of its own, prefill chunks too, so that a
            token's bits do not depend on the forward that computes it.
        releasable: the memory can be given back and had again (sleep mode).
    """

    max_sequence_length: int
    max_requests: int
    max_tokens: int | None
    slot_count: int
    block_size_tokens: int
    block_count: int
    paused_block_count: int | None
    asked: str
    num_cuda_graphs: int | None
    num_speculative_tokens: int
    batch_invariant: bool
    releasable: bool

    @classmethod
    def of(
        cls,
        token_bytes: int,
        *,
        max_sequence_length: int,
        buffer_size_gb: float | None = None,
        paused_buffer_size_gb: float | None = None,
        max_requests: int = 64,
        slot_count: int | None = None,
        max_tokens: int | None = None,
        block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS,
        block_count: int | None = None,
        asked: str | None = None,
        num_cuda_graphs: int | None = None,
        batch_invariant: bool = False,
        num_speculative_tokens: int = 0,
        releasable: bool = False,
    ) -> CacheSizes:
        """The sizes that these arguments ask for.

        Args:
            token_bytes: of a token in all caches.
            buffer_size_gb: size of all caches in GiB. This or ``block_count``.
            paused_buffer_size_gb: part of it that requests may keep which wait for a block; None is
                all.
            slot_count: None is twice ``max_requests``.
            asked: what the block count comes from, if it is no argument of the user's.

        Raises:
            ConfigError: a value is out of range, or the buffer holds no block.
        """
        check_paused_buffer_size(paused_buffer_size_gb)
        max_requests = check_integer("max_requests", max_requests, 1, MAX_REQUESTS)
        block_size_tokens = check_integer("block_size_tokens", block_size_tokens, 1, MAX_COUNT)
        max_sequence_length = check_integer(
            "max_sequence_length", max_sequence_length, 2, MAX_COUNT
        )
        if slot_count is not None:
            slot_count = check_integer("slot_count", slot_count, 1, MAX_COUNT)
        if max_tokens is not None:
            max_tokens = check_integer("max_tokens", max_tokens, 1)
        drafts = check_integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_DRAFTS)
        block_bytes = token_bytes * block_size_tokens
        asked = asked or f"block_count={block_count}"
        if block_count is not None:
            block_count = check_integer("block_count", block_count, 1, MAX_COUNT)
        elif block_bytes == 0:  # no layer attends, and blocks count tokens alone
            block_count = max_requests * -(-max_sequence_length // block_size_tokens)
        else:
            asked = f"buffer_size_gb={buffer_size_gb}"
            block_count = _blocks_of_buffer(buffer_size_gb, block_bytes, block_size_tokens)
        paused = None
        if paused_buffer_size_gb is not None and block_bytes:
            paused = int(paused_buffer_size_gb * GIB) // block_bytes
        return cls(
            max_sequence_length=max_sequence_length,
            max_requests=max_requests,
            max_tokens=max_tokens,
            slot_count=slot_count or 2 * max_requests,
            block_size_tokens=block_size_tokens,
            block_count=block_count,
            paused_block_count=paused,
            asked=asked,
            num_cuda_graphs=num_cuda_graphs,
            num_speculative_tokens=drafts,
            batch_invariant=batch_invariant,
            releasable=releasable,
        )

    @property
    def max_blocks_per_request(self) -> int:
        """Columns of the block table."""
        return -(-self.max_sequence_length // self.block_size_tokens)


def _blocks_of_buffer(
    buffer_size_gb: float | None, block_bytes: int, block_size_tokens: int
) -> int:
    if buffer_size_gb is None:
        raise ConfigError("give buffer_size_gb or block_count")
    check_buffer_size(buffer_size_gb)
    block_count = int(buffer_size_gb * GIB) // block_bytes - 1
    if block_count < 1:
        raise ConfigError(
            f"buffer_size_gb={buffer_size_gb} holds no KV block: a block of "
            f"{block_size_tokens} tokens takes {block_bytes / GIB:.6f} GiB and one more "
            "is kept for padding; raise it or lower block_size_tokens"
        )
    return block_count
