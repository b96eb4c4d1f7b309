"""Regular expressions of numbers between bounds, as the library writes them."""

from __future__ import annotations

from decimal import Decimal

from megatron_async.grammar.automata.expressions import NotCoveredError

Bound = float | int | None


def integers(low: int | None, high: int | None) -> str:
    """Whole numbers from ``low`` to ``high``, None for no bound."""
    if low is None and high is None:
        return "-?(0|[1-9][0-9]*)"
    if high is None:
        assert low is not None
        if low < 0:
            return _any_of(integers(low, -1), integers(0, None))
        digits = len(str(low))
        return _any_of(integers(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}")
    if low is None:
        if high >= 0:
            return _any_of(integers(0, high), integers(None, -1))
        return f"-{integers(-high, None)}"
    if low > high:
        raise NotCoveredError("nothing can come")
    if low < 0:
        if high < 0:
            return f"(-{integers(-high, -low)})"
        return f"(-{integers(0, -low)}|{integers(0, high)})"
    return _natural(low, high)


def _natural(low: int, high: int) -> str:
    if len(str(low)) != len(str(high)):
        cut = int(10 ** len(str(low))) - 1
        return _any_of(integers(low, cut), integers(cut + 1, high))
    if low == high:
        return f"({low})"
    (above_low, last_low), (above_high, last_high) = divmod(low, 10), divmod(high, 10)
    if above_low == above_high:
        return f"({above_low or ''}[{last_low}-{last_high}])"
    parts = []
    first, last = above_low, above_high
    if last_low != 0:
        first += 1
        parts.append(f"{above_low}[{last_low}-9]")
    if last_high != 9:
        last -= 1
        parts.append(f"{above_high}[0-{last_high}]")
    if first <= last:
        parts.append(f"{integers(first, last)}[0-9]")
    return _any_of(*parts)


def numbers(low: Bound, high: Bound) -> str:
    """Numbers from ``low`` to ``high``, both of them included; None for no bound."""
    return _numbers(low, high, True, True)


def _numbers(low: Bound, high: Bound, with_low: bool, with_high: bool) -> str:
    if low is None and high is None:
        return r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
    if high is None:
        assert low is not None
        if low < 0:
            return _any_of(_numbers(low, 0, with_low, False), _numbers(0, None, True, False))
        digits = len(str(int(low)))
        bounded = _numbers(low, 10**digits, with_low, False)
        return _any_of(bounded, rf"[1-9][0-9]{{{digits},}}(\.[0-9]+)?")
    if low is None:
        if high == 0:
            negative = f"-{_numbers(0, None, False, False)}"
            return _any_of(negative, "0") if with_high else negative
        if high > 0:
            negative = f"-{_numbers(0, None, False, False)}"
            return _any_of(negative, _numbers(0, high, True, with_high))
        return f"-{_numbers(-high, None, with_high, False)}"
    if low > high or (low == high and not (with_low and with_high)):
        raise NotCoveredError("nothing can come")
    if low == high:
        return "({})".format(_decimal(low).replace("-", r"\-").replace(".", r"\."))
    if low < 0:
        if high < 0:
            return f"(-{_numbers(-high, -low, with_high, with_low)})"
        parts = [f"(-{_numbers(0, -low, False, with_low)})"]
        if high > 0 or with_high:
            parts.append(_numbers(0, high, True, with_high))
        return _any_of(*parts)
    return _positive(low, high, with_low, with_high)


def _positive(low: float, high: float, with_low: bool, with_high: bool) -> str:
    whole_low, _, low_digits = _decimal(low).partition(".")
    whole_high, _, high_digits = _decimal(high).partition(".")
    first, last = int(whole_low), int(whole_high)
    if first == last:
        length = max(len(low_digits), len(high_digits))
        low_digits, high_digits = low_digits.ljust(length, "0"), high_digits.ljust(length, "0")
        behind = rf"\.{_between(low_digits, high_digits, with_low, with_high)}"
        return f"({first}({behind})?)" if int(low_digits) == 0 else f"({first}{behind})"
    parts = []
    if low_digits or not with_low:
        parts.append(rf"({first}\.{_from(low_digits, with_low)})")
        first += 1
    if last > first:
        parts.append(rf"({integers(first, last - 1)}(\.[0-9]+)?)")
    if high_digits:
        parts.append(rf"({last}(\.{_to(high_digits, with_high)})?)")
    elif with_high:
        parts.append(rf"{last}(\.0+)?")
    return _any_of(*parts)


def _from(digits: str, with_it: bool) -> str:
    """Decimals from these on."""
    if not digits:
        return "[0-9]*" if with_it else "[0-9]*[1-9]"
    first, rest = int(digits[0]), digits[1:]
    if with_it and not rest:
        return f"[{first}-9][0-9]*"
    parts = [f"{first}{_from(rest, with_it)}"]
    if first < 9:
        parts.append(f"[{first + 1}-9][0-9]*")
    return _any_of(*parts)


def _to(digits: str, with_it: bool) -> str:
    """Decimals up to these."""
    if not digits:
        return ""
    first, rest = int(digits[0]), digits[1:]
    if not with_it and not rest:
        if first == 0:
            raise NotCoveredError("schema: a bound")
        return f"[0-{first - 1}][0-9]*"
    parts = [f"{first}{_to(rest, with_it)}"]
    if first > 0:
        parts.append(f"[0-{first - 1}][0-9]*")
    return _any_of(*parts)


def _between(low: str, high: str, with_low: bool, with_high: bool) -> str:
    """Decimals, as many of both."""
    if low == high:
        return low
    first, last = int(low[0]), int(high[0])
    if first == last:
        return f"{first}{_between(low[1:], high[1:], with_low, with_high)}"
    parts = [f"{first}{_from(low[1:].rstrip('0'), with_low)}"]
    if first + 1 < last:
        parts.append(f"[{first + 1}-{last - 1}][0-9]*")
    rest = high[1:].rstrip("0")
    if rest or with_high:
        parts.append(f"{last}{_to(rest, with_high)}")
    return _any_of(*parts)


def _decimal(value: float) -> str:
    text = f"{Decimal(repr(float(value))):f}"
    return text.removesuffix(".0")


def _any_of(*parts: str) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
