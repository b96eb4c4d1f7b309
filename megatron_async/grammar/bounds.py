"""Bounds of JSON's numbers, which hold for the double that a parser makes of a text.

The library compares texts digit by digit: 0.50000000000000002 is above 0.5 to it, and is 0.5 to
what reads it. Rounding keeps the order, so that ``minimum`` and ``maximum`` hold for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from megatron_async.grammar.patterns import of_all_readers

LARGEST_BOUND = 2**53
SMALLEST_BOUND = 1e-40
"""No bound is nearer to 0, but for 0 itself: the library's rules nest by a level a digit."""
EXACT_DIGITS = 15
"""A decimal of no more digits is the shortest text of its double, and the library keeps it."""
MOST_REMAINDERS = 100_000
"""A schema's multiples have no more together: the library goes through all remainders when it
compiles, without a limit of its own, and takes about 20 us and 600 bytes for each."""
_FEW_REMAINDERS, _KNOWN_DIGITS, _TOO_MANY = 1024, 13, 10**60
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DATA = {"const", "enum", "default", "examples"}
"""Keywords whose values are no schemas."""
_NAMED = {"properties", "$defs", "definitions"}
"""Keywords of schemas by names, which may be those of keywords."""
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref"}
"""Keywords by which several bounds may hold for one number."""


