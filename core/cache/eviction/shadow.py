"""Would the least recently used order have hit more? Told exactly, without a second cache.

Of so many pages, LRU keeps those of the latest uses. So a page that is asked for would have been there if no more
other pages than that were used since: a sum over uses of the pages that were last used then (Mattson et al. 1970).
"""
from __future__ import annotations

SHADOWED = 1 << 16  # uses that are told apart


class LruShadow:
    """LRU holds the pages of the uses after `bound`, and of its as many as fit: `size` are all, `room` may be held."""

    def __init__(self) -> None:
        self.bound, self.size, self.room = 1, 0, 0
        self._pages = [0] * SHADOWED  # by their last use

    def use(self, number: int, events: list[int], first: int = 0) -> float:
        """A new use; they are numbered 1, 2, 3 and so on. How many of its pages would LRU have had?

        events: what it touches, from `first` on, in the form that `ReuseModel.learn` takes.
        """
        if number >= SHADOWED + self.bound:
            self._advance()
        pages, bound, size, held = self._pages, self.bound, self.size, 0.0
        oldest, moved = number - SHADOWED, 0
        pages[number % SHADOWED] = 0
        for i in range(first, len(events), 4):
            before, count = events[i], events[i + 2]
            if before > bound:
                held += count
            elif before == bound and (there := pages[before % SHADOWED]):
                held += count * min(1.0, max(0.0, 1 - (size - self.room) / there))
            if before > oldest:
                pages[before % SHADOWED] -= count
            if events[i + 3] > 0:
                moved += count
                if before < bound:
                    size += count
            elif before >= bound:
                size -= count  # it comes back by `grew`
        pages[number % SHADOWED] = moved
        self.size = size
        return held

    def grew(self, use: int, pages: int, room: int) -> None:
        """Pages come into the cache that count as used at `use`; it holds `room` pages now, and so may LRU."""
        self.room = room
        if use >= self.bound:  # an older one has no entry of its own any more, or need not
            self._pages[use % SHADOWED] += pages
            self.size += pages
        while self.bound < use and self.size - self._pages[self.bound % SHADOWED] >= room:
            self._advance()

    def _advance(self) -> None:
        self.size -= self._pages[self.bound % SHADOWED]
        self.bound += 1
