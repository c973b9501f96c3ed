"""Stop strings in streamed text: one automaton for all of them, linear in the text whatever they are."""
from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from ..errors import RequestError


class StopFilter:
    """Passes text on up to the first stop string, and holds back only what may still become one.

    The first is the one that is complete first, as text arrives character by character; of several that end together,
    the longest. So the result does not depend on how the text is cut into pieces. Aho and Corasick 1975: a state is the
    longest end of the text that begins a stop string, which is also exactly what must be held back.

    include: the stop string itself is passed on too. matched: the stop string that was found, or None.
    """

    def __init__(self, stops: Iterable[str], include: bool = False):
        stops = tuple(dict.fromkeys(stops))
        if "" in stops:
            raise RequestError("a stop string must not be empty", param="stop")
        self.matched: str | None = None
        self._include, self._state = include, 0
        self._held: deque[str] = deque()
        self._next, self._fail, self._depth, self._match = _automaton(stops)
        self._first = re.compile("[" + "".join(map(re.escape, sorted({s[0] for s in stops}))) + "]") if stops else None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to pass on, the stop string once one is complete, else None). Nothing passes after a stop string."""
        if self.matched is not None:
            return "", self.matched
        if self._first is None:
            return text, None
        before, place = self._depth[self._state], 0
        while place < len(text):
            if self._state == 0:
                candidate = self._first.search(text, place)
                if candidate is None:
                    break
                place = candidate.start()
            self._state = self._step(self._state, text[place])
            place += 1
            if (matched := self._match[self._state]) is not None:
                self.matched = matched
                self._held.append(text[:place])
                return self._release(before + place - (0 if self._include else len(matched))), matched
        self._held.append(text)
        return self._release(before + len(text) - self._depth[self._state]), None

    def flush(self) -> str:
        """The text held back, now that no more comes; after a stop string there is none."""
        text = "" if self.matched is not None else "".join(self._held)
        self._held.clear()
        self._state = 0
        return text

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def _release(self, count: int) -> str:
        """The first `count` characters held. Pieces stay apart, so that long held text is not copied at every push."""
        out = []
        while count:
            piece = self._held.popleft()
            if len(piece) > count:
                self._held.appendleft(piece[count:])
            out.append(piece[:count])
            count -= len(out[-1])
        return "".join(out)


def _automaton(stops: tuple[str, ...]) -> tuple[list[dict[str, int]], list[int], list[int], list[str | None]]:
    """Per state: successors by character, the failure state, its depth, and the longest stop string that ends there."""
    following: list[dict[str, int]] = [{}]
    fail, depth, match = [0], [0], [None]
    for stop in stops:
        state = 0
        for character in stop:
            if character not in following[state]:
                following[state][character] = len(following)
                following.append({})
                fail.append(0)
                depth.append(depth[state] + 1)
                match.append(None)
            state = following[state][character]
        match[state] = stop
    queue = deque(following[0].values())
    while queue:
        state = queue.popleft()
        for character, child in following[state].items():
            back = fail[state]
            while back and character not in following[back]:
                back = fail[back]
            fail[child] = following[back].get(character, 0)
            match[child] = match[child] or match[fail[child]]
            queue.append(child)
    return following, fail, depth, match
