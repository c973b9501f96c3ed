"""The least recently used leaf first."""
from __future__ import annotations

from heapq import heapify, heappop, heappush

from ..node import Node
from .protocol import Unwatching


class LeastRecentlyUsed(Unwatching):
    """The leaf whose last use is longest ago. A lazy heap: an entry counts only while its stamp is the node's."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._heap: list[tuple[int, int, Node]] = []
        self._limit = 1024

    def add(self, node: Node) -> None:
        heappush(self._heap, (node.stamp, id(node), node))
        if len(self._heap) > self._limit:
            self._compact()

    def pop(self) -> Node | None:
        heap = self._heap
        while heap:
            stamp, _, node = heappop(heap)
            if stamp == node.stamp and node.evictable:
                return node
        return None

    def _compact(self) -> None:
        self._heap = [entry for entry in set(self._heap) if entry[0] == entry[2].stamp and entry[2].evictable]
        heapify(self._heap)
        self._limit = 1024 + 2 * len(self._heap)
