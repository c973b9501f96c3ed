"""How parsers are written: a generator that asks for text and waits where there is no more.

A `Reader` has one `read`, a generator that runs as far as the text that is there lets it. Its helpers are used with
`yield from`. Text is taken from left to right once; what is looked at again is no longer than a mark.
"""
from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import Any

from .contract import CallArguments, CallBegin, CallEnd, CallFormat, Content, Event, Parser
from .json_text import JsonScan

MAX_CALL = 2**20   # characters of a call that is read before it is passed on
MAX_BLANK = 256    # characters of white space at the end of content that wait for what follows

Step = Generator[None, None, None]


class Malformed(Exception):
    """What is held is no call."""


class Marks:
    """Some texts that are looked for together; of several at one place the longest counts."""

    def __init__(self, texts: Iterable[str]):
        texts = sorted(set(texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = frozenset(text[:i] for text in texts for i in range(1, len(text)))
        self._most = max(map(len, texts)) - 1

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int]:
        """Where the first mark begins and ends, from `at` on; without one, twice the place where one may begin that is
        not there as a whole, else the end of the text."""
        found = self._pattern.search(text, at)
        if found is not None:
            start, end = found.span()
            may_grow = not ended and end == len(text) and text[start:] in self._beginnings
            return start, start if may_grow else end
        if not ended:
            for place in range(max(at, len(text) - self._most), len(text)):
                if text[place:] in self._beginnings:
                    return place, place
        return len(text), len(text)


@lru_cache(maxsize=128)
def marks(*texts: str) -> Marks:
    """The marks of these texts, made once."""
    return Marks(texts)


class Reader(Parser):
    """Runs `read` over text that comes in pieces. What is held is read, but may still turn out to be something else."""

    def __init__(self) -> None:
        self._text, self._at, self._ended = "", 0, False
        self._out: list[Event] = []
        self._held: list[str] | None = None
        self._room = 0
        self._run = self.read()
        self._go()

    def feed(self, text: str) -> list[Event]:
        self._text, self._at = self._text[self._at:] + text, 0
        return self._go()

    def finish(self) -> list[Event]:
        self._ended = True
        return self._go()

    def _go(self) -> list[Event]:
        next(self._run, None)
        out, self._out = self._out, []
        return out

    @abstractmethod
    def read(self) -> Step:
        """Reads to the end of the text, made of the following."""

    @abstractmethod
    def take(self, text: str) -> None:
        """What `until` passes while nothing is held."""

    def more(self) -> Generator[None, None, bool]:
        """Waits for text; False at the end."""
        while self._at >= len(self._text) and not self._ended:
            yield
        return self._at < len(self._text)

    def until(self, *texts: str) -> Generator[None, None, str]:
        """Passes text on up to the first of some marks, and that too. The mark; "" at the end of the reply."""
        return (yield from self._until(texts, None))

    def capture(self, *texts: str) -> Generator[None, None, tuple[str, str]]:
        """The text up to the first of some marks, and the mark. Raises `Malformed` where there is none."""
        parts: list[str] = []
        mark = yield from self._until(texts, parts)
        if not mark:
            raise Malformed
        return "".join(parts), mark

    def _until(self, texts: tuple[str, ...], parts: list[str] | None) -> Generator[None, None, str]:
        wanted = marks(*texts)
        while True:
            start, end = wanted.find(self._text, self._at, self._ended)
            part = self._pull(start)
            if self._held is None:
                self.take(part)
            if parts is not None:
                parts.append(part)
            if end > start or self._ended:
                return self._pull(end)
            yield

    def match(self, *texts: str) -> Generator[None, None, str]:
        """The one of these texts, the longest, that comes next, which is taken; "" if there is none."""
        while not self._ended and any(len(text) > len(self._text) - self._at and text.startswith(self._text[self._at:])
                                      for text in texts):
            yield
        for text in sorted(texts, key=len, reverse=True):
            if self._text.startswith(text, self._at):
                return self._pull(self._at + len(text))
        return ""

    def need(self, *texts: str) -> Generator[None, None, str]:
        """`match` of what must be there. Raises `Malformed`."""
        found = yield from self.match(*texts)
        if not found:
            raise Malformed
        return found

    def blank(self) -> Generator[None, None, None]:
        """Takes white space."""
        while (yield from self.more()):
            self._pull(_BLANK.match(self._text, self._at).end())
            if self._at < len(self._text):
                return

    def json(self) -> Generator[None, None, str]:
        """The text of the JSON object or list that comes next. Raises `Malformed`."""
        return (yield from self.scanned(JsonScan()))

    def scanned(self, scan: Any) -> Generator[None, None, str]:
        """The text of what `scan` follows to its end. Raises `Malformed` where it is bad, or does not end."""
        parts = []
        while (yield from self.more()):
            parts.append(self._pull(scan.feed(self._text, self._at)))
            if scan.bad:
                break
            if scan.complete:
                return "".join(parts)
        raise Malformed

    def hold(self, text: str = "", most: int = MAX_CALL) -> None:
        """From here on text is held, beginning with `text`; `Malformed` is raised for more than `most` characters."""
        self._held, self._room = [text], most

    def release(self) -> str:
        """What was held."""
        held, self._held = "".join(self._held or ()), None
        return held

    def _pull(self, end: int) -> str:
        """Takes the text up to a place."""
        if self._held is None:
            part, self._at = self._text[self._at:end], end
            return part
        fits = min(end, self._at + self._room)
        part = self._text[self._at:fits]
        self._held.append(part)
        self._at, self._room = fits, self._room - len(part)
        if fits < end:
            raise Malformed
        return part


_BLANK = re.compile(r"\s*")


class CallReader(Reader):
    """A reader of content with calls in it. White space before a call, between two and after the last is nobody's."""

    def __init__(self, format: CallFormat):
        self.format, self.calls = format, 0
        self._white = ""
        super().__init__()

    def take(self, text: str) -> None:
        """Content."""
        text = self._white + text
        shown = max(len(text.rstrip()), len(text) - MAX_BLANK)
        self._white = text[shown:]
        if shown:
            self._out.append(Content(text[:shown]))

    def end(self) -> None:
        """The reply has ended: white space that still waits is content, unless it only follows a call."""
        if self._white and not self.calls:
            self._out.append(Content(self._white))
        self._white = ""

    def give_back(self) -> None:
        """What was held is content."""
        self.take(self.release())

    def call(self, name: str, arguments: str, id: str | None = None) -> None:
        """What was held is a whole call. arguments: JSON. id: if the model gave it one."""
        index = self.begin(name, id)
        self._out += [CallArguments(index, arguments), CallEnd(index)]

    def begin(self, name: str, id: str | None = None) -> int:
        """What was held is the beginning of a call."""
        self.release()
        self._white = ""
        index, self.calls = self.calls, self.calls + 1
        self._out.append(CallBegin(index, id or self.format.call_id(index, name), name))
        return index
