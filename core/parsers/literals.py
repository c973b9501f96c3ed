"""Values that models write in the manner of Python or of Gemma: read by hand, in linear time, never evaluated."""
from __future__ import annotations

import re
from typing import Any

from .json_text import MAX_DEPTH, read_json
from .reader import Malformed

_NUMBER = re.compile(r"[-+]?(?:\d[\d_]{0,300}\.?\d{0,300}|\.\d{1,300})(?:[eE][-+]?\d{1,3})?")
_WORD = re.compile(r"[A-Za-z_][\w.\-]{0,255}")
_SPACE = re.compile(r"\s*")
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}


def is_word(text: str) -> bool:
    """Whether a name can be read without quotes."""
    return bool(_WORD.fullmatch(text)) and text.isascii()


class Literals:
    """Reads values one after the other. quote: the text around strings as they are, or None for Python's strings.

    `Malformed` for what is none.
    """

    def __init__(self, text: str, quote: str | None = None):
        self.text, self.at, self._quote = text, 0, quote

    def space(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()

    def peek(self) -> str:
        """The next character that is not white; "" at the end."""
        self.space()
        return self.text[self.at:self.at + 1]

    def take(self, text: str) -> bool:
        """Whether that comes next; if so it is taken."""
        self.space()
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def need(self, text: str) -> None:
        if not self.take(text):
            raise Malformed

    def word(self) -> str:
        """A name."""
        self.space()
        found = _WORD.match(self.text, self.at)
        if found is None:
            raise Malformed
        self.at = found.end()
        return found[0]

    def value(self, depth: int = 0) -> Any:
        """A text, a number, a word, or a list, tuple or mapping of values."""
        sign = self.peek()
        if depth > MAX_DEPTH or not sign:
            raise Malformed
        if self._quote is not None and self.take(self._quote):
            end = self.text.find(self._quote, self.at)
            if end < 0:
                raise Malformed
            found, self.at = self.text[self.at:end], end + len(self._quote)
            return found
        if sign in "\"'":
            return self._string(sign)
        if sign in "[(":
            return self._items("]" if sign == "[" else ")", depth)
        if sign == "{":
            return self._mapping(depth)
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            return _number(number[0])
        word = self.word()
        if word in WORDS:
            return WORDS[word]
        if self._quote is not None:
            return word
        raise Malformed

    def _items(self, end: str, depth: int) -> list[Any]:
        self.at += 1
        found = []
        while not self.take(end):
            found.append(self.value(depth + 1))
            if not self.take(","):
                self.need(end)
                break
        return found

    def _mapping(self, depth: int) -> dict[str, Any]:
        self.at += 1
        found = {}
        while not self.take("}"):
            sign = self.peek()
            quoted = sign in "\"'" and sign or self._quote is not None and self.text.startswith(self._quote, self.at)
            key = self.value(depth + 1) if quoted else self._key()
            self.need(":")
            found[key] = self.value(depth + 1)
            if not self.take(","):
                self.need("}")
                break
        return found

    def _key(self) -> str:
        """A key without quotes."""
        if self._quote is None:
            raise Malformed
        return self.word()

    def _string(self, quote: str) -> str:
        closing = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(closing)
        parts = []
        while True:
            plain = _PLAIN[quote].match(self.text, self.at)
            parts.append(plain[0])
            self.at = plain.end()
            if self.text.startswith(closing, self.at):
                self.at += len(closing)
                return "".join(parts)
            sign = self.text[self.at:self.at + 1]
            if not sign:
                raise Malformed
            if sign == "\\":
                parts.append(self._escape())
            else:
                parts.append(sign)
                self.at += 1

    def _escape(self) -> str:
        sign = self.text[self.at + 1:self.at + 2]
        size = {"x": 2, "u": 4, "U": 8}.get(sign)
        if size is None:
            self.at += 2
            return _ESCAPES.get(sign, sign if sign in "\\\"'/" else "\\" + sign)
        digits = self.text[self.at + 2:self.at + 2 + size]
        self.at += 2 + size
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise Malformed from None


def _number(text: str) -> int | float:
    text = text.replace("_", "").removeprefix("+")
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return read_json(repr(float(text)))
    except (ValueError, OverflowError):  # infinite
        raise Malformed from None
