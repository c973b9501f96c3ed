"""When are pages used again? Learned online for each class of pages, and made an index of which to keep.

Ages are counted in uses of the cache, not in seconds: there is no scale to choose, and idle time makes nothing older.
For a page whose last use was `age` ago, the index is the best ratio, over all horizons, of the chance that it is used
again by then and the time it would be held for that: Gittins' index of a job that may end (Gittins 1979; in caches:
Beckmann and Sanchez 2017, hit density). A cache full of pages with high indices has the most hits.
"""
from __future__ import annotations

import numpy as np

BINS = 32
EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(BINS) / 2)])  # uses of the cache, [BINS + 1]
RING = 1 << 16    # uses that are followed until their pages are used again
GROUPS = 4        # of pages by how often they were used again: never, once, two or three times, more often
DECAY = 0.98      # of what was learned, at every rebuild
FLOOR = 0.001     # chance of a use in a bin that no page has reached yet, in parts of PRIOR
_LATER = np.triu(np.ones((BINS, BINS), bool))
PRIOR = 10.0      # typical nodes' worth of belief that a class is like all others


def group(hits: int) -> int:
    """0, 1, 2 or 3 for pages that were used again never, once, two or three times, more often."""
    return hits if hits < 2 else 2 if hits < 4 else 3


class ReuseModel:
    """Counts of pages by class and age: how many reached an age unused, how many were used again at it.

    A class is a group of hits and a kind of request, `kinds` of them: class = group * kinds + kind. index: float64
    [GROUPS * kinds, BINS], hits per use of the cache.
    """

    def __init__(self, kinds: int):
        self.kinds, classes = kinds, GROUPS * kinds
        self.died = np.zeros((classes, BINS))
        self.reached = np.zeros((classes, BINS))
        self.index = np.tile(1.0 / (1.0 + EDGES[:-1]), (classes, 1))
        self._kind = np.zeros(RING, np.int64)
        self._alive = np.zeros((RING, GROUPS))
        self._passed = np.ones(BINS, np.int64)  # uses before this one have been counted as reaching the bin
        self._next, self._typical = 1, 1.0

    def learn(self, kinds: list[int], events: list[int]) -> None:
        """Take in new uses (the kind of each, in order) and what they touched, then rebuild `index`.

        events: four numbers each, (the use before, hits after it, pages, the use). Before 0: the pages are new. The use
        negative: the pages are gone and their coming back is an event of its own.
        """
        first, self._next = self._next, self._next + len(kinds)
        slots = np.arange(first, self._next) % RING
        self._kind[slots], self._alive[slots] = kinds, 0.0
        self._passed = np.maximum(self._passed, self._next - RING)
        if events:
            self._touch(np.array(events, np.int64).reshape(-1, 4))
        self._pass()
        self._rebuild()
        self.died *= DECAY
        self.reached *= DECAY

    def _touch(self, events: np.ndarray) -> None:
        before, hits, pages, use = events.T
        self._typical = 0.9 * self._typical + 0.1 * float(pages.mean())
        groups = np.minimum(np.where(hits < 2, hits, np.where(hits < 4, 2, 3)), 3)
        born = use > 0
        np.add.at(self._alive, (use[born] % RING, groups[born]), pages[born])
        known = (before > 0) & (before > self._next - RING)
        before, hits, pages, use = before[known], hits[known] - 1, pages[known].astype(np.float64), np.abs(use[known])
        groups = np.where(hits < 2, hits, np.where(hits < 4, 2, 3))
        np.subtract.at(self._alive, (before % RING, groups), pages)
        bins = np.minimum(np.searchsorted(EDGES, use - before, "right") - 1, BINS - 1)
        classes = groups * self.kinds + self._kind[before % RING]
        np.add.at(self.died, (classes, bins), pages)
        counted = (self._passed[None, :] > before[:, None]).sum(1)
        steps = np.zeros((len(self.died), BINS + 1))
        late = counted <= bins
        np.add.at(steps, (classes[late], counted[late]), pages[late])
        np.subtract.at(steps, (classes[late], bins[late] + 1), pages[late])
        self.reached += np.cumsum(steps, 1)[:, :BINS]

    def _pass(self) -> None:
        """Count what has reached a bin since the last time."""
        upto = np.floor(self._next - EDGES[:-1]).astype(np.int64)
        counts = np.maximum(0, upto - self._passed)
        bins = np.repeat(np.arange(BINS), counts)
        slots = (np.arange(len(bins)) + np.repeat(self._passed - (np.cumsum(counts) - counts), counts)) % RING
        cells = self._kind[slots] * BINS + bins
        reached = self.reached.reshape(GROUPS, self.kinds * BINS)
        for g in range(GROUPS):
            reached[g] += np.bincount(cells, self._alive[slots, g], self.kinds * BINS)
        self._passed = np.maximum(self._passed, upto)

    def _rebuild(self) -> None:
        prior = PRIOR * self._typical
        all_died, all_reached = self.died.sum(0), self.reached.sum(0)
        common = (all_died + FLOOR * prior) / (all_reached + 0.1 * prior)
        some = np.append(np.flatnonzero(self.reached.any(1)), 0)  # the last row stands for classes without data
        died, reached = self.died[some], self.reached[some]
        died[-1] = reached[-1] = 0.0
        hazard = np.minimum(0.999, (died + prior * common) / (reached + prior))
        alive = np.concatenate([np.ones((len(some), 1)), np.cumprod(1 - hazard, 1)], 1)  # [classes, BINS + 1]
        ends = alive[:, :-1, None] - alive[:, None, 1:]                                  # from age on, before horizon
        spent = 0.5 * (alive[:, :-1] + alive[:, 1:]) * np.diff(EDGES)
        left = np.concatenate([np.cumsum(spent[:, ::-1], 1)[:, ::-1], np.zeros((len(some), 1))], 1)
        held = left[:, :-1, None] - left[:, None, 1:]
        worth = np.where(_LATER, ends / np.where(held > 0, held, np.inf), 0.0).max(2)
        self.index[:] = worth[-1]
        self.index[some[:-1]] = worth[:-1]
