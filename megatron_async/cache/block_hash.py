"""A number for a block of tokens and all that come before it, the same in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from megatron_async.cache.cache_salt import salt_hash

HASH_BYTES = 8
TOKEN_BYTES = 8


def block_hash(parent: int | None, tokens: Sequence[int]) -> int:
    """Hash a block, in 63 bits: its tokens after ``parent``'s hash; None begins a sequence.

    Two prefixes with the same hash are one in 2**63. Where that is too many, compare tokens.
    """
    return _hash(b"" if parent is None else _key(parent), array("q", tokens).tobytes())


def prefix_hashes(
    tokens: Sequence[int], block_size: int, most: int | None = None, salt: str | None = None
) -> list[int]:
    """Hash each full block of ``block_size`` tokens, at most the first ``most`` of them, of a
    request with this salt."""
    count = len(tokens) // block_size
    if most is not None:
        count = min(count, most)
    held, width = array("q", tokens[: count * block_size]).tobytes(), block_size * TOKEN_BYTES
    hashes: list[int] = []
    key = b"" if salt is None else _key(salt_hash(salt))
    for start in range(0, len(held), width):
        block = _hash(key, held[start : start + width])
        hashes.append(block)
        key = _key(block)
    return hashes


def _key(block: int) -> bytes:
    return block.to_bytes(HASH_BYTES, "little")


def _hash(key: bytes, held: bytes) -> int:
    return int.from_bytes(blake2b(held, digest_size=HASH_BYTES, key=key).digest(), "little") >> 1
