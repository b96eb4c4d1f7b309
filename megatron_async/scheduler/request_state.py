"""A request as the scheduler sees it: its state, and how far launches and commits have come."""

from __future__ import annotations

from enum import Enum, auto

from megatron_async.request.request import FinishReason
from megatron_async.sampling_params import MAX_STOP_TOKEN_IDS
from megatron_async.step.extras import Extras, GrammarTable, SlotAutomaton
from megatron_async.step.slot_fields import Values


class State(Enum):
    """Where a sequence stands. Slot and blocks are held from PREFILLING to ENDING."""

    WAITING = auto()
    """In the queue, without slot and blocks."""
    PREFILLING = auto()
    DECODING = auto()
    STALLED = auto()
    """Left out of the row map by the scheduler until there are a row and a block for it."""
    HELD = auto()
    """Paused by the user."""
    ENDING = auto()
    """The rows in flight will bring its last token."""
    EVICTING = auto()
    """Slot and blocks are given up; its tokens in flight are still to be committed."""
    FINISHED = auto()


NO_PROMPT_LOG_PROBS = 1 << 62
"""As if those of more tokens than any prompt has had been taken."""

EVICTABLE = frozenset({State.PREFILLING, State.DECODING, State.STALLED, State.HELD})
HOLDING = EVICTABLE | {State.ENDING}


