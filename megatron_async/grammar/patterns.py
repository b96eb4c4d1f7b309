r"""Regular expressions of JSON schemas, where validators read them in several ways.

What ``\s`` takes differs: U+0085 is whitespace to the library and to Python, and U+FEFF to
ECMAScript, whose expressions those of schemas are. Neither is written for ``\s`` or for ``\S``, so
that what is written conforms for every reader.
"""

from __future__ import annotations

import re

from megatron_async.errors import shown

SPACES = r"\t-\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""What all take ``\\s`` for."""
_PLAIN = {r"\s": f"[{SPACES}]", r"\S": r"[^\s\ufeff]"}
"""In classes too: the library's may lie in each other."""
_IN_NEGATED = {r"\s": r"\s\ufeff", r"\S": r"\S\u0085"}
_OPENING = r"\[\^?\]?"
_PART_OUTSIDE = re.compile(rf"{_OPENING}|\\.|[^\\\[]+", re.DOTALL)
# A range stays one part, since what ends it is a character and no class.
_PART_OF_CLASS = re.compile(
    rf"(?:\\.|[^\\\[\]-])-(?:\\.|[^\\\[\]-])|{_OPENING}|\\.|[^\\\[\]-]+(?!-)|.", re.DOTALL
)


def of_all_readers(pattern: str) -> str:
    r"""``pattern`` with ``\s`` and ``\S`` as all validators read them.

    Raises:
        ValueError: ``pattern`` ends within an escape.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError(f"pattern {shown(pattern[-40:])} ends with a single backslash; write two")
    if r"\s" not in pattern and r"\S" not in pattern:
        return pattern
    negated: list[bool] = []  # of the classes that are open
    parts, at = [], 0
    while at < len(pattern):
        match = (_PART_OF_CLASS if negated else _PART_OUTSIDE).match(pattern, at)
        assert match is not None
        part, at = match.group(), match.end()
        if part[0] == "[":
            negated.append((bool(negated) and negated[-1]) != part.startswith("[^"))
        elif part == "]" and negated:
            negated.pop()
        written = _IN_NEGATED if negated and negated[-1] else _PLAIN
        parts.append(written.get(part, part))
    return "".join(parts)
