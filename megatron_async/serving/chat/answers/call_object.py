"""The JSON object of one tool call, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from megatron_async.serving.chat.answers.json_scanner import WHITESPACE, JsonScanner, State


class CallObject:
    """The JSON object of one call, read character by character.

    Args:
        bare: nothing but its form marks it as a call: it may have no other keys than calls have.
        names: that it may have then; None for any.

    Attributes:
        name: of the function, once known.
        announced: it is a call for certain: its name is known, and its arguments have begun.
        done: the object is complete.
    """

    ARGUMENTS = ("arguments", "parameters")
    KEYS = ("name", "type", "id", *ARGUMENTS)

    def __init__(self, *, bare: bool = False, names: Collection[str] | None = None) -> None:
        self.name: str | None = None
        self.announced = False
        self.done = False
        self._bare = bare
        self._names = names
        self._scanner = JsonScanner()
        self._key = ""
        # Where the characters of the present value go; None between values.
        self._target: list[str] | None = None
        self._value: list[str] = []
        self._arguments: list[str] = []
        self._arguments_begun = self._arguments_over = False

    def take_arguments(self) -> str:
        """New text of the arguments."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, char: str) -> bool:
        """Take one character; False if it cannot be of a call."""
        scanner = self._scanner
        before, depth = scanner.state, scanner.depth
        if not scanner.feed(char):
            return False
        if self._target is None and depth == 1 and not self._between_values(char, before):
            return False
        if self._target is not None and not self._in_value(char, before, depth, self._target):
            return False
        if scanner.state is State.DONE and not self._end():
            return False
        # One character into the arguments, so that {broken} is no call.
        begun = self._arguments_begun and scanner.state is not State.FIRST_KEY
        if self.name is not None and (begun or self._arguments_over):
            self.announced = True
        return True

    def _between_values(self, char: str, before: State) -> bool:
        """A character of a key, or the first one of a value."""
        if before in (State.KEY, State.FIRST_KEY):
            if char == '"':
                self._key = char
        elif before in (State.STRING, State.ESCAPE, State.HEX):
            self._key += char
            if self._scanner.state is State.COLON:
                self._key = json.loads(self._key, strict=False)
                return not self._bare or self._key in self.KEYS
        elif before is State.VALUE and char not in WHITESPACE:
            self._value.clear()
            self._target = self._value
            if self._key in self.ARGUMENTS:
                if self._arguments_begun:
                    return False
                if char == "{":
                    self._target, self._arguments_begun = self._arguments, True
        return True

    def _in_value(self, char: str, before: State, depth: int, target: list[str]) -> bool:
        """A character of a value, or what comes after a number."""
        scanner = self._scanner
        over = scanner.depth == 0 or (
            scanner.depth == 1 and scanner.state in (State.AFTER_VALUE, State.KEY)
        )
        if not (over and depth == 1 and before is State.LITERAL):
            is_raw = before is State.STRING and char < " "
            target.append(json.dumps(char)[1:-1] if is_raw else char)
        return not over or self._end_value()

    def _end_value(self) -> bool:
        """Whether the value is one that its key may have."""
        streamed, self._target = self._target is self._arguments, None
        if streamed:
            self._arguments_over = True
        elif self._key == "name":
            name = _value_of("".join(self._value))
            if self.name is not None or not isinstance(name, str) or not name:
                return False
            if self._bare and self._names is not None and name not in self._names:
                return False
            self.name = name
        elif self._key in self.ARGUMENTS:
            raw = "".join(self._value)
            text = "{}" if raw == "null" else _value_of(raw)
            if not isinstance(text, str) or not isinstance(_value_of(text), dict):
                return False
            self._arguments.append(text)
            self._arguments_begun = self._arguments_over = True
        return True

    def _end(self) -> bool:
        """The object is complete; whether it is a call."""
        if not self._arguments_over:
            if self._bare and self._names is None:
                return False
            self._arguments.append("{}")
            self._arguments_over = True
        self.done = self.name is not None
        return self.done


def _value_of(text: str) -> Any:
    """None if it is no JSON, or a number too large for Python."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
