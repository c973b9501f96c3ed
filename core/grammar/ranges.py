"""Numbers between bounds as rules in GBNF: alternatives of digits that no reader rounds to what is beyond a bound."""
from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

from .contract import GrammarError

DIGITS = 15  # that any reader of JSON keeps
LAST = 10**DIGITS - 1


class Bounds(NamedTuple):
    """Of a number; None for none. without: the bound itself is not in."""

    least: Decimal | None = None
    without_least: bool = False
    most: Decimal | None = None
    without_most: bool = False


def integers(bounds: Bounds) -> str | None:
    """Whole numbers, or None where there are none."""
    low = -LAST if bounds.least is None else int(bounds.least.to_integral_value("ROUND_CEILING"))
    high = LAST if bounds.most is None else int(bounds.most.to_integral_value("ROUND_FLOOR"))
    low += bounds.without_least and low == bounds.least
    high -= bounds.without_most and high == bounds.most
    low, high = _within(low, high)
    return _alternatives([_spelled("-" * negative + "".join(digits)) for negative, a, b in _signed(low, high)
                          for digits in _between(max(a, int(negative)), b, 1)])


def numbers(bounds: Bounds) -> str | None:
    """Decimal numbers without an exponent, or None where there are none."""
    places = max([0, *(-each.normalize().as_tuple().exponent for each in (bounds.least, bounds.most)
                       if each is not None)])
    scale = 10**places
    low = -LAST if bounds.least is None else int(bounds.least * scale)
    high = LAST if bounds.most is None else int(bounds.most * scale)
    low, high = _within(low, high)
    found = []
    # A magnitude N, in units of the last place, stands for N itself and, with more digits, for what is between N and
    # N + 1: so the greater bound has no more digits, and the lesser, where it is not in, has more that are not all 0.
    for negative, a, b in _signed(low, high):
        near, far = (high, low) if negative else (low, high)
        near_out, far_out = ((bounds.without_most, bounds.without_least) if negative else
                             (bounds.without_least, bounds.without_most))
        first, last = a == abs(near) and near_out, b == abs(far)
        for digits in _between(a + first, b - last, places + 1):
            found.append(_decimal(negative, digits, places, "any"))
        if last and not (far_out or first and a == b):
            found += [_decimal(negative, digits, places, "none") for digits in _between(b, b, places + 1)]
        if first and a < b:
            found += [_decimal(negative, digits, places, "some") for digits in _between(a, a, places + 1)]
    return _alternatives(found)


def _within(low: int, high: int) -> tuple[int, int]:
    if max(abs(low), abs(high)) > LAST:
        raise GrammarError(f"minimum and maximum may have at most {DIGITS} digits together with their places")
    return low, high


def _signed(low: int, high: int) -> Iterator[tuple[bool, int, int]]:
    """Magnitudes (negative, least, most)."""
    if low < 0 and low <= high:
        yield True, max(0, -high), -low
    if high >= 0 and low <= high:
        yield False, max(low, 0), high


def _between(low: int, high: int, width: int) -> Iterator[list[str]]:
    """Digits or classes of digits, of at least so many places, that together are low to high."""
    while low <= high:
        places = max(width, len(str(low)))
        top = min(high, 10**places - 1)
        yield from _same_width(str(low).zfill(places), str(top).zfill(places))
        low = top + 1


def _same_width(low: str, high: str) -> Iterator[list[str]]:
    if not low:
        yield []
        return
    if low[0] == high[0]:
        yield from ([low[0], *rest] for rest in _same_width(low[1:], high[1:]))
        return
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        yield from ([low[0], *each] for each in _same_width(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        last -= 1
    if first <= last:
        yield [f"[{first}-{last}]" if first < last else str(first)] + ["[0-9]"] * rest
    if high[1:].strip("9"):
        yield from ([high[0], *each] for each in _same_width("0" * rest, high[1:]))


def _decimal(negative: bool, digits: list[str], places: int, more: str) -> str:
    """more: digits behind these: "any", "some" that are not all 0, "none"."""
    whole, behind = digits[:len(digits) - places], digits[len(digits) - places:]
    room = max(1, DIGITS - len(digits))
    tail = {"any": f"[0-9]{{0,{room}}}", "some": f"[0-9]{{0,{room}}} [1-9]", "none": ""}[more]
    text = _spelled("-" * negative + "".join(whole))
    if places:
        return f'{text} "." {_spelled("".join(behind))} {tail}'.strip()
    if more == "none":
        return text
    return f'{text} "." {tail}' if more == "some" else f'{text} ("." [0-9]{{1,{room}}})?'


def _spelled(digits: str) -> str:
    """Digits and classes of them in GBNF."""
    found, at = [], 0
    while at < len(digits):
        end = digits.index("]", at) + 1 if digits[at] == "[" else at + 1
        part = digits[at:end]
        found.append(part if part[0] == "[" else f'"{part}"')
        at = end
    return " ".join(found)


def _alternatives(found: list[str]) -> str | None:
    return "(" + " | ".join(found) + ")" if found else None
