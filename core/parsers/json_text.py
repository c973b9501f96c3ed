"""JSON in text that comes in pieces: where a value ends, and what is in it."""
from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from ..errors import encodable

MAX_DEPTH = 100  # of a value that a model writes
_OUTSIDE = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
_INSIDE = re.compile(r'["\\]')


class JsonScan:
    """Finds the end of an object or a list. Looks at each character once, and only at what brackets and strings need.

    complete: the value has ended. bad: it is none.
    """

    def __init__(self) -> None:
        self.complete = self.bad = False
        self._depth = 0
        self._string = self._escaped = False

    def feed(self, text: str, at: int = 0) -> int:
        """Go on from `at`; how far the value goes in this text, which is all of it unless it is complete or bad."""
        size = len(text)
        while at < size:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_INSIDE if self._string else _OUTSIDE).search(text, at)
            if self._depth == 0 and (found is None or found.start() > at):  # it must begin with a bracket
                self.bad = True
                return at
            if found is None:
                return size
            at, sign = found.end(), found[0]
            if not self._take(sign):
                self.bad = True
                return found.start()
            if self._depth == 0:
                self.complete = True
                return at
        return at

    def _take(self, sign: str) -> bool:
        """False for what cannot be there."""
        if self._string:
            self._escaped, self._string = sign == "\\", sign != '"'
        elif sign == '"':
            self._string = True
            return self._depth > 0
        elif sign in "{[":
            self._depth += 1
            return self._depth <= MAX_DEPTH
        elif sign in "}]":
            self._depth -= 1
            return self._depth >= 0
        else:
            return False
        return True


def read_json(text: str) -> Any:
    """A JSON value; line breaks inside strings pass. `ValueError` for anything else, and for a number beyond floats."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def as_object(text: str) -> Any:
    """A call's arguments as an object that any encoder takes: {} for what is none, such as a call that was cut. What
    clients could not be sent, halves of characters and numbers beyond 64 bits, is JSON already."""
    try:
        value = read_json(text)
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return msgspec.Raw(encodable(json.dumps(value, ensure_ascii=False)).encode())
    return value


def write_json(value: Any) -> str:
    """A value as a client gets it: characters as they are, unless they have no encoding."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return json.dumps(value)


_SURROGATE = re.compile("[\ud800-\udfff]")
