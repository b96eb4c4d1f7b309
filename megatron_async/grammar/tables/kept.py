"""Token automata of the last grammars, for engines that have a pool of them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from typing import Protocol

from megatron_async.errors import shown
from megatron_async.grammar.automata.build import automaton_of, excluded
from megatron_async.grammar.automata.table import TokenAutomaton
from megatron_async.grammar.compiler import CompiledGrammar
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.step.extras import TABLE_FAILED, TABLE_LATER

logger = logging.getLogger(__name__)

KEPT_POOLS = 2
"""As many bytes of automata, and of the grammars that they are of, are kept as that many pools
have."""
KEPT_REASONS = 1024
KNOWN_GRAMMARS = 4096
"""That have come once, or whose table was tried in vain."""
TRIES = 2
"""A grammar whose table failed may have met a lack of memory, or the end of a process."""


class Maker(Protocol):
    """Makes tables while others go on, and gives each to :meth:`KeptAutomata.put`."""

    def ask(self, spec: StructuredOutputs) -> None:
        """Make the table of a grammar, unless too many wait. From any thread; waits for nothing."""

    def close(self) -> None:
        """Make no more tables."""


class KeptAutomata:
    """Makes the automaton of a grammar once, while others are few.

    Any thread may call it. An automaton knows no tokens that end texts: these are the requests'
    own.

    Args:
        budget_bytes: of the device's pool: no automaton has more.

    Attributes:
        maker: makes them in the background; None makes each where it is asked for.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.maker: Maker | None = None
        self._budget = budget_bytes
        self._lock = threading.RLock()  # a signal's handler may ask too
        self._kept: OrderedDict[StructuredOutputs, TokenAutomaton | str] = OrderedDict()
        self._bytes = 0
        self._came: OrderedDict[int, None] = OrderedDict()
        """Hashes of grammars that requests came with."""
        self._failed: OrderedDict[int, int] = OrderedDict()
        """How often it failed to make a table, by the grammar's hash."""

    def find(self, spec: StructuredOutputs) -> TokenAutomaton | str | None:
        """The automaton, or why there is none; None as long as that is not known."""
        with self._lock:
            found = self._kept.get(spec)
            if found is not None:
                self._kept.move_to_end(spec)
            return found

    def of(self, spec: StructuredOutputs, grammar: CompiledGrammar) -> TokenAutomaton | str:
        """The automaton of what ``spec`` was compiled to, made here if it is not there yet; or why
        there is none."""
        found = self.find(spec)
        if found is not None:
            return found
        try:
            made = automaton_of(spec, grammar, (), budget_bytes=self._budget)
        except MemoryError as error:  # there may be more later
            _warn(error)
            return TABLE_FAILED
        except Exception as error:  # whatever it is, the host can still follow the grammar
            _warn(error)
            made = TABLE_FAILED
        self._keep(spec, made)
        return made

    def wanted(self, spec: StructuredOutputs, grammar: CompiledGrammar) -> TokenAutomaton | str:
        """What there is for a request that is added now. A grammar that comes again is worth a
        table: the maker is asked for it."""
        found = self.of(spec, grammar) if self.maker is None else self.find(spec)
        if found is not None:
            return found
        reason = excluded(spec, grammar.compiler)
        if reason is not None:
            self._keep(spec, reason)
            return reason
        assert self.maker is not None
        if self._has_come(spec):
            self.maker.ask(spec)
        return self.find(spec) or TABLE_LATER

    def put(self, spec: StructuredOutputs, made: TokenAutomaton | str | None) -> None:
        """What the maker has made, or why there is none; None where it failed."""
        if made is None:
            with self._lock:
                failures = self._failed[hash(spec)] = self._failed.pop(hash(spec), 0) + 1
                _shorten(self._failed)
            if failures < TRIES:
                return
        self._keep(spec, TABLE_FAILED if made is None else made)

    def close(self) -> None:
        """Nothing is made in the background any more."""
        if self.maker is not None:
            self.maker.close()

    def _has_come(self, spec: StructuredOutputs) -> bool:
        """A request came with this grammar before, which this one does too."""
        with self._lock:
            came = hash(spec) in self._came
            self._came[hash(spec)] = None
            self._came.move_to_end(hash(spec))
            _shorten(self._came)
        return came

    def _keep(self, spec: StructuredOutputs, made: TokenAutomaton | str) -> None:
        with self._lock:
            if spec not in self._kept:
                self._kept[spec] = made
                self._bytes += _size(spec, made)
            while self._bytes > KEPT_POOLS * self._budget or len(self._kept) > KEPT_REASONS:
                dropped, of_it = self._kept.popitem(last=False)
                self._bytes -= _size(dropped, of_it)
                self._came.pop(hash(dropped), None)


def _shorten(known: OrderedDict[int, int] | OrderedDict[int, None]) -> None:
    while len(known) > KNOWN_GRAMMARS:
        known.popitem(last=False)


def _warn(error: Exception) -> None:
    logger.warning(
        "a grammar has no automaton, since to make it failed (%s: %s)",
        type(error).__name__,
        shown(str(error)),
    )


def _size(spec: StructuredOutputs, made: TokenAutomaton | str) -> int:
    """Bytes of a table, and characters of its grammar."""
    values = (getattr(spec, item.name) for item in dataclasses.fields(spec))
    texts = [value for value in values if isinstance(value, str)]
    characters = sum(map(len, (*texts, *(spec.choice or ()))))
    return characters + (0 if isinstance(made, str) else made.byte_size)
