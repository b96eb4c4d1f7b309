"""A number for a block of tokens and all that come before it, the same in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 8


def block_hash(parent: int | None, tokens: Sequence[int]) -> int:
    """Of a block, in 63 bits: what it holds, after ``parent``'s; None begins a sequence.

    Two prefixes with the same hash are one in 2**63. Where that is too many, compare tokens.
    """
    before = b"" if parent is None else parent.to_bytes(HASH_BYTES, "little")
    digest = blake2b(array("q", tokens).tobytes(), digest_size=HASH_BYTES, key=before).digest()
    return int.from_bytes(digest, "little") >> 1


def prefix_hashes(tokens: Sequence[int], block_size: int, most: int | None = None) -> list[int]:
    """Of each full block of ``block_size`` tokens, at most ``most`` of them from the beginning."""
    hashes: list[int] = []
    parent: int | None = None
    count = len(tokens) // block_size
    for start in range(0, (count if most is None else min(count, most)) * block_size, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes
