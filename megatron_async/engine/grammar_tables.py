"""Which requests may be guided by token automata on the device, and which may not and why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.engine.metrics import HostMasks
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.step.extras import GrammarTable

if TYPE_CHECKING:
    from megatron_async.grammar.automata.table import TokenAutomaton

NUMBERED_GRAMMARS = 1024
"""That are known again when they come back."""
MOST_REASONS = 64
KEPT_POOLS = 8
"""Requests that have not ended keep as many bytes of automata as that many pools have."""


class GrammarTables:
    """Tables of requests from their commands to their retirement.

    What it answers follows from the order of commands and retired tickets, so it is asked in the
    thread that steps.

    Args:
        budget: bytes of the pool.
        token_bytes: gives what each token adds to a text, once a grammar has been compiled.
    """

    def __init__(
        self, runner: ModelRunner, budget: int, token_bytes: Callable[[], Sequence[bytes]]
    ) -> None:
        self._runner = runner
        self._budget = budget
        self._token_bytes = token_bytes
        self._numbers: OrderedDict[Any, int] = OrderedDict()
        """By what a text conforms to, of the last ones."""
        self._next = 0
        self._tables: dict[int, GrammarTable] = {}
        """By scheduler key."""
        self._users: dict[int, int] = {}
        """By number the requests that have the table."""
        self._reasons: set[str] = set()
        self._bytes = 0
        """Size of the tables that some request has."""
        self.capacity: int | None = None
        """States of the pool; None before there is one."""

    def open_pool(self) -> int:
        """States of the pool, which is opened if there is none; 0 without room for one."""
        if self.capacity is None:
            self.capacity = self._runner.open_automata(self._token_bytes(), self._budget)
        return self.capacity

    def has_pool(self, *, may_open: bool) -> bool:
        """There is a pool, or may be one and is now."""
        if self.capacity is None and not may_open:
            return False
        return self.open_pool() > 0

    def open(self, key: int, spec: Any, automaton: TokenAutomaton | str) -> GrammarTable | str:
        """The table of a request from here to :meth:`close`, or why it has none.

        Args:
            spec: what its text conforms to.
            automaton: of that, or why there is none.
        """
        if isinstance(automaton, str):
            return self._counted(automaton)
        budget, states = self._budget, len(automaton.accepting)
        if states >= self.open_pool():
            return HostMasks.POOL.value
        number = self._number(spec)
        if number not in self._users:
            if self._bytes + automaton.byte_size > KEPT_POOLS * budget:
                return HostMasks.MANY.value
            self._bytes += automaton.byte_size
        self._users[number] = self._users.get(number, 0) + 1
        forces = bool((automaton.forced >= 0).any())
        table = self._tables[key] = GrammarTable(number, states, forces, automaton)
        return table

    def close(self, key: int) -> None:
        """The last ticket of a request has retired, or it was taken back."""
        table = self._tables.pop(key, None)
        if table is None:
            return
        self._users[table.number] -= 1
        if not self._users[table.number]:
            del self._users[table.number]
            self._bytes -= table.automaton.byte_size

    def _counted(self, reason: str) -> str:
        """A reason as it is counted: grammars are anybody's, and counters have a label for each."""
        if len(self._reasons) < MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else HostMasks.OTHER.value

    def _number(self, spec: Any) -> int:
        number = self._numbers.get(spec)
        if number is None:
            number = self._numbers[spec] = self._next
            self._next += 1
            if len(self._numbers) > NUMBERED_GRAMMARS:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(spec)
        return number
