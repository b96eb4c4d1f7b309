"""What is wrong with a schema or an expression, in the user's terms.

The library below quotes its own translation, and names its types and options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_MESSAGE = 500
"""Characters of a message, which may quote what it is about."""
UNKNOWN = "it uses what is not supported, or parts that contradict each other"
"""What is said where the library's words are none that are known here."""

_TYPES = {
    "f64": "a number",
    "positive integer": "an integer of at least 0",
    "array": "a list",
    "string": "a text",
    "object": "an object",
}


def explained(message: str) -> str:
    """One sentence for an error of the library, or of this package, which stays as it is."""
    message = re.split(r"\n\s*\d+ \| |<backtrace>|<non-verbose/>", message)[0].strip()
    message = re.sub(r"^(?:at )?\d+\(\d+\): ", "", message)
    message = re.sub(r"^failed to compile JSON schema: ", "", message)
    message = re.sub(r"^invalid regex .*? \(in regex\): ", "", message, flags=re.S)
    for pattern, said in _KNOWN:
        found = re.match(pattern, message, re.S)
        if found is not None:
            shown = said if isinstance(said, str) else said(found)
            return shown if len(shown) <= MAX_MESSAGE else f"{shown[:MAX_MESSAGE]} ..."
    return UNKNOWN


def _regex(found: re.Match[str]) -> str:
    """The reason, and the part of the expression that is underlined."""
    lines, reason = found[1].split("\n"), found[2].strip()
    reason = reason.replace("including look-ahead and look-behind, ", "").replace(", is", " is")
    marks = next((n for n, line in enumerate(lines) if re.fullmatch(r"\s*\^+\s*", line)), None)
    if not marks:
        return reason
    line, start = lines[marks - 1], lines[marks].index("^")
    part = line[start : lines[marks].rindex("^") + 1]
    return f"{reason}: {part}" if part else reason


def _names(found: re.Match[str]) -> str:
    names = json.loads(found[1])
    is_are = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {is_are} not supported"


def _reference(found: re.Match[str]) -> str:
    place = found[1].removeprefix("json-schema:///")
    return f"{place} lies outside of the schema; put what it names into $defs"


def _typed(found: re.Match[str]) -> str:
    return f"{found[2]} must be {_TYPES.get(found[1], 'of another type')}, not {found[3]}"


_Said = str | Callable[[re.Match[str]], str]
_KNOWN: tuple[tuple[str, _Said], ...] = (
    (
        r"oneOf constraints are not supported",
        "branches of oneOf may hold at once, or differ in numbers alone; use anyOf, or give each "
        "branch another type, or another text as const",
    ),
    (r"Unimplemented keys: (\[.*\])", _names),
    (r"Unknown format: (.*)", lambda found: f"format {found[1]} is not supported"),
    (r"Invalid type: (.*)", lambda found: f"type {found[1]} is none of JSON's types"),
    (r"Unsatisfiable schema: (.*)", lambda found: f"no value conforms to it: {found[1]}"),
    (r"Expected ([\w ]+?) for '(.*?)'(?: item)?, got (.*)", _typed),
    (r"Resource '(.*?)' is not present", _reference),
    (r"Pointer '(.*?)' does not exist", lambda found: f"the reference #{found[1]} leads nowhere"),
    (r"Anchor '(.*?)' does not exist", lambda found: f"the reference #{found[1]} leads nowhere"),
    (r"Invalid URI reference '(.*?)'", lambda found: f"{found[1]!r} is no reference"),
    (r"regex parse error:\n(.*)\nerror: (.*)", _regex),
    (
        r"lookarounds not supported yet",
        r"\b, \B, and ^ or $ in the midst of an expression, are not supported",
    ),
    (
        r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
        lambda found: f"patternProperties {found[1]} and {found[2]} take the same names",
    ),
    (r"invalid multiple of", "multipleOf must be above 0"),
    (r"Value for '(\w+)' has too many digits", lambda found: f"{found[1]} has too many digits"),
    # This package's own, and those of the library that are as good.
    (
        r"(?:line \d+: |there is no rule|rule \w+ needs|a schema is|the schema|it allows no text"
        r"|no token of|[$\w.]+ must be |(?:minimum|maximum|multipleOf|exclusive\w+) \S+ is beyond"
        r"|its parts|pattern .* ends with a single backslash).*",
        lambda found: found[0],
    ),
    (r".*recursion (?:depth|limit)", "its parts lie too deep inside each other"),
    (r".*\btoo (?:big|large|many|deep)\b", "it is too large"),
    (r"panic: assertion failed|.*limit exceeded|.*resource exhausted", "it is too large"),
)
