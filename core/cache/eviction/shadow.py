"""Would the least recently used order have hit more? Told exactly, without a second cache.

Of so many pages, LRU keeps those of the latest uses. So a page that is asked for would have been there if no more
other pages than that were used since: a sum over uses of the pages that were last used then (Mattson et al. 1970).
"""
from __future__ import annotations

from ..node import Node

SHADOWED = 1 << 16  # uses that are told apart


class LruShadow:
    """LRU holds the pages of the uses after `bound`, and of its as many as fit: `size` are all, `room` may be held."""

    def __init__(self) -> None:
        self.bound, self.size, self.room = 1, 0, 0
        self._pages = [0] * SHADOWED  # by their last use
        self._gone = [0] * SHADOWED   # those of them that the cache has evicted
        self._out = 0                 # of uses from `bound` on
        self.missed = 0.0             # pages of the last use that are known and LRU would not have had

    @property
    def out(self) -> int:
        """Pages that LRU holds and the cache has evicted: all that LRU can have more hits by from now on."""
        slot = self.bound % SHADOWED
        gone = self._gone[slot]
        return self._out - gone + min(gone, max(0, self._pages[slot] - (self.size - self.room))) if gone else self._out

    def use(self, number: int, events: list[int], first: int = 0) -> float:
        """A new use; they are numbered 1, 2, 3 and so on. How many of its pages would LRU have had?

        events: what it touches, from `first` on, in the form that `ReuseModel.learn` takes.
        """
        if number >= SHADOWED + self.bound:
            self._advance()
        pages, gone, bound, size, held = self._pages, self._gone, self.bound, self.size, 0.0
        known = 0
        oldest, moved = number - SHADOWED, 0
        pages[number % SHADOWED] = 0
        for i in range(first, len(events), 4):
            before, count = events[i], events[i + 2]
            known += count
            if before > bound:
                held += count
            elif before == bound and (there := pages[before % SHADOWED]):
                held += count * min(1.0, max(0.0, 1 - (size - self.room) / there))
            if before > oldest:
                pages[before % SHADOWED] -= count
                if events[i + 3] < 0 and before >= bound:
                    back = min(count, gone[before % SHADOWED])
                    gone[before % SHADOWED] -= back
                    self._out -= back
            if events[i + 3] > 0:
                moved += count
                if before < bound:
                    size += count
            elif before >= bound:
                size -= count  # it comes back by `grew`
        pages[number % SHADOWED] = moved
        self.size, self.missed = size, known - held
        return held

    def grew(self, use: int, pages: int, room: int) -> None:
        """Pages come into the cache that count as used at `use`; it holds `room` pages now, and so may LRU."""
        self.room = room
        if use >= self.bound:  # an older one has no entry of its own any more, or need not
            self._pages[use % SHADOWED] += pages
            self.size += pages
        self.settle(use)

    def shrank(self, nodes: list[Node], keep: int, room: int) -> None:
        """These leave the cache, but for the first `keep` pages of the last. It holds `room` now, and LRU no more."""
        self.room = room
        gone, bound, last = self._gone, self.bound, nodes[-1]
        for node in nodes:
            pages = node.size - keep if node is last else node.size
            if (use := node.mark) >= bound:
                gone[use % SHADOWED] += pages
                self._out += pages

    def settle(self, last: int) -> None:
        """LRU drops what it has no room for. last: the latest use."""
        while self.bound < last and self.size - self._pages[self.bound % SHADOWED] >= self.room:
            self._advance()

    def _advance(self) -> None:
        slot = self.bound % SHADOWED
        self.size -= self._pages[slot]
        self._out -= self._gone[slot]
        self._gone[slot] = 0
        self.bound += 1
