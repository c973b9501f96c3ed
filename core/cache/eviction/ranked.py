"""Policies that give every node a rank at each use and evict the leaf with the lowest: LFU, time to live, priority."""
from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from ..node import Node
from .protocol import Use

if TYPE_CHECKING:
    from ...messages import CacheHint


class LeafHeap:
    """Leaves by (mark, stamp), the lowest first. An entry counts only while the node has both and is a free leaf."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Node]] = []
        self._limit = 1024

    def push(self, node: Node) -> None:
        heappush(self._heap, (node.mark, node.stamp, id(node), node))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in set(self._heap) if self._counts(entry)]
            heapify(self._heap)
            self._limit = 1024 + 2 * len(self._heap)

    def pop(self) -> Node | None:
        while self._heap:
            entry = heappop(self._heap)
            if self._counts(entry):
                return entry[3]
        return None

    @staticmethod
    def _counts(entry: tuple[float, int, int, Node]) -> bool:
        mark, stamp, _, node = entry
        return node.mark == mark and node.stamp == stamp and node.evictable


class Ranked:
    """A policy by rank: `rank` gives a request's, which all nodes of its prefix and all that it adds get. Where all are
    alike it is LRU."""

    watches = True

    def __init__(self, capacity: int):
        self.capacity, self.now = capacity, 0.0
        self._leaves = LeafHeap()

    def rank(self, hint: CacheHint | None, priority: int) -> float:
        return 0.0

    def add(self, node: Node) -> None:
        self._leaves.push(node)

    def pop(self) -> Node | None:
        return self._leaves.pop()

    def tick(self, now: float) -> None:
        self.now = now

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
        use = Use(self.rank(hint, priority))
        while node.parent is not None:
            node.hits += 1
            node.mark, node = use.number, node.parent
        return use

    def grow(self, node: Node, end: int, use: Use) -> None:
        node.mark = use.number

    def drop(self, node: Node, keep: int) -> None:
        pass

    def end(self, node: Node, use: Use) -> None:
        pass


class Priority(Ranked):
    """Pages of the requests with the lowest priority first, among them the least recently used."""

    def rank(self, hint: CacheHint | None, priority: int) -> float:
        return priority


class TimeToLive(Ranked):
    """The pages whose time ends first. It is `default` seconds from a use on, what the client announced and half as
    much again where it did, and nothing after the end of a session."""

    default = 300.0

    def rank(self, hint: CacheHint | None, priority: int) -> float:
        if hint is None:
            return self.now + self.default
        if hint.ends or hint.single:
            return self.now
        return self.now + (1.5 * hint.next_within if hint.next_within > 0 else self.default)


class LeastFrequentlyUsed(Ranked):
    """The leaf with the fewest uses, counted from the count at which leaves were evicted when it was used last, so that
    what was popular once does not stay for ever (LFU with dynamic ageing, Arlitt et al. 2000)."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self._age = 0.0

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
        while node.parent is not None:
            node.hits += 1
            node.mark, node = self._age + node.hits + 1, node.parent
        return Use(self._age + 1)

    def pop(self) -> Node | None:
        node = self._leaves.pop()
        if node is not None:
            self._age = max(self._age, node.mark)
        return node
