"""Which replica gets a prompt: the one that has its prefix, unless that has too much to do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from megatron_async.cache.block_hash import prefix_hashes
from megatron_async.errors import ConfigError
from megatron_async.replicas.prefix_index import PrefixIndex

BLOCK_TOKENS = 64
"""Tokens of a block of prefixes as they are compared; the replicas' own blocks may have another
size."""
MOST_PROMPT_BLOCKS = 512
"""Blocks of a prompt that are compared: two that share as much go to the same replica."""
MOST_INDEX_BLOCKS = 200_000
"""That a front end remembers, in some 70 MB."""
DEFAULT_MOST_EXTRA = 8
"""Sequences that a replica may have more than another one, and still gets prompts for their
prefix."""


class PrefixRouter:
    """Chooses replicas by prefix affinity and load.

    The favourite is the replica that was given most of the prompt before. It is left when it has
    over ``most_extra`` sequences more than the lighter of two others, drawn at random: "power of
    two choices" (Mitzenmacher), which a prompt without a known prefix takes at once.

    Args:
        most_extra: see above; 0 goes by load alone where loads differ.
        most_blocks: of :class:`PrefixIndex`.
        seed: of the draws.

    Raises:
        ConfigError: ``most_extra`` is below 0.
    """

    def __init__(
        self,
        *,
        most_extra: int = DEFAULT_MOST_EXTRA,
        most_blocks: int = MOST_INDEX_BLOCKS,
        seed: int | None = None,
    ) -> None:
        if most_extra < 0:
            raise ConfigError(f"most_extra={most_extra} must be at least 0")
        self.index = PrefixIndex(most_blocks)
        self._most_extra = most_extra
        self._random = random.Random(seed)

    def choose(
        self, tokens: Sequence[int], loads: Mapping[str, int], salt: str | None = None
    ) -> str:
        """The name of one of the replicas in ``loads``, by the sequences that each has now, for a
        prompt with this salt."""
        hashes = prefix_hashes(tokens, BLOCK_TOKENS, MOST_PROMPT_BLOCKS, salt)
        lighter = self._lighter(loads)
        chosen = self._favourite(hashes, loads)
        if chosen is None or loads[chosen] - loads[lighter] > self._most_extra:
            chosen = lighter
        self.index.add(chosen, hashes)
        return chosen

    def _favourite(self, hashes: Sequence[int], loads: Mapping[str, int]) -> str | None:
        matched = self.index.match(hashes)
        known = [name for name in matched if name in loads]
        return max(known, key=lambda name: (matched[name], -loads[name]), default=None)

    def _lighter(self, loads: Mapping[str, int]) -> str:
        names = list(loads)
        drawn = names if len(names) < 2 else self._random.sample(names, 2)
        return min(drawn, key=loads.__getitem__)
