"""JSON read character by character."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 128
"""The depth of lists and objects in each other."""

WHITESPACE = " \t\r\n"
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_IN_LITERAL = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CLOSED_BY = {"{": "}", "[": "]"}


class State(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()
    """Or the end of the list."""
    KEY = auto()
    FIRST_KEY = auto()
    """Or the end of the object."""
    COLON = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    AFTER_VALUE = auto()
    DONE = auto()


class JsonScanner:
    """Tells after each character whether a text may still become one JSON value.

    Control characters in strings are let through, as ``json.loads(..., strict=False)`` does.

    Attributes:
        state: what may come next.
        depth: lists and objects that are open.
    """

    __slots__ = ("_in_key", "_literal", "_open", "_to_come", "state")

    def __init__(self) -> None:
        self.state = State.VALUE
        self._open: list[str] = []
        self._in_key = False
        self._literal = ""
        self._to_come = 0

    @property
    def depth(self) -> int:
        """Lists and objects that are open."""
        return len(self._open)

    def feed(self, char: str) -> bool:
        """Take one character; False if it cannot come here, and nothing more may be fed then."""
        state = self.state
        if state is State.STRING:
            if char == '"':
                self.state = State.COLON if self._in_key else self._after_value()
            elif char == "\\":
                self.state = State.ESCAPE
            return True
        if state is State.LITERAL:
            if char in _IN_LITERAL:
                self._literal += char
                return True
            if not _LITERAL.fullmatch(self._literal):
                return False
            self.state = state = self._after_value()
        elif state is State.ESCAPE:
            self.state, self._to_come = (State.HEX, 4) if char == "u" else (State.STRING, 0)
            return char in '"\\/bfnrtu'
        elif state is State.HEX:
            self._to_come -= 1
            if not self._to_come:
                self.state = State.STRING
            return char in "0123456789abcdefABCDEF"
        if char in WHITESPACE:
            return True
        if state in (State.VALUE, State.FIRST_VALUE):
            return self._value(char)
        if state in (State.KEY, State.FIRST_KEY):
            if char == '"':
                self.state, self._in_key = State.STRING, True
                return True
            return state is State.FIRST_KEY and self._close(char)
        if state is State.COLON:
            self.state = State.VALUE
            return char == ":"
        if state is State.AFTER_VALUE:
            if char == ",":
                self.state = State.KEY if self._open[-1] == "{" else State.VALUE
                return True
            return self._close(char)
        return False

    def _value(self, char: str) -> bool:
        if char == '"':
            self.state, self._in_key = State.STRING, False
        elif char in "{[":
            self._open.append(char)
            self.state = State.FIRST_KEY if char == "{" else State.FIRST_VALUE
            return len(self._open) <= MAX_DEPTH
        elif char in "-0123456789tfn":
            self.state, self._literal = State.LITERAL, char
        else:
            return self.state is State.FIRST_VALUE and self._close(char)
        return True

    def _close(self, char: str) -> bool:
        if char != _CLOSED_BY[self._open[-1]]:
            return False
        self._open.pop()
        self.state = self._after_value()
        return True

    def _after_value(self) -> State:
        return State.AFTER_VALUE if self._open else State.DONE
