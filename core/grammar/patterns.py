"""Patterns of JSON Schema as rules of a context-free grammar in GBNF, for backends whose own reading of regular
expressions is not exact.

What is taken: characters and their escapes, classes, groups, alternatives, repetitions, within each other if they are
short, and anchors at either end. Everything is written as JSON spells it within quotes. Sources: ECMA-262 (syntax,
`\\s`), JSON (RFC 8259, section 7).
"""
from __future__ import annotations

import json
import re

from .contract import GrammarError

Ranges = list[tuple[int, int]]  # of code points, ends included, in order and apart

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
# What stands for itself within quotes in JSON, and what has a letter of its own there.
PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, LAST)]
LETTERS = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
HEX = "[0-9a-fA-F]"
# Nothing bounds what the library computes for a repetition of repetitions, which a text may be read as in many ways.
MAX_REPEAT, MAX_WITHIN, MAX_REPEATS = 256, 128, 32
ENDLESS = 10**6  # so often may be repeated what has no bound
MAX_NESTED = 64
_SPACES = ([(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
            (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
_DIGITS, _WORD = [(48, 57)], [(48, 57), (65, 90), (95, 95), (97, 122)]
_NEWLINES = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_COUNT = re.compile(r"\{(\d{1,6})(?:(,)(\d{0,6}))?\}")


def joined(ranges: Ranges) -> Ranges:
    """In order, and apart."""
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def all_but(ranges: Ranges) -> Ranges:
    """Characters that are in none of these."""
    found, start = [], 0
    for low, high in joined([*ranges, SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return [*found, (start, LAST)] if start <= LAST else found


def both(one: Ranges, other: Ranges) -> Ranges:
    """Characters of both."""
    return [(max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) <= min(b, d)]


def _code(point: int) -> str:
    return f"\\u{point:04x}" if point < 65536 else f"\\U{point:08x}"


def as_class(ranges: Ranges) -> str:
    """A class in GBNF."""
    return "[" + "".join(_code(low) + (f"-{_code(high)}" if high > low else "") for low, high in ranges) + "]"


TEXT = as_class(PLAIN)  # one that is not escaped, which the library repeats at little cost


def literal(text: str) -> str:
    """A text in GBNF. Raises `GrammarError` for half of a character."""
    if any(SURROGATES[0] <= ord(each) <= SURROGATES[1] for each in text):
        raise GrammarError(f"{text[:100]!a} has half of a character, which no output can have")
    return '"' + "".join(each if each.isascii() and each.isalnum() or each in " {}[]:,.-_<>=/" else _code(ord(each))
                         for each in text) + '"'


def to_rule(pattern: str) -> str:
    """An expression in GBNF for what stands within the quotes of a JSON string that the pattern matches, perhaps only
    a part of it. Raises `GrammarError` for what cannot be written so."""
    return _Reader(pattern).whole()


class _Reader:
    """Goes through a pattern from left to right."""

    def __init__(self, pattern: str):
        self.pattern, self.at, self.depth = pattern, 0, 0
        self.repeats, self.within = 0, 1  # repetitions so far; how often something in the last term is repeated

    def whole(self) -> str:
        """All alternatives, each with what may stand around it."""
        found = []
        while True:
            begins = self._takes("^")
            body = self._sequence(ends="|$")
            ends = self._takes("$")
            found.append(" ".join([f"{TEXT}*"] * (not begins) + body + [f"{TEXT}*"] * (not ends)) or '""')
            if self.at == len(self.pattern):
                return "(" + " | ".join(found) + ")"
            if not self._takes("|"):
                raise self._no("an anchor in the middle" if self.pattern[self.at - 1] == "$" else "a bracket")

    def _takes(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _no(self, what: str) -> GrammarError:
        return GrammarError(f"{what} at character {self.at} of the pattern cannot be enforced")

    def _sequence(self, ends: str) -> list[str]:
        """Terms up to one of these characters, or the end."""
        found, most = [], 1
        while self.at < len(self.pattern) and self.pattern[self.at] not in ends:
            self.within = 1
            found.append(self._repeated(self._term()))
            most = max(most, self.within)
        self.within = most
        return found

    def _term(self) -> str:
        char = self.pattern[self.at]
        self.at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return self._one_of(self._class())
        if char == ".":
            return self._one_of(all_but(_NEWLINES))
        if char == "\\":
            return self._one_of(self._escape(in_class=False))
        if char in "^$":
            raise self._no("an anchor in the middle")
        if char in "*+?{}])":
            raise self._no(f"a lone {char}")
        return self._one_of([(ord(char), ord(char))])

    def _group(self) -> str:
        if self._takes("?") and not self._takes(":"):
            raise self._no("a group that looks around, has a name or sets a flag")
        self.depth += 1
        if self.depth > MAX_NESTED:
            raise self._no(f"more than {MAX_NESTED} brackets within each other")
        found, most = [], 1
        while True:
            found.append(" ".join(self._sequence(ends="|)")) or '""')
            most = max(most, self.within)
            if self._takes(")"):
                self.depth, self.within = self.depth - 1, most
                return "(" + " | ".join(found) + ")"
            if not self._takes("|"):
                raise self._no("a bracket that does not end")

    def _repeated(self, term: str) -> str:
        count = _COUNT.match(self.pattern, self.at)
        if count is not None:
            self.at = count.end()
            least = int(count[1])
            most = least if count[2] is None else int(count[3]) if count[3] else None
            if most is not None and most < least or max(least, most or 0) > MAX_REPEAT:
                raise self._no(f"a repetition backwards, or of more than {MAX_REPEAT},")
            term += f"{{{least},{'' if most is None else most}}}"
            times = most or ENDLESS
        elif self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            times = 1 if self.pattern[self.at] == "?" else ENDLESS
            term += self.pattern[self.at]
            self.at += 1
        else:
            return term
        self.repeats += 1
        if self.within > 1 and times > 1 and self.within * times > MAX_WITHIN or self.repeats > MAX_REPEATS:
            raise self._no(f"a repetition of what repeats more than {MAX_WITHIN} times, or the {MAX_REPEATS + 1}th,")
        self.within *= times
        self._takes("?")  # as few as can be: the same texts
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?{":
            raise self._no("a repetition of a repetition")
        return f"({term})"

    def _class(self) -> Ranges:
        """Up to its bracket."""
        turned, found = self._takes("^"), []
        while not self._takes("]"):
            if self.at >= len(self.pattern):
                raise self._no("a class that does not end")
            low = self._member()
            if self.at + 1 < len(self.pattern) and self.pattern[self.at] == "-" and self.pattern[self.at + 1] != "]":
                self.at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][1]:
                    raise self._no("a range that is none")
                low = [(low[0][0], high[0][1])]
            found += low
        return all_but(found) if turned else joined(found)

    def _member(self) -> Ranges:
        char = self.pattern[self.at]
        self.at += 1
        return self._escape(in_class=True) if char == "\\" else [(ord(char), ord(char))]

    def _escape(self, in_class: bool) -> Ranges:
        if self.at >= len(self.pattern):
            raise self._no("an escape without a letter")
        char = self.pattern[self.at]
        self.at += 1
        for letter, ranges in (("d", _DIGITS), ("w", _WORD), ("s", _SPACES)):
            if char == letter:
                return ranges
            if char == letter.upper():
                return all_but(ranges)
        if char in "xu" and (digits := re.compile(HEX + ("{2}" if char == "x" else "{4}")).match(
                self.pattern, self.at)):
            self.at = digits.end()
            point = int(digits[0], 16)
            if not SURROGATES[0] <= point <= SURROGATES[1]:
                return [(point, point)]
        if char in _CONTROLS and not self.pattern[self.at:self.at + 1].isdigit():
            return [(_CONTROLS[char], _CONTROLS[char])]
        if char == "b" and in_class:
            return [(8, 8)]
        if char.isalnum():
            raise self._no(f"\\{char}")
        return [(ord(char), ord(char))]

    def _one_of(self, ranges: Ranges) -> str:
        """One character of these, as JSON spells it."""
        found = [as_class(plain)] if (plain := both(ranges, PLAIN)) else []
        found += [literal("\\" + letter) for point, letter in LETTERS.items()
                  if any(low <= point <= high for low, high in ranges)]
        if not found:
            raise self._no("a class of characters that cannot be")
        return found[0] if len(found) == 1 else "(" + " | ".join(found) + ")"


def quoted(value: object) -> str:
    """A value's JSON in GBNF."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise GrammarError("a number is too large to be written") from error
    return literal(written)
