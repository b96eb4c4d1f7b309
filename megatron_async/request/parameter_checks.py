"""Checks of single sampling parameters: each takes a name and a value as a user gave it, and
returns an own copy in Python's own types, or raises a RequestError that names the parameter."""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from megatron_async.errors import RequestError, shown
from megatron_async.request.parameter_ranges import INTEGERS, MAX_TOKEN_ID, NUMBERS

Check = Callable[[str, Any], Any]

MAX_INTEGER = 2**63 - 1

_LISTS = (list, tuple, Set, range)


MAX_TEXTS = 1024
"""Stop words of a request: they are looked for in all of its text."""
MAX_TEXT_CHARACTERS = 65_536
MAX_SALT_CHARACTERS = 1024
MAX_LAYERS = 1024


def as_integer(value: object) -> int | None:
    """``value`` if it is an integer, one of NumPy's too; None if it is anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def integer(low: int, high: int = MAX_INTEGER, *, none: int | None = None) -> Check:
    """An integer in a range; None stands for ``none``."""

    def check(name: str, value: Any) -> int | None:
        if value is None and none is not None:
            return none
        number = as_integer(value)
        if number is None or number < low:
            raise RequestError(f"{name}={shown(value)} must be an integer of at least {low}")
        if number > high:
            raise RequestError(f"{name}={shown(value)} must be at most {high}")
        return number

    return check


def in_range(parameter: str, *, none: Any = None) -> Check:
    """A value of a sampling parameter's range; None stands for ``none``."""
    if parameter in NUMBERS:
        return number(*NUMBERS[parameter], none=none)
    low, high = INTEGERS[parameter]
    return integer(low, MAX_INTEGER if high is None else high, none=none)


def optional(check: Check) -> Check:
    """None, or what ``check`` takes."""
    return lambda name, value: None if value is None else check(name, value)


def number(low: float, high: float, *, none: float | None = None) -> Check:
    """A number in a range; None stands for ``none``."""

    def check(name: str, value: Any) -> float:
        if value is None and none is not None:
            return none
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise RequestError(f"{name}={shown(value)} must be a number")
        given: Any = value
        if not low <= given <= high:  # nor is NaN between them
            raise RequestError(f"{name}={shown(value)} must lie between {low:g} and {high:g}")
        return float(given)

    return check


def flag(name: str, value: Any) -> bool:
    """True or False; None is False."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if as_integer(value) not in (0, 1):
        raise RequestError(f"{name}={shown(value)} must be True or False")
    return bool(value)


def one_of(*choices: str) -> Check:
    """One of some words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            known = " or ".join(map(repr, choices))
            raise RequestError(f"{name}={shown(value)} must be {known}")
        return value

    return check


def seed(name: str, value: Any) -> int | None:
    """None, or an integer of 64 bits."""
    if value is None:
        return None
    if (number := as_integer(value)) is None:
        raise RequestError(f"{name}={shown(value)} must be an integer")
    low, high = INTEGERS["seed"]
    if high is None or not low <= number <= high:
        raise RequestError(f"{name}={shown(value)} must fit into 64 bits")
    return number


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids, each once; None for none."""
    if value is None:
        return ()
    if not isinstance(value, _LISTS):
        raise RequestError(f"{name}={shown(value)} must be a list of token ids, or ()")
    if value and set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
        return tuple(dict.fromkeys(value))  # there may be a million
    return tuple(dict.fromkeys(_token_id(name, token) for token in value))


def allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """None, or at least one token id."""
    ids = token_ids(name, value)
    if value is not None and not ids:
        raise RequestError(f"{name}={shown(value)} allows nothing; give token ids, or None for all")
    return ids or None


def sequence_of_tokens(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids in their order; None for none."""
    token_ids(name, value)
    return None if not value else tuple(_token_id(name, token) for token in value)


def layers(name: str, value: Any) -> tuple[int, ...] | None:
    """Numbers of layers in their order, which may count from the end; None for none."""
    if value is None:
        return None
    listed = value if isinstance(value, (list, tuple)) else [value]
    numbers = tuple(as_integer(each) for each in listed[: MAX_LAYERS + 1])
    if len(numbers) > MAX_LAYERS or any(n is None or abs(n) > MAX_LAYERS for n in numbers):
        raise RequestError(
            f"{name}={shown(value)} must be a list of at most {MAX_LAYERS} numbers of layers"
        )
    return tuple(number for number in numbers if number is not None) or None


