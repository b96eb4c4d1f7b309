"""What the fields of a ``config.json``, or of a file beside it, are to a type of model.

A field is heeded, or does not matter to inference, or has values that change nothing and is refused
or named with another. Any other field is named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_async.errors import CheckpointError, legible, shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FieldUses:
    """A row, or a part that rows share; ``|`` makes one of two, of which the right one wins.

    Args:
        heeded: names that the loader reads.
        neutral: names of which no value changes what the model computes.
        only: the values that are supported, of fields that are else refused or named. Null and
            absence are supported too.
    """

    heeded: frozenset[str] = frozenset()
    neutral: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, heeded: str = "", neutral: str = "", **only: tuple[Any, ...]) -> FieldUses:
        """A row of names that spaces divide."""
        return cls(frozenset(heeded.split()), frozenset(neutral.split()), only)

    def __or__(self, other: FieldUses) -> FieldUses:
        theirs = other.heeded | other.neutral | other.only.keys()
        return FieldUses(
            (self.heeded - theirs) | other.heeded,
            (self.neutral - theirs) | other.neutral,
            {n: x for n, x in self.only.items() if n not in theirs} | dict(other.only),
        )

    @property
    def names(self) -> frozenset[str]:
        """All that the row has."""
        return self.heeded | self.neutral | self.only.keys()

    def check(self, values: Mapping[str, Any], of: str = "config.json") -> None:
        """Hold the content of a ``config.json``, or of an object ``of`` it, against the row.

        Raises:
            CheckpointError: a field has another value than those that are supported.
        """
        for name in self.unsupported(values):
            known = ", ".join(shown(one) for one in self.only[name]) or "null"
            raise CheckpointError(
                f"{name}={shown(values[name])} is not supported; supported: {known}"
            )
        if unknown := self.unknown(values):
            names = legible(", ".join(unknown))
            logger.warning("fields of %s that are left unread: %s", legible(of), names)

    def unsupported(self, values: Mapping[str, Any]) -> list[str]:
        """The fields that have another value than those that are supported."""
        return [
            name
            for name, supported in self.only.items()
            if values.get(name) is not None
            and not any(_same(values[name], one) for one in supported)
        ]

    def unknown(self, values: Mapping[str, Any]) -> list[str]:
        """The fields that the row lacks and that say something, in their order by name."""
        return sorted(
            name
            for name, value in values.items()
            if name not in self.names and not name.startswith("_") and value not in _NOTHING
        )


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def _same(value: Any, other: Any) -> bool:
    """Equal, and no number that stands for a truth value."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
