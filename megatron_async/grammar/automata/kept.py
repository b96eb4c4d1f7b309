"""Token automata of the last grammars, for engines that have a pool of them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from megatron_async.errors import shown
from megatron_async.grammar.automata.build import automaton_of
from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.grammar.compiler import CompiledGrammar
from megatron_async.grammar.spec import StructuredOutputs

logger = logging.getLogger(__name__)

KEPT_POOLS = 2
"""As many bytes of automata are kept as that many pools have."""
KEPT_REASONS = 1024
FAILED = "to make its table failed"


class KeptAutomata:
    """Makes the automaton of a grammar once, while others are few.

    Any thread may call it. An automaton knows no tokens that end texts: these are the requests'
    own.

    Args:
        budget_bytes: of the device's pool: no automaton has more.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._lock = threading.RLock()  # a signal's handler may ask too
        self._kept: OrderedDict[StructuredOutputs, TokenAutomaton | str] = OrderedDict()
        self._bytes = 0

    def of(self, spec: StructuredOutputs, grammar: CompiledGrammar) -> TokenAutomaton | str:
        """The automaton of what ``spec`` was compiled to, or why there is none."""
        with self._lock:
            found = self._kept.get(spec)
            if found is not None:
                self._kept.move_to_end(spec)
                return found
        made = _made(spec, grammar, self._budget)
        with self._lock:
            if spec not in self._kept:
                self._kept[spec] = made
                self._bytes += _size(made)
            while self._bytes > KEPT_POOLS * self._budget or len(self._kept) > KEPT_REASONS:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= _size(dropped)
        return made


def _made(spec: StructuredOutputs, grammar: CompiledGrammar, budget: int) -> TokenAutomaton | str:
    """Whatever fails here, the host can still follow the grammar."""
    try:
        return automaton_of(spec, grammar, (), budget_bytes=budget)
    except Exception as error:
        logger.warning(
            "a grammar has no automaton, since to make it failed (%s: %s)",
            type(error).__name__,
            shown(str(error)),
        )
        return FAILED


def _size(made: TokenAutomaton | str) -> int:
    return 0 if isinstance(made, str) else made.byte_size
