"""Salts of requests: prefixes are shared among requests of the same salt alone.

The salt begins a prefix's chain, in the cache's tree as in the hashes that other processes compute.
"""

from __future__ import annotations

from hashlib import blake2b

DIGEST_BYTES = 16
"""Nobody finds two salts with the same digest."""
FIRST_ROOT = -2
"""Roots of salts lie from here on downwards, two for each: the second is that of long requests."""
HASH_MASK = (1 << 63) - 1


def salted_root(salt: str, *, is_long: bool) -> int:
    """The node before the first block of sequences with a salt."""
    return FIRST_ROOT - 2 * _digest(salt) - is_long


def salt_hash(salt: str) -> int:
    """What stands for the block before the first one, in 63 bits."""
    return _digest(salt) & HASH_MASK


def hash_of_root(node: int) -> int | None:
    """The salt's hash, of the root of its sequences; None of any other node."""
    number = FIRST_ROOT - node
    return None if number < 0 or number % 2 else (number // 2) & HASH_MASK


def _digest(salt: str) -> int:
    return int.from_bytes(blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest(), "little")
