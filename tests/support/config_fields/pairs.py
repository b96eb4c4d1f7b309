"""Two fields of a config at a time: what one of them means may hang on the other."""

from __future__ import annotations

import random

from tests.support.config_fields.bases import BASES, Values
from tests.support.config_fields.cases import Case, cases

MOST_TRIES = 20
"""For a pair whose cases change no field in common."""


def changes(case: Case) -> tuple[Values, set[str]]:
    """The fields that a case sets, and those that it leaves out."""
    base = {"model_type": case.model_type, **BASES[case.model_type]}
    given = {k: v for k, v in case.values.items() if k not in base or base[k] is not v}
    return given, base.keys() - case.values.keys()


def joined(one: Case, other: Case) -> Case | None:
    """A case with the changes of both; None if both change the same, or one changes nothing."""
    (given, gone), (more, less) = changes(one), changes(other)
    touched, also = given.keys() | gone, more.keys() | less
    if not touched or not also or touched & also:
        return None
    base = {"model_type": one.model_type, **BASES[one.model_type], **given, **more}
    values = {name: value for name, value in base.items() if name not in gone | less}
    field, shown = f"{one.field}.{other.field}", f"{one.shown} ; {other.shown}"
    return Case(one.model_type, field, shown, values)


def pairs(model_type: str, count: int, rng: random.Random) -> list[Case]:
    """``count`` random pairs of a type's cases."""
    found, made = cases(model_type), []
    for _ in range(MOST_TRIES * count):
        pair = joined(*rng.sample(found, 2))
        if pair is not None:
            made.append(pair)
        if len(made) == count:
            break
    return made
