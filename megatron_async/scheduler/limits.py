"""What one step and one cache can hold."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Counts of rows, slots, tokens and blocks.

    There are more slots than rows: a slot comes back only when its last ticket has retired, and
    until then another one serves the request that takes over the row. ``max_assignments`` bounds
    the block assignments of one packet and holds a longest request next to full decode rows.
    ``windows`` are the numbers of tokens that the decode rows of a step may bring, ascending from
    1; blocks are given for ``lookahead`` positions more, to which drafting may write.
    ``priority_step`` is the number of tickets by which one step of priority goes ahead.
    Rows behind ``draft_limit`` positions, which are all that a model that drafts takes, bring one
    token; None is no limit. ``admit_tokens``: admissions bring the request's tokens.
    ``needs_guesses``: rows have no drafts but those that the host has guessed. Requests of
    more than ``rotation_limit`` tokens are computed with other rotations (longrope): one that
    reaches it is computed again as a whole. Tokens attend to no more than ``attention_window``
    tokens, their own included: blocks behind it come free. ``paused_block_count``: blocks that
    stalled requests may keep; None is all. ``state_snapshots``: of a model with recurrent layers
    the places for snapshots of their state; None for other models. Running
    requests are divided into ``micro_batches``, of which each step runs one.
    With ``long_prompt_tokens`` a step has chunks of at most ``long_prompts`` prompts of which more
    tokens are left, and others pass those that wait for their turn; None knows no long prompts.
    ``guided_lag``: beside others guided rows stay out of a step while one of the last
    ``guided_lag`` - 1 tickets has them; None never.

    Attributes:
        window: most tokens that a decode row may bring.
        blocks_per_row: that one decode row may need beyond those held.
    """

    max_requests: int
    slot_count: int
    max_tokens: int
    prefill_chunk_tokens: int
    block_size: int
    block_count: int
    max_assignments: int
    enable_prefix_caching: bool = True
    priority_step: int = 1000
    windows: tuple[int, ...] = (1,)
    lookahead: int = 0
    draft_limit: int | None = None
    admit_tokens: bool = False
    needs_guesses: bool = False
    paused_block_count: int | None = None
    rotation_limit: int | None = None
    attention_window: int | None = None
    state_snapshots: int | None = None
    micro_batches: int = 1
    guided_lag: int | None = None
    long_prompt_tokens: int | None = None
    long_prompts: int = 1
    window: int = field(init=False)
    blocks_per_row: int = field(init=False)

    def __post_init__(self) -> None:
        window = self.windows[-1]
        blocks = -(-(window + self.lookahead) // self.block_size)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "blocks_per_row", blocks)

    @property
    def most_tokens(self) -> int:
        """Tokens of a request that has the cache for itself; its last one is never written."""
        return self.block_count * self.block_size + 1

    def window_of(self, drafts: int) -> int:
        """Return the most tokens that the rows of a request may bring that wants ``drafts``."""
        return min(1 + drafts, self.window)
