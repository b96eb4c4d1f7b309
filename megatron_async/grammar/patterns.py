r"""Regular expressions of JSON schemas, where validators read them in several ways.

What ``\s`` takes differs: U+0085 is whitespace to the library and to Python, and U+FEFF to
ECMAScript, whose expressions those of schemas are. Neither is written for ``\s`` or for ``\S``, so
that what is written conforms for every reader.
"""

from __future__ import annotations

import re

SPACES = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""What all take ``\\s`` for."""
_NO_SPACE = r"[^\s\ufeff]"
_PART = re.compile(r"\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)
_IN_CLASS = {
    "[": {r"\s": SPACES, r"\S": _NO_SPACE},
    "[^": {r"\s": r"\s\ufeff", r"\S": r"\S\u0085"},
}
_OUTSIDE = {r"\s": f"[{SPACES}]", r"\S": _NO_SPACE}


def of_all_readers(pattern: str) -> str:
    r"""``pattern`` with ``\s`` and ``\S`` as all validators read them."""
    if r"\s" not in pattern and r"\S" not in pattern:
        return pattern
    inside: str | None = None
    parts = []
    for part in _PART.findall(pattern):
        if inside is None and part in _IN_CLASS:
            inside = part
        elif part == "]":
            inside = None
        parts.append((_OUTSIDE if inside is None else _IN_CLASS[inside]).get(part, part))
    return "".join(parts)
