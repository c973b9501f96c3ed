"""What the policy under test is measured against: how others evict, and the best that could be done.

Each takes a trace and a capacity in blocks, runs the requests one after the other as `replay.cached_blocks` does, and
returns how many blocks at the front of each request were there, int64 [n]. They share no code with the cache.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from .trace import Trace

Tick = Callable[[int], None]


def lru_block(trace: Trace, capacity: int, tick: Tick) -> np.ndarray:
    """Least recently used block first, the tail of a request before its head, as vLLM's free queue has it."""
    cut = trace.segments
    weight, have = cut.weight.tolist(), [0] * len(cut.weight)
    queue: OrderedDict[int, None] = OrderedDict()
    found, free = np.zeros(len(trace), np.int64), capacity
    for i, path in enumerate(cut.paths):
        hit = _front(path, weight, have)
        for s in path:
            queue.pop(s, None)
        short = min(sum(weight[s] for s in path) - hit - free, capacity)
        while short > 0 and queue:
            s = next(iter(queue))
            gone = min(short, have[s])
            have[s] -= gone
            free += gone
            short -= gone
            if not have[s]:
                del queue[s]
        for s in path:
            more = min(weight[s] - have[s], free)
            have[s] += more
            free -= more
        for s in reversed(path):
            if have[s]:
                queue[s] = None
        found[i] = hit
        tick(i)
    return found


def optimal(trace: Trace, capacity: int, tick: Tick) -> np.ndarray:
    """Belady's MIN with bypass: keep the blocks whose next use is nearest, heads before tails (Belady 1966).

    A block's next use is never before its prefix's, so that what is kept is always whole prefixes.
    """
    cut = trace.segments
    weight, have, due = cut.weight.tolist(), [0] * len(cut.weight), [0] * len(cut.weight)
    heap: list[tuple[int, int, int]] = []
    found, used, never = np.zeros(len(trace), np.int64), 0, len(trace)
    for i, (path, following) in enumerate(zip(cut.paths, cut.next_use, strict=True)):
        found[i] = _front(path, weight, have)
        for depth, (s, then) in enumerate(zip(path, following, strict=True)):
            keep = weight[s] if then < never else 0
            used += keep - have[s]
            have[s], due[s] = keep, then
            if keep:
                heappush(heap, (-then, -depth, s))
        while used > capacity:
            then, _, s = heap[0]
            if due[s] != -then or not have[s]:
                heappop(heap)
                continue
            gone = min(used - capacity, have[s])
            have[s] -= gone
            used -= gone
        tick(i)
    return found


def _front(path: list[int], weight: list[int], have: list[int]) -> int:
    """Blocks that are there at the front of a path."""
    hit = 0
    for s in path:
        hit += have[s]
        if have[s] < weight[s]:
            break
    return hit


class _Leaves:
    """A radix tree that drops whole leaf nodes, by numbers: node_of[block], and one entry a node in the lists."""

    def __init__(self, blocks: int):
        self.node_of = np.full(blocks, -1, np.int64)
        self.blocks: list[np.ndarray] = []
        self.parent: list[int] = []
        self.begin: list[int] = []
        self.kids: list[int] = []
        self.stamp: list[float] = []
        self.heap: list[tuple[float, int, int]] = []

    def new(self, blocks: np.ndarray, parent: int, begin: int, kids: int, stamp: float) -> int:
        node = len(self.blocks)
        self.blocks.append(blocks)
        self.parent.append(parent)
        self.begin.append(begin)
        self.kids.append(kids)
        self.stamp.append(stamp)
        self.node_of[blocks] = node
        return node

    def split(self, node: int, depth: int, stamp: float) -> int:
        """The node that ends at `depth`; what is behind keeps its number and counts as used too."""
        cut = depth - self.begin[node]
        front = self.new(self.blocks[node][:cut], self.parent[node], self.begin[node], 1, stamp)
        self.blocks[node], self.parent[node] = self.blocks[node][cut:], front
        self.begin[node], self.stamp[node] = depth, stamp
        self.offer(node)
        return front

    def offer(self, node: int) -> None:
        if not self.kids[node]:
            heappush(self.heap, (self.stamp[node], int(self.blocks[node][-1]), node))

    def evict(self, locked: int) -> int:
        """Drop the least recently used leaf but `locked`: its blocks, 0 when there is none."""
        while self.heap:
            stamp, _, node = heappop(self.heap)
            if node == locked or self.kids[node] or self.stamp[node] != stamp or not len(self.blocks[node]):
                continue
            size = len(self.blocks[node])
            self.node_of[self.blocks[node]] = -1
            self.blocks[node] = self.blocks[node][:0]
            parent = self.parent[node]
            if parent >= 0:
                self.kids[parent] -= 1
                self.offer(parent)
            return size
        return 0


def lru_leaf(trace: Trace, capacity: int, tick: Tick) -> np.ndarray:
    """Least recently used leaf node first, and all of it, as SGLang's radix cache has it. A use is as late as the
    request's arrival: of two at one moment the text that the trace named first goes."""
    tree, found, used = _Leaves(trace.unique), np.zeros(len(trace), np.int64), 0
    for i, now in enumerate(trace.arrival.tolist()):
        path = trace.request(i)
        nodes = tree.node_of[path]
        gaps = np.flatnonzero(nodes < 0)
        hit = found[i] = int(gaps[0]) if len(gaps) else len(path)
        end = int(nodes[hit - 1]) if hit else -1
        if hit and tree.blocks[end][-1] != path[hit - 1]:
            end = tree.split(end, hit, now)
        node = end
        while node >= 0:
            tree.stamp[node] = now
            node = tree.parent[node]
        while used + len(path) - hit > capacity and (gone := tree.evict(end)):
            used -= gone
        room = min(len(path) - hit, capacity - used)
        if room > 0:
            if end >= 0:
                tree.kids[end] += 1
            end = tree.new(path[hit:hit + room], end, hit, 0, now)
            used += room
        if end >= 0:
            tree.offer(end)
        tick(i)
    return found


PEERS: dict[str, Callable[[Trace, int, Tick], np.ndarray]] = {
    "lru-leaf": lru_leaf, "lru-block": lru_block, "optimal": optimal}
