"""What a request may ask of S besides temperature, top-k, top-p and seed.

It is fixed while the request runs and travels once, with its admission. Steps in which no live
request has any are the plain ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

NO_LOG_PROBS, RAW_LOG_PROBS, PROCESSED_LOG_PROBS = 0, 1, 2
"""Log-probabilities of sampled tokens: none; of the model's logits; of what was sampled from,
temperature and filters included."""

MAX_TOP_LOG_PROBS = 20
"""Most likely tokens that are reported for a position."""
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
"""Bad words of several tokens that a request may have."""
MAX_BAD_WORD_TOKENS = 16

LOG_PROB_WORDS = 1 + 2 * MAX_TOP_LOG_PROBS
"""int32 words of a position in a record: the token's log-probability, the most likely tokens, and
their log-probabilities; floats as their bits."""
PROMPT_LOG_PROB_WORDS = LOG_PROB_WORDS + 2
"""A position of a prompt has its token's rank besides, and the entropy of what it was chosen from,
a float as its bits."""

DEAD_STATE = 0
"""The first state of the pool of token automata, which no grammar has: no token may come there, and
nothing leads out of it."""
TABLE_TOO_LARGE = "the table of the grammar is larger than the pool"
TABLE_LATER = "the table of the grammar was not there when the request was added"
TABLE_FAILED = "to make the table of the grammar failed"
"""Why no automaton guides a request, as the counters say it."""
MOST_FORCED = 8
"""Tokens that a state of an automaton may know to follow."""


class Extras(NamedTuple):
    """The extras of one request. The defaults ask for nothing.

    Args:
        log_probs: NO_LOG_PROBS, RAW_LOG_PROBS or PROCESSED_LOG_PROBS.
        min_p: drop tokens less likely than this share of the most likely one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
            output; 1 is off.
        presence_penalty, frequency_penalty: subtracted for tokens of the output, once or for each
            time; 0 is off.
        min_total: prompt and generated tokens before which none of ``stop_ids`` may come.
        bias: (token id, what is added to its logit).
        allowed: the only token ids that may come; None for all.
        banned: token ids that may never come.
        bad_words: token sequences, of at least two tokens each, whose last token may not come after
            the others.
        guided: an allowed-token mask holds for every token, from the host or by an automaton.
    """

    log_probs: int = NO_LOG_PROBS
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_total: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    guided: bool = False

    @property
    def counts_tokens(self) -> bool:
        """Some penalty is on."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1.0 or penalties != (0.0, 0.0)


NO_EXTRAS = Extras()


NO_AUTOMATON = -1
"""The state of a slot that no automaton guides."""


class GrammarTable:
    """The token automaton of a grammar, as a plan sees it.

    Args:
        number: its own in this engine.
        states: of it.
        forces: in some state of it one way alone goes on, whose tokens can be drafted.
        automaton: a ``grammar.automata.TokenAutomaton``.
    """

    __slots__ = ("automaton", "forces", "number", "states")

    def __init__(self, number: int, states: int, forces: bool, automaton: Any) -> None:
        self.number = number
        self.states = states
        self.forces = forces
        self.automaton = automaton

    def __repr__(self) -> str:
        """Without the table: recorded runs have its checksum."""
        return f"GrammarTable({self.number}, {self.states})"


class SlotAutomaton(NamedTuple):
    """The automaton that guides a slot on the device.

    Args:
        table: the grammar's.
        base: its first state in the pool.
        is_new: it is not there yet.
        stop_ids: the tokens that end the text.
    """

    table: GrammarTable
    base: int
    is_new: bool
    stop_ids: tuple[int, ...]


class SlotExtras(NamedTuple):
    """Extras on their way into a slot, with the request's tokens so far, of which the first
    ``prompt_length`` are its prompt, and the automaton that guides it, if one does."""

    extras: Extras
    prompt_length: int
    tokens: tuple[int, ...]
    automaton: SlotAutomaton | None = None

    def __repr__(self) -> str:
        """As before there were automata, where there is none: recorded runs have its checksum."""
        shown = zip(self._fields, self[: None if self.automaton else -1], strict=False)
        return f"SlotExtras({', '.join(f'{name}={value!r}' for name, value in shown)})"


FEATURE_PENALTIES, FEATURE_MIN_P, FEATURE_MIN_TOKENS, FEATURE_BIAS = 1, 2, 4, 8
FEATURE_ALLOWED, FEATURE_BAD_WORDS, FEATURE_GUIDED, FEATURE_LOG_PROBS = 16, 32, 64, 128
"""Bits of what a slot asks for; ALLOWED covers banned ids too."""

FEATURES_OF_LOGITS = (
    FEATURE_PENALTIES
    | FEATURE_MIN_P
    | FEATURE_MIN_TOKENS
    | FEATURE_BIAS
    | FEATURE_ALLOWED
    | FEATURE_BAD_WORDS
    | FEATURE_GUIDED
)
"""Extras that change logits."""


def features_of(extras: Extras) -> int:
    """The FEATURE bits of what is asked; 0 for nothing."""
    asked = {
        FEATURE_PENALTIES: extras.counts_tokens,
        FEATURE_MIN_P: extras.min_p > 0.0,
        FEATURE_MIN_TOKENS: extras.min_total > 0 and bool(extras.stop_ids),
        FEATURE_BIAS: bool(extras.bias),
        FEATURE_ALLOWED: extras.allowed is not None or bool(extras.banned),
        FEATURE_BAD_WORDS: bool(extras.bad_words),
        FEATURE_GUIDED: extras.guided,
        FEATURE_LOG_PROBS: extras.log_probs != NO_LOG_PROBS,
    }
    return sum(bit for bit, is_asked in asked.items() if is_asked)