def _token_id(name: str, token: Any) -> int:
    number = as_integer(token)
    if number is None or not 0 <= number <= MAX_TOKEN_ID:
        raise RequestError(
            f"{name} has {shown(token)}; every id must be an integer from 0 to {MAX_TOKEN_ID}"
        )
    return number


def texts(name: str, value: Any) -> tuple[str, ...] | None:
    """Texts, each once; a single one may stand for itself, and None is none."""
    found = _unique(_listed(name, value, _text, "a text or a list of texts"))
    if found is not None and len(found) > MAX_TEXTS:
        raise RequestError(f"{name} has {len(found)} texts; the most is {MAX_TEXTS:,}")
    characters = sum(map(len, found or ()))
    if characters > MAX_TEXT_CHARACTERS:
        raise RequestError(
            f"{name} has {characters:,} characters in all; the most is {MAX_TEXT_CHARACTERS:,}"
        )
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} has {shown(value)}; every one must be a text that is not empty")
    return str(value)


def salt(name: str, value: Any) -> str:
    """A text of some length that is Unicode."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_CHARACTERS:
        raise RequestError(
            f"{name}={shown(value)} must be a text of 1 to {MAX_SALT_CHARACTERS:,} characters"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name}={shown(value)} is no valid Unicode") from None
    return str(value)


def words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...] | None:
    """Words, each a text or token ids; a single text may stand for itself, and None is none."""
    return _unique(_listed(name, value, _word, "a list of texts and lists of token ids"))


def _word(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, (list, tuple)) and value:
        return tuple(_token_id(name, token) for token in value)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(
            f"{name} has {shown(value)}; every one must be a text that is not blank, or a list of "
            "token ids that is not empty"
        )
    return str(value)


def callables(name: str, value: Any) -> tuple[Callable[..., Any], ...] | None:
    """Functions; a single one may stand for itself, and None is none."""
    return _listed(name, [value] if callable(value) else value, _callable, "a list of functions")


def _callable(name: str, value: Any) -> Any:
    if isinstance(value, str):
        raise RequestError(
            f"{name} has {shown(value)}, the name of a function: functions do not come back from "
            "JSON, so a recorded run that used one cannot be replayed; give the function itself"
        )
    if not callable(value):
        raise RequestError(f"{name} has {shown(value)}; every one must be a function")
    return value


def _listed(name: str, value: Any, check: Check, what: str) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name}={shown(value)} must be {what}, or None")
    return tuple(check(name, item) for item in value) or None


def _unique(items: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(dict.fromkeys(items))


def token_of_key(key: Any) -> Any:
    """The integer that a key of a JSON object stands for, or the key itself."""
    is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
    return int(key) if is_number else key


def logit_bias(limit: float, most: int) -> Check:
    """None, or biases by token id, bounded by ``limit`` as vLLM does it. In JSON the ids are
    strings."""

    def check(name: str, value: Any) -> dict[int, float] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}={shown(value)} must have a number for each token id")
        if len(value) > most:
            raise RequestError(f"{name} has {len(value)} tokens; the most is {most}")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            token = _token_id(name, token_of_key(key))
            is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
            if not is_number or bias != bias:
                raise RequestError(f"{name} has {shown(bias)} for token {token}; give a number")
            if token in biases:
                raise RequestError(f"{name} has token {token} twice; give it once")
            biases[token] = float(min(limit, max(-limit, bias)))
        return biases or None

    return check


def structure(name: str, value: Any) -> dict[str, Any] | None:
    """None, or a structured output as a plain dictionary; :mod:`megatron_async.grammar` checks what
    is in it."""
    if value is None:
        return None
    fields = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        fields = {name: item for name, item in items if item is not None}
    if not isinstance(fields, Mapping) or not fields:
        raise RequestError(f"{name}={shown(value)} must be a StructuredOutputs, or its fields")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(fields), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}={shown(value)} is not plain JSON: {error}") from None
    return copied


def plain(value: Any) -> Any:
    """A checked value in JSON's types. Functions give their names, which :func:`callables`
    refuses."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if callable(value):
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value))}"
    return value


def frozen(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def check_vocabulary(name: str, ids: Collection[int], size: int) -> None:
    """Raises RequestError for an id that a vocabulary of ``size`` tokens does not have."""
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return
    wrong = next(token for token in ids if not 0 <= token < size)
    raise RequestError(f"{name} has token id {wrong}; the model's ids are 0 .. {size - 1}")
