"""GBNF, the EBNF of llama.cpp, translated into the grammar language of llguidance.

llguidance has a lexer below its parser, and the lexer is greedy: a lexeme goes on for as long as it
can. A rule that does not refer to itself, however indirectly, is a regular expression and becomes
one lexeme; in a recursive rule so does each stretch between two recursive rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

MAX_DEPTH = 64
"""Parentheses inside each other."""
MAX_RULES = 1_000
MAX_REPEAT = 10_000

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEFINES = re.compile(r"[A-Za-z0-9_-]+\s*::=")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '\\"[]^-/'}


class Regex(NamedTuple):
    """A regular expression of one character, or of a literal."""

    text: str


class Reference(NamedTuple):
    name: str
    position: int


class Sequence(NamedTuple):
    items: tuple[Node, ...]


class Choice(NamedTuple):
    items: tuple[Node, ...]


class Repeat(NamedTuple):
    item: Node
    low: int
    high: int | None


Node = Regex | Reference | Sequence | Choice | Repeat


def escaped(text: str) -> str:
    """A regular expression that matches ``text`` alone."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):X}}}" for c in text)


def to_lark(text: str) -> str:
    """The rules of a GBNF grammar as llguidance takes them, ``root`` under the name ``start``.

    Raises:
        ValueError: what is wrong, and in which line.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise ValueError("there is no rule root; add root ::= ..., which the whole text matches")
    below = _below(rules)
    reached = [name for name in rules if name == "root" or name in below["root"]]
    _check_productive({name: rules[name] for name in reached})
    recursive = {name for name in reached if name in below[name]}
    parsed = {name for name in reached if recursive & (below[name] | {name})}
    names = {name: f"{'r' if name in parsed else 'T'}{n}" for n, name in enumerate(reached)}
    lines = [f"start: {names['root']}"]
    writer = _Writer(names, parsed)
    for name in reached:
        body = writer.rule(rules[name]) if name in parsed else writer.terminal(rules[name])
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines + writer.lexemes)


class _Parser:
    """Recursive descent. A rule ends where the next one begins, whatever the lines."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        references: list[Reference] = []
        self._references = references
        self._skip_space()
        while self._at < len(self._text):
            name = self._match(_NAME)
            self._skip_space()
            if name is None or not self._text.startswith("::=", self._at):
                self._fail("expected a rule, name ::= ...")
            if name[0] in rules:
                self._fail(f"rule {name[0]} is there twice")
            if len(rules) == MAX_RULES:
                self._fail(f"more than {MAX_RULES:,} rules; use fewer")
            self._at += len("::=")
            self._skip_space()
            rules[name[0]] = self._choice()
        for reference in references:
            if reference.name not in rules:
                self._at = reference.position
                self._fail(f"there is no rule {reference.name}")
        return rules

    def _choice(self) -> Node:
        items = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip_space()
            items.append(self._sequence())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        char = self._text[self._at : self._at + 1]
        if char in ("", "|", ")") or _DEFINES.match(self._text, self._at):
            return None
        item: Node
        if char == '"':
            item = Regex("".join(escaped(c) for c, _ in self._characters('"')))
        elif char == "[":
            item = Regex(self._character_class())
        elif char == "(":
            item = self._group()
        elif char == ".":
            self._at += 1
            item = Regex("(?s:.)")
        elif name := self._match(_NAME):
            item = Reference(name[0], name.start())
            self._references.append(item)
        else:
            self._fail(f"unexpected {char!r}")
        self._skip_space()
        return self._repeated(item)

    def _group(self) -> Node:
        if self._depth == MAX_DEPTH:
            self._fail(f"more than {MAX_DEPTH} parentheses inside each other; use further rules")
        self._at += 1
        self._depth += 1
        self._skip_space()
        item = self._choice()
        self._depth -= 1
        if not self._text.startswith(")", self._at):
            self._fail("expected )")
        self._at += 1
        return item

    def _repeated(self, item: Node) -> Node:
        while (char := self._text[self._at : self._at + 1]) and char in "*+?{":
            if char == "{":
                counts = self._match(_COUNTS)
                if counts is None:
                    self._fail("expected {m}, {m,} or {m,n}")
                low = int(counts[1])
                high = (int(counts[3]) if counts[3] else None) if counts[2] else low
                if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
                    self._fail(f"repeat m to n times, m <= n <= {MAX_REPEAT:,}")
            else:
                self._at += 1
                low, high = int(char == "+"), 1 if char == "?" else None
            item = Repeat(item, low, high)
            self._skip_space()
        return item

    def _character_class(self) -> str:
        negated = self._text.startswith("[^", self._at)
        self._at += negated
        characters = list(self._characters("]"))
        parts: list[str] = []
        at = 0
        while at < len(characters):
            low = high = characters[at][0]
            if characters[at + 1 : at + 2] == [("-", False)] and at + 2 < len(characters):
                high = characters[at + 2][0]
                if high < low:
                    self._fail(f"{low}-{high} is no range")
                at += 2
            at += 1
            parts.append(rf"{escaped(low)}-{escaped(high)}")
        if not parts:
            if not negated:
                self._fail("[] matches nothing")
            return "(?s:.)"
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _characters(self, end: str) -> Iterator[tuple[str, bool]]:
        """Characters up to ``end``, each with whether it was escaped."""
        start = self._at
        self._at += 1
        while not self._text.startswith(end, self._at):
            char = self._text[self._at : self._at + 1]
            if not char:
                self._at = start
                self._fail(f"{self._text[start]} without {end}")
            if char != "\\":
                self._at += 1
                yield char, False
                continue
            yield self._escape(), True
        self._at += 1

    def _escape(self) -> str:
        found = _ESCAPE.match(self._text, self._at)
        code = found and (found[1] or found[2] or found[3])
        if found is None or (not code and found[4] not in _ESCAPED):
            self._fail(
                'unknown escape; there are \\xHH \\uHHHH \\UHHHHHHHH \\n \\r \\t \\\\ \\" \\[ \\]'
            )
        number = int(code, 16) if code else ord(_ESCAPED[found[4]])
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            self._fail(f"{found[0]} is no character")
        self._at = found.end()
        return chr(number)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _skip_space(self) -> None:
        self._match(_SPACE)

    def _fail(self, message: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise ValueError(f"line {line}: {message}")


class _Writer:
    """Nodes in llguidance's syntax: upper-case names are lexemes, lower-case ones rules."""

    def __init__(self, names: dict[str, str], parsed: set[str]) -> None:
        self._names = names
        self._parsed = parsed
        self.lexemes: list[str] = []

    def terminal(self, node: Node) -> str:
        match node:
            case Regex(text):
                return f"/{text}/" if text else '""'
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return f"({' '.join(map(self.terminal, items))})" if items else '""'
            case Choice(items):
                return f"({' | '.join(map(self.terminal, items))})"
            case Repeat(item, low, high):
                return f"({self.terminal(item)}){_counts(low, high)}"

    def rule(self, node: Node) -> str:
        if not self._is_parsed(node):
            return self._lexeme(node)
        match node:
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return f"({' '.join(self._stretches(items))})"
            case Choice(items):
                return f"({' | '.join(map(self.rule, items))})"
            case Repeat(item, low, high):
                return f"({self.rule(item)}){_counts(low, high)}"
        raise AssertionError(node)

    def _stretches(self, items: tuple[Node, ...]) -> Iterator[str]:
        stretch: list[Node] = []
        for item in items:
            if not self._is_parsed(item):
                stretch.append(item)
                continue
            if stretch:
                yield self._lexeme(Sequence(tuple(stretch)))
            stretch = []
            yield self.rule(item)
        if stretch:
            yield self._lexeme(Sequence(tuple(stretch)))

    def _lexeme(self, node: Node) -> str:
        name = f"L{len(self.lexemes)}"
        self.lexemes.append(f"{name}: {self.terminal(node)}")
        return name

    def _is_parsed(self, node: Node) -> bool:
        return any(reference.name in self._parsed for reference in _references(node))


def _counts(low: int, high: int | None) -> str:
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _references(node: Node) -> Iterator[Reference]:
    match node:
        case Reference():
            yield node
        case Sequence(items) | Choice(items):
            for item in items:
                yield from _references(item)
        case Repeat(item, _, _):
            yield from _references(item)


def _below(rules: dict[str, Node]) -> dict[str, set[str]]:
    """Rules that each rule refers to, however indirectly."""
    names = list(rules)
    number = {name: n for n, name in enumerate(names)}
    direct = [{number[found.name] for found in _references(node)} for node in rules.values()]
    below = [sum(1 << n for n in numbers) for numbers in direct]  # bit n: rule n
    before: list[int] = []
    while below != before:
        before = list(below)
        # Rules mostly refer to later ones, so going backwards one round is nearly enough.
        for n in reversed(range(len(names))):
            for other in direct[n]:
                below[n] |= below[other]
    return {
        name: {other for other in names if bits >> number[other] & 1}
        for name, bits in zip(names, below, strict=True)
    }


def _check_productive(rules: dict[str, Node]) -> None:
    """Each rule matches some text: one that always needs itself again could never end."""
    good: set[str] = set()

    def ends(node: Node) -> bool:
        match node:
            case Regex():
                return True
            case Reference(name):
                return name in good
            case Sequence(items):
                return all(map(ends, items))
            case Choice(items):
                return any(map(ends, items))
            case Repeat(item, low, _):
                return low == 0 or ends(item)

    known = -1
    while known < len(good):
        known = len(good)
        for name in reversed(rules):
            if name not in good and ends(rules[name]):
                good.add(name)
    for name in rules:
        if name not in good:
            raise ValueError(f"rule {name} needs itself and can never end; give it another way")