class Sequence:
    """One request from arrival to retirement.

    Launch-side fields (``prefilled``, ``launched``, ``kv_bound``, ``blocks``, ``last_ticket``) are
    advanced by plans and run ahead of the commit-side field ``tokens``, prompt and committed
    tokens. ``kv_bound`` is an upper bound: the device has the true KV length. ``launched`` is a
    lower bound of the tokens that are committed or in flight, for each row in flight brings at
    least one; without drafts both bounds are exact.

    The device knows the ``device_stop_ids``; other ends that the host alone finds are those of
    ``stop_ids`` and what it asks the request's watchers for, if it is ``watched``.

    ``priority_key`` orders requests: the lower one is admitted first and evicted last. It never
    changes, so the lowest of all makes progress whatever happens to the others.
    """

    __slots__ = (
        "asked_window",
        "automaton",
        "awaits_guesses",
        "blocks",
        "branch",
        "cache_salt",
        "device_stop_ids",
        "ended_by_host",
        "epoch",
        "evictions",
        "extras",
        "fork_of",
        "freed",
        "grammar",
        "held",
        "hidden_layers",
        "key",
        "kv_bound",
        "last_ticket",
        "launched",
        "long_rotation",
        "max_new",
        "max_total",
        "micro_batch",
        "node",
        "prefill_end",
        "prefilled",
        "priority_key",
        "prompt_length",
        "prompt_log_probs",
        "reason",
        "registered",
        "slot",
        "snapshot",
        "snapshot_node",
        "state",
        "stop_ids",
        "tokens",
        "values",
        "wants_prompt_log_probs",
        "watched",
        "window",
    )

    def __init__(
        self,
        key: int,
        prompt: tuple[int, ...],
        max_new: int,
        stop_ids: tuple[int, ...],
        values: Values,
        *,
        extras: Extras | None = None,
        prompt_log_probs: bool = False,
        watched: bool = False,
        fork_of: int | None = None,
        cache_salt: str | None = None,
        hidden_layers: tuple[int, ...] = (),
        grammar: GrammarTable | None = None,
    ) -> None:
        self.key = key
        self.priority_key = (0, key)
        self.state = State.WAITING
        self.held = False
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.max_new = max_new
        self.max_total = len(prompt) + max_new
        self.stop_ids = frozenset(stop_ids)
        self.device_stop_ids = tuple(sorted(self.stop_ids))[:MAX_STOP_TOKEN_IDS]
        self.values = values
        """Values of the REQUEST slot fields."""
        self.extras = extras
        self.grammar = grammar
        """What may guide it on the device."""
        self.automaton: SlotAutomaton | None = None
        """What does while it holds a slot; None where the host makes its masks."""
        self.wants_prompt_log_probs = prompt_log_probs
        self.prompt_log_probs = 0 if prompt_log_probs else NO_PROMPT_LOG_PROBS
        """Prompt tokens before which all log-probabilities and hidden states that are wanted have
        been taken."""
        self.hidden_layers = hidden_layers
        """Layers behind which the hidden states of its prompt are wanted, which go together with
        log-probabilities."""
        self.watched = watched
        self.window = 1
        """Tokens that a row of it may bring, where the step's window holds them."""
        self.asked_window = 1
        """The same, while what drafts can go on."""
        self.awaits_guesses = False
        """It has no drafts but those that the host has guessed for its next row."""
        self.cache_salt = cache_salt
        """It shares prefixes with sequences of the same salt alone."""
        self.fork_of = fork_of
        """Key of a request whose prefill of the same prompt this one waits for."""
        self.ended_by_host = False
        self.micro_batch = 0
        """While it holds a slot: whose steps have its rows."""
        self.slot = -1
        self.epoch = -1
        self.prefilled = 0
        self.prefill_end = 0
        self.branch = 0
        """Tokens of its prompt that were in the prefix cache when it was admitted, of which the
        last ones may be computed again for want of a snapshot of recurrent state."""
        self.launched = 0
        self.kv_bound = 0
        self.long_rotation = False
        """It holds a slot and is computed with the rotations of long requests."""
        self.blocks: list[int] = []
        self.freed = 0
        """The first ``freed`` of ``blocks`` have been given back: no token attends to them."""
        self.node = 0
        self.registered = 0
        self.snapshot: tuple[int, int] | None = None
        """Place and length of a snapshot of its state in flight, whose tokens are not committed."""
        self.snapshot_node = 0
        """The node of its last snapshot behind a generated token."""
        self.last_ticket = -1
        self.evictions = 0
        self.reason: FinishReason | None = None

    def take_window(self, window: int) -> None:
        """Let its rows bring ``window`` tokens from now on."""
        self.asked_window = window
        self.window = 1 if self.awaits_guesses else window

    def await_guesses(self) -> None:
        """Have the host guess what its rows may draft, unless the device knows what its grammar
        forces."""
        self.awaits_guesses = self.automaton is None or not self.automaton.table.forces
        self.take_window(self.asked_window)

    def end_drafts(self) -> None:
        """What drafts can go no further; until the request begins again."""
        self.window = 1

    @property
    def waits(self) -> bool:
        """Its S needs all its tokens on the host before."""
        return self.extras is not None and self.extras.guided and self.automaton is None

    @property
    def committed(self) -> int:
        """Generated tokens that the host has taken."""
        return len(self.tokens) - self.prompt_length

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that it holds a reference of."""
        return self.blocks[self.freed :] if self.freed else self.blocks

    @property
    def prompt_log_probs_begun(self) -> bool:
        """Wanted log-probabilities of its prompt have been taken."""
        return self.wants_prompt_log_probs and self.prompt_log_probs > 0

    def blocks_short(self, reach: int, block_size: int) -> int:
        """Blocks that ``reach`` further positions need besides those held. Behind
        the last token but one nothing is written."""
        end = min(self.kv_bound + reach, self.max_total - 1)
        return -(-end // block_size) - len(self.blocks)

    def forget_launches(self) -> None:
        """Back to the queue: what was launched has been committed, what was cached is gone."""
        self.state = State.WAITING
        self.slot = self.epoch = -1
        self.prefilled = self.prefill_end = self.kv_bound = self.freed = 0
        self.launched = self.committed
        self.node = self.registered = 0

    def restart(self) -> None:
        """Begin behind the prompt; it waits in the queue, and nothing of it is in flight."""
        del self.tokens[self.prompt_length :]
        self.launched = 0
        self.take_window(self.asked_window)
        if self.wants_prompt_log_probs:
            self.prompt_log_probs = 0
