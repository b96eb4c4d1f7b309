"""What each name of megatron-core's inference does here, as data.

The adapters of this package ask these tables: a keyword with a value that they do not list, and an
attribute that they refuse, get an error with the reason that stands here. ``docs/megatron.md`` is
made from them (``scripts/megatron_names.py``), so neither can say what the other does not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.errors import ConfigError, shown
from megatron_async.megatron_api.since import SINCE

ANY = "any value"
"""Stands for a keyword whose every value is accepted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of one name.

    Attributes:
        outcome: "works", "accepted" (without effect) or "refused".
        note: what it does, or why it does nothing, or why it is refused.
        values: of an accepted keyword the values that pass; others are refused with the note.
    """

    outcome: str
    note: str
    values: tuple[Any, ...] = (ANY,)


def works(note: str) -> Entry:
    """The name does what it does in megatron-core; the note says how, or where it differs."""
    return Entry("works", note)


def accepted(note: str, *values: Any) -> Entry:
    """The name may be given, and changes nothing. Without ``values`` all may be."""
    return Entry("accepted", note, values or (ANY,))


def refused(note: str) -> Entry:
    """The name raises an error with this reason."""
    return Entry("refused", note)


Table = dict[str, Entry]
FIRST, LAST = "0.16", "0.19"
"""Releases that ``since`` is about."""


@functools.cache
def releases(table: str) -> dict[str, tuple[str, str | None]]:
    """Return for each name of a table the first release that has it, and the last if it is gone.

    Args:
        table: as it is called in ``tables`` and ``main_tables``; ``"CLASSES"`` of classes.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for span, names in SINCE[table].items():
        first, _, last = span.partition("-")
        found |= dict.fromkeys(names.split(), (first, last or None))
    return found


def names_of(table: str, release: str) -> set[str]:
    """The names that a release such as ``"0.17"`` has."""
    number = int(release.partition(".")[2])

    def is_there(first: str, last: str | None) -> bool:
        return int(first.partition(".")[2]) <= number <= int((last or LAST).partition(".")[2])

    return {name for name, span in releases(table).items() if is_there(*span)}


def check_keywords(where: str, table: Table, given: Mapping[str, Any]) -> None:
    """Refuse what the table does not let pass.

    Raises:
        ConfigError: a name is unknown, or its value would have an effect that there is none of.
    """
    for name, value in given.items():
        entry = table.get(name)
        if entry is None:
            raise ConfigError(f"{where} has no argument {name!r}; docs/megatron.md lists them")
        if entry.outcome == "accepted" and ANY not in entry.values and not _is_one(value, entry):
            neutral = " or ".join(map(str, entry.values))
            raise ConfigError(
                f"{name}={shown(value)} is not supported: {entry.note}; use {neutral}"
            )


def _is_one(value: Any, entry: Entry) -> bool:
    return any(value is each or (type(value) is type(each) and value == each)
               for each in entry.values)  # fmt: skip


def no_attribute(owner: object, name: str, table: Table) -> AttributeError:
    """The error for an attribute that ``owner`` does not have, with megatron-core's reason."""
    entry = table.get(name)
    said = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if entry is not None and entry.outcome == "refused":
        said += f": {entry.note}"
    return AttributeError(said, name=name, obj=owner)
