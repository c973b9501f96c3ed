"""Policies that keep pages used once apart from those used again: SLRU and ARC."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ..node import Node
from .ghosts import Ghosts
from .protocol import Use
from .ranked import LeafHeap

if TYPE_CHECKING:
    from ...messages import CacheHint

PROTECTED = 0.8  # of the cached pages, at most, are protected in SLRU


class SegmentedLru:
    """Leaves used once go first, then those used again, each by last use. Where these have more than their share, the
    one used longest ago counts as used once (Karedla et al. 1994). `Node.mark` is the number of the last use."""

    watches = True

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.pages = [0, 0]  # cached: used once, used again
        self._leaves = (LeafHeap(), LeafHeap())
        self._uses = 0

    def add(self, node: Node) -> None:
        self._leaves[node.hits > 0].push(node)

    def pop(self) -> Node | None:
        while self.pages[1] > PROTECTED * sum(self.pages) and (node := self._leaves[1].pop()) is not None:
            if node.hits:
                self._move(node, 0)
                self._uses += 1
                node.hits, node.mark = 0, self._uses
            self.add(node)
        return self._oldest(0) or self._oldest(1)

    def tick(self, now: float) -> None:
        pass

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
        self._uses += 1
        while node.parent is not None:
            if not node.hits:
                self._move(node, 1)
            node.hits += 1
            node.mark, node = self._uses, node.parent
        return Use(self._uses)

    def grow(self, node: Node, end: int, use: Use) -> None:
        node.mark, node.hits = use.number, use.hits if end <= use.seam else 0
        self.pages[node.hits > 0] += node.size

    def drop(self, node: Node, keep: int) -> None:
        self.pages[node.hits > 0] -= node.size - keep

    def end(self, node: Node, use: Use) -> None:
        pass

    def _move(self, node: Node, to: int) -> None:
        self.pages[to] += node.size
        self.pages[1 - to] -= node.size

    def _oldest(self, segment: int) -> Node | None:
        """The leaf of the segment used longest ago; what has changed its segment since it was added goes there."""
        while (node := self._leaves[segment].pop()) is not None:
            if (node.hits > 0) == segment:
                return node
            self.add(node)
        return None


class AdaptiveReplacement(SegmentedLru):
    """ARC: how many pages used once are kept follows from which evicted pages are asked for (Megiddo and Modha 2003).
    It remembers as many evicted pages as the cache has."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.ghosts = Ghosts(capacity)
        self._target, self._page_bytes = 0.0, 0

    def pop(self) -> Node | None:
        first = 0 if self.pages[0] > self._target else 1
        return self._oldest(first) or self._oldest(1 - first)

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
        once, again = self.ghosts.pages
        seam = depth
        for ghost in self.ghosts.recall(node, rest, self._page_bytes):
            if ghost.hits:
                self._target = max(0.0, self._target - ghost.pages * max(1.0, once / max(1, again)))
            else:
                self._target = min(self.capacity, self._target + ghost.pages * max(1.0, again / max(1, once)))
            seam += ghost.pages
        use = super().use(node, depth, rest, hint, priority)
        use.seam, use.hits = seam, 1
        return use

    def grow(self, node: Node, end: int, use: Use) -> None:
        super().grow(node, end, use)
        self._page_bytes = len(node.edge) // node.size

    def drop(self, node: Node, keep: int) -> None:
        super().drop(node, keep)
        self.ghosts.bury([node], keep)
