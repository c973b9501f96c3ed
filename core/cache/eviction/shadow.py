"""Would the least recently used order have hit more? Told exactly, without a second cache.

Of so many pages, LRU keeps those of the latest uses. So a page that is asked for would have been there if no more
other pages than that were used since: a sum over uses of the pages that were last used then (Mattson et al. 1970).
"""
from __future__ import annotations

SHADOWED = 1 << 16  # uses that are told apart


class LruShadow:
    """LRU holds the pages of the uses after `bound`, and of its as many as fit: `size` are all, `room` may be held."""

    def __init__(self) -> None:
        self.bound, self.size, self.room, self._last = 1, 0, 0, 0
        self._pages = [0] * SHADOWED  # by their last use

    def begin(self, use: int) -> None:
        """A new use; they are numbered 1, 2, 3 and so on."""
        self._last = use
        if use >= SHADOWED + self.bound:
            self._advance()
        self._pages[use % SHADOWED] = 0

    def moved(self, before: int, pages: int) -> float:
        """Cached pages, last used at `before`, are used now: how many of them LRU would have had."""
        held = self._held(before, pages)
        if before > self._last - SHADOWED:
            self._pages[before % SHADOWED] -= pages
        self._pages[self._last % SHADOWED] += pages
        if before < self.bound:
            self.size += pages
        return held

    def gone(self, before: int, pages: int) -> float:
        """The same for pages that are asked for and not cached any more: they come back by `grew`."""
        held = self._held(before, pages)
        if before > self._last - SHADOWED:
            self._pages[before % SHADOWED] -= pages
        if before >= self.bound:
            self.size -= pages
        return held

    def grew(self, use: int, pages: int, room: int) -> None:
        """Pages come into the cache that count as used at `use`; it holds `room` pages now, and so may LRU."""
        self.room = room
        if use > self._last - SHADOWED:
            self._pages[use % SHADOWED] += pages
        if use >= self.bound:
            self.size += pages
        while self.bound < self._last and self.size - self._pages[self.bound % SHADOWED] >= room:
            self._advance()

    def _held(self, before: int, pages: int) -> float:
        if before != self.bound:
            return float(pages) if before > self.bound else 0.0
        there = self._pages[before % SHADOWED]
        return pages * min(1.0, max(0.0, 1 - (self.size - self.room) / there)) if there else 0.0

    def _advance(self) -> None:
        self.size -= self._pages[self.bound % SHADOWED]
        self.bound += 1
