"""Which cached pages go first: policies over the unlocked leaves of the radix tree."""
from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from ..registry import Registry

if TYPE_CHECKING:
    from .radix import Node


class EvictionPolicy(Protocol):
    """An index of the tree's unlocked leaves. The tree calls it; a policy never changes a node."""

    def add(self, node: Node) -> None:
        """The node became an unlocked leaf, or one that was is used again (its `stamp` grew)."""
        ...

    def pop(self) -> Node | None:
        """Take out the leaf to evict next; None when there is none. Nodes that are no unlocked leaf any more are
        skipped: `node.evictable` tells."""
        ...


class LeastRecentlyUsed:
    """The leaf whose last use is longest ago. A lazy heap: an entry counts only while its stamp is the node's."""

    def __init__(self) -> None:
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


EVICTION = Registry("eviction policy", EvictionPolicy, ("add", "pop"))
EVICTION.register("lru", LeastRecentlyUsed)
