r"""Reads regular expressions of which it is certain how the library reads them.

That is Rust's syntax without what depends on tables of Unicode that grow (``\w``, ``\d``, ``\p``;
the first two JSON schemas write in ASCII), without flags but ``s``, operations of classes, and
assertions but ``^`` and ``$`` at the ends. Whether a repetition is lazy changes nothing, since the
whole text matches.
"""

from __future__ import annotations

import re

from megatron_async.grammar.automata.expressions import (
    ANY,
    ANY_BUT_NEWLINE,
    EMPTY,
    Characters,
    Choice,
    Node,
    NotCoveredError,
    Ranges,
    Repeat,
    Text,
    choice,
    complement,
    sequence,
    union,
)

MOST_DEPTH = 32
"""Groups and classes inside each other."""
MOST_REPETITIONS = 3
"""How often a repetition is repeated again."""
_COUNTS = re.compile(r"\{(\d{1,5})(,?)(\d{0,5})\}")
_GROUP = re.compile(r"\((\?:|\?s:|\?P?<([A-Za-z_][A-Za-z0-9_]*)>)?")
_CODE = re.compile(
    r"x([0-9A-Fa-f]{2})|x\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}"
)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_PUNCTUATION = set("\\.+*?()|[]{}^$#&-~/\"'!%,:;=@`_ ")
_ASCII = {
    "d": union([(48, 57)]),
    "w": union([(48, 57), (65, 90), (95, 95), (97, 122)]),
}
_BLANKS = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WHITE = {"s": union((ord(part[0]), ord(part[-1])) for part in re.findall(".-.|.", _BLANKS, re.S))}
"""Unicode's White_Space, to which nothing is added any more."""
_OPERATIONS = ("&&", "--", "~~")


def parsed(pattern: str, *, ascii_classes: bool = False) -> Node:
    r"""What ``pattern`` matches as a whole.

    Args:
        ascii_classes: ``\d`` and ``\w`` stand for characters of ASCII.

    Raises:
        NotCoveredError: it has something of which it is not certain how the library reads it.
    """
    anchored = _Parser(pattern, ascii_classes).alternatives()
    return choice(node for node, _, _ in anchored)


def found_in(pattern: str, *, ascii_classes: bool = True) -> Node:
    """Texts in which ``pattern`` is found, as JSON schemas read theirs."""
    rest = Repeat(Characters(ANY), 0, None)
    anchored = _Parser(pattern, ascii_classes).alternatives()
    return choice(
        sequence(*([] if begins else [rest]), node, *([] if ends else [rest]))
        for node, begins, ends in anchored
    )


class _Parser:
    """Recursive descent."""

    def __init__(self, text: str, ascii_classes: bool) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._ascii = ascii_classes
        self._dot = ANY_BUT_NEWLINE

    def alternatives(self) -> list[tuple[Node, bool, bool]]:
        """What the whole text may be, each with whether it begins by ``^`` and ends by ``$``."""
        found = []
        while True:
            begins = self._take("^")
            items = self._items()
            found.append((sequence(*items) if items else EMPTY, begins, self._take("$")))
            if not self._take("|"):
                break
        if self._at < len(self._text):
            raise NotCoveredError("regex: $")
        return found

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _items(self) -> list[Node]:
        items: list[Node] = []
        while (node := self._atom()) is not None:
            items.append(self._repeated(node))
        return items

    def _atom(self) -> Node | None:
        char = self._text[self._at : self._at + 1]
        if char in ("", "|", ")", "$"):
            return None
        if char == "(":
            return self._group()
        if char == "[":
            return Characters(self._class())
        if char in "*+?{^":
            raise NotCoveredError(f"regex: {char}")
        self._at += 1
        if char == ".":
            return Characters(self._dot)
        if char == "\\":
            ranges = self._escape()
            (first, last), *others = ranges
            if others or first != last:
                return Characters(ranges)
            char = chr(first)
        return Text(char.encode())

    def _group(self) -> Node:
        match = _GROUP.match(self._text, self._at)
        assert match is not None
        if match[2] == "stop" or (match[1] is None and self._text.startswith("(?", self._at)):
            raise NotCoveredError("regex: (?")
        self._enter()
        self._at = match.end()
        before = self._dot
        if match[1] == "?s:":
            self._dot = ANY
        found = []
        while True:
            items = self._items()
            found.append(sequence(*items) if items else EMPTY)
            if not self._take("|"):
                break
        if not self._take(")"):
            raise NotCoveredError("regex: $ in a group")
        self._dot = before
        self._depth -= 1
        return found[0] if len(found) == 1 else Choice(tuple(found))

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise NotCoveredError("regex: depth")

    def _repeated(self, node: Node) -> Node:
        for _ in range(MOST_REPETITIONS):
            char = self._text[self._at : self._at + 1]
            if char and char in "*+?":
                self._at += 1
                node = Repeat(node, int(char == "+"), 1 if char == "?" else None)
            elif char == "{":
                node = self._counted(node)
            else:
                return node
            self._take("?")  # lazy
        if self._text.startswith(("*", "+", "?", "{"), self._at):
            raise NotCoveredError("regex: repetitions")
        return node

    def _counted(self, node: Node) -> Node:
        match = _COUNTS.match(self._text, self._at)
        if match is None:
            raise NotCoveredError("regex: {")
        self._at = match.end()
        low = int(match[1])
        high = int(match[3]) if match[3] else None
        if not match[2]:
            high = low
        if high is not None and high < low:
            raise NotCoveredError("regex: {")
        return Repeat(node, low, high)

    def _class(self) -> Ranges:
        self._enter()
        self._at += 1
        negated = self._take("^")
        if self._text.startswith("[:", self._at - 1 - negated):
            raise NotCoveredError("regex: [:")
        found: list[tuple[int, int]] = [(93, 93)] if self._take("]") else []
        while not self._take("]"):
            found += self._of_class()
        self._depth -= 1
        ranges = union(found)
        ranges = complement(ranges) if negated else ranges
        if not ranges:
            raise NotCoveredError("regex: an empty class")
        return ranges

    def _of_class(self) -> Ranges:
        if self._text.startswith(_OPERATIONS, self._at):
            raise NotCoveredError(f"regex: {self._text[self._at : self._at + 2]}")
        if self._text.startswith("[", self._at):
            return self._class()
        first = self._of_class_alone()
        follows = self._text[self._at + 1 : self._at + 2]
        if not self._text.startswith("-", self._at) or follows in ("]", ""):
            return first
        if follows in ("-", "["):
            raise NotCoveredError("regex: - in a class")
        self._at += 1
        last = self._of_class_alone()
        (low, also_low), *others = first
        (high, also_high), *more = last
        if others or more or low != also_low or high != also_high or low > high:
            raise NotCoveredError("regex: - in a class")
        return union([(low, high)])

    def _of_class_alone(self) -> Ranges:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise NotCoveredError("regex: [")
        self._at += 1
        return self._escape() if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self) -> Ranges:
        """What stands behind a backslash."""
        match = _CODE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            code = int(next(filter(None, match.groups())), 16)
            if not union([(code, code)]) or code > 0x10FFFF:
                raise NotCoveredError("regex: no character")
            return ((code, code),)
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _CONTROLS:
            return ((ord(_CONTROLS[char]),) * 2,)
        if char in _PUNCTUATION:
            return ((ord(char), ord(char)),)
        known = _ASCII | _WHITE if self._ascii else _WHITE
        if char.lower() in known:
            ranges = known[char.lower()]
            return ranges if char.islower() else complement(ranges)
        raise NotCoveredError(f"regex: \\{char}")