def with_bounds_of_doubles(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that the library reads as ``schema`` is meant: exclusive bounds become the next
    ones that are not, multiples have as many digits as a double keeps, and patterns are those of
    all validators.

    Raises:
        ValueError: a bound is beyond what the library takes.
    """
    found = {name: _below(name, part) for name, part in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = of_all_readers(found["pattern"])
    for name in _BOUNDS:
        _check(name, found.get(name))
    _round_bounds(found)
    _limit_multiples(found)
    return found


def check_multiples(schema: dict[str, Any]) -> None:
    """Raises ValueError where the multiples of a schema are too much work for the library.

    It goes through the remainders of a multiple: 86400 has 86400, and 0.12 has 12. Where parts are
    combined any two multiples may meet, and then those of their least common multiple count, for
    each number.
    """
    numbers = [part for part in _schemas("", schema) if any(map(part.__contains__, _BOUNDS))]
    multiples = [part["multipleOf"] for part in numbers if _is_multiple(part.get("multipleOf"))]
    if not multiples:
        return
    combines = any(not _COMBINING.isdisjoint(part) for part in _schemas("", schema))
    if combines and len(numbers) > 1:
        count = len(numbers) * _remainders(*multiples)
    else:
        count = sum(map(_remainders, multiples))
    if count > MOST_REMAINDERS:
        most = max(multiples, key=_remainders)
        together = "it has" if len(numbers) == 1 else "with the other numbers it has"
        raise ValueError(
            f"multipleOf {most} is beyond what can be compiled: {together} more than "
            f"{MOST_REMAINDERS:,} remainders"
        )


def _remainders(*multiples: float) -> int:
    """How many remainders the least common multiple has; 1 without any. Small powers of 2 and 5
    are known to the library, with the zeros behind them, if they divide a power of ten of 13
    digits in their last decimal: it goes through 1024e4, and through 1e7 beside 1e-7."""
    numbers = [Decimal(repr(each)).normalize().as_tuple() for each in multiples]
    least = min((int(each.exponent) for each in numbers), default=0)
    found = 1
    for _, digits, exponent in numbers:
        whole = int("".join(map(str, digits))) * 10 ** (int(exponent) - least)
        found = math.lcm(found, whole)
        if found > _TOO_MANY:
            return found
    short, found = int(str(found).rstrip("0")), found * 10 ** max(least, 0)
    is_known = short <= _FEW_REMAINDERS and 10**_KNOWN_DIGITS % found == 0
    return short if is_known else found


def _is_multiple(value: Any) -> bool:
    return _is_number(value) and value != 0 and SMALLEST_BOUND <= abs(value) <= LARGEST_BOUND


def _schemas(keyword: str, value: Any) -> Iterator[dict[str, Any]]:
    """A schema and those inside of it."""
    if keyword in _DATA:
        return
    if isinstance(value, list):
        for part in value:
            yield from _schemas("", part)
    elif isinstance(value, dict):
        has_names = keyword in _NAMED or keyword == "patternProperties"
        if not has_names:
            yield value
        for name, part in value.items():
            yield from _schemas("" if has_names else name, part)


def _below(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if isinstance(value, list):
        return [_below("", part) for part in value]
    if not isinstance(value, dict):
        return value
    if keyword == "patternProperties":
        return {of_all_readers(name): _below("", part) for name, part in value.items()}
    if keyword in _NAMED:
        return {name: _below("", part) for name, part in value.items()}
    return with_bounds_of_doubles(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, bound: Any) -> None:
    if not _is_number(bound):
        return
    if abs(bound) > LARGEST_BOUND:
        raise ValueError(f"{name} {bound} is beyond {LARGEST_BOUND}, which is the most")
    if 0 < abs(bound) < SMALLEST_BOUND:
        raise ValueError(f"{name} {bound} is beyond {SMALLEST_BOUND}, which is the nearest to 0")


def _round_bounds(schema: dict[str, Any]) -> None:
    """Bounds as inclusive ones of few digits. Whole numbers of up to :data:`LARGEST_BOUND` are
    doubles, so that bounds of integers hold as they are."""
    if schema.get("type") == "integer":
        return
    for inclusive, exclusive, inwards, tighter in (
        ("minimum", "exclusiveMinimum", ROUND_CEILING, max),
        ("maximum", "exclusiveMaximum", ROUND_FLOOR, min),
    ):
        bounds = [
            _inwards(schema.pop(name), inwards, beyond=name == exclusive)
            for name in (inclusive, exclusive)
            if _is_number(schema.get(name))
        ]
        if bounds:
            _set(schema, inclusive, tighter(bounds))


def _set(schema: dict[str, Any], name: str, bound: float) -> None:
    """Bound a schema. Of a bound away from 0 the library refuses the first decimals alone, as 0.9
    of at most 0.99."""
    shorter = _shorter(bound) if (bound > 0) == (name == "maximum") else []
    if not shorter:
        schema[name] = bound
        return
    within = {"anyOf": [{name: bound}, {"enum": shorter}]}
    schema["allOf"] = [*schema.get("allOf", []), within]


def _shorter(bound: float) -> list[float]:
    """A bound with one decimal, with two and so on, but for all that it has."""
    whole, _, decimals = f"{Decimal(repr(bound)):f}".partition(".")
    found = (float(f"{whole}.{decimals[:count]}") for count in range(1, len(decimals)))
    return [number for number in dict.fromkeys(found) if number not in (bound, 0)]


def _inwards(bound: float, rounding: str, *, beyond: bool) -> float:
    """The nearest bound of :data:`EXACT_DIGITS` digits within a bound, or beyond an exclusive one.
    Whole numbers stay as they are."""
    if not beyond and float(bound).is_integer():
        return bound
    given, context = Decimal(repr(bound)), Context(EXACT_DIGITS, rounding)
    found = context.plus(given)
    if beyond and found == given:
        step = context.next_plus if rounding == ROUND_CEILING else context.next_minus
        found = step(given)
    if abs(found) >= Decimal(SMALLEST_BOUND):
        return float(found)
    return math.copysign(SMALLEST_BOUND, found) if given == 0 else 0.0


def _limit_multiples(schema: dict[str, Any]) -> None:
    multiple = schema.get("multipleOf")
    if not _is_number(multiple) or multiple == 0:
        return
    digits = -int(Decimal(repr(multiple)).normalize().as_tuple().exponent)
    most = LARGEST_BOUND if digits <= 0 else 10 ** max(EXACT_DIGITS - digits, 0)
    for name, limit, tighter in (("minimum", -most, max), ("maximum", most, min)):
        if _is_number(schema.get(name, 0)):
            schema[name] = tighter(schema.get(name, limit), limit)
