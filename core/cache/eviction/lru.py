"""The least recently used leaf first."""
from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from ..node import Node
from .protocol import Unwatching


class LeastRecentlyUsed(Unwatching):
    """The leaf whose last use is longest ago. Leaves stand in order of use, so that a use and an eviction cost the same
    however many there are. A node that is a leaf because its children are gone belongs somewhere in the middle, and
    waits in a heap. Neither ever holds more than the tree has nodes."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._bared: list[tuple[int, int, Node]] = []
        self._newest = 0

    def add(self, node: Node) -> None:
        stamp = node.stamp
        if stamp >= self._newest:
            self._newest = stamp
            self._order[node] = None
            self._order.move_to_end(node)
        elif not node.queued:
            node.queued = 1
            heappush(self._bared, (stamp, id(node), node))

    def pop(self) -> Node | None:
        order, bared = self._order, self._bared
        while bared and (bared[0][0] != bared[0][2].stamp or not bared[0][2].evictable):
            heappop(bared)[2].queued = 0
        while order:
            node = next(iter(order))
            if node.children or node.locks or node.parent is None:  # what `evictable` says
                del order[node]
            elif bared and bared[0][0] < node.stamp:
                break
            else:
                del order[node]
                return node
        if not bared:
            return None
        node = heappop(bared)[2]
        node.queued = 0
        return node
