"""The least recently used leaf first."""
from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from ..node import Node
from .protocol import Unwatching


class LeastRecentlyUsed(Unwatching):
    """The leaf whose last use is longest ago. A heap with one entry a leaf, which learns of later uses when it is at
    the top: a use costs nothing, and there is never more in the heap than in the tree."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._heap: list[tuple[int, int, Node]] = []

    def add(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heappush(self._heap, (node.stamp, id(node), node))

    def pop(self) -> Node | None:
        heap = self._heap
        while heap:
            stamp, _, node = heap[0]
            if node.children or node.locks or node.parent is None:
                node.queued = False
                heappop(heap)
            elif stamp != node.stamp:
                heapreplace(heap, (node.stamp, id(node), node))
            else:
                node.queued = False
                heappop(heap)
                return node
        return None
