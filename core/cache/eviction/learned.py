"""The default: evict the leaf that is least worth its memory, by what was learned of pages like it."""
from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from ..node import Node
from .ghosts import Ghosts
from .protocol import Use
from .reuse import BINS, DECAY, EDGES, RING, ReuseModel, group
from .shadow import LruShadow

if TYPE_CHECKING:
    from ...messages import CacheHint

REBUILD = 100          # uses between two looks at what was learned
REMEMBERED = 4         # pages of ghosts, in caches
TURNS = 4              # kinds of requests by turns of a conversation: at most one cached, two, three, more
WITHIN = (10.0, 60.0, 600.0)  # seconds, between the kinds of requests whose next use is announced
NONE, ENDS, SINGLE, SOON = 0, 1, 2, 3
HINTS = SOON + len(WITHIN) + 1
BEHIND, LEVEL = 0.02, 0.01    # shares of the pages asked for: further behind LRU it is LRU, until it is level
LOST, CREDIT = 0.001, 0.04    # of all pages ever asked for, and of the cache's: what learning may cost
RECENT = 4                    # caches' worth of pages asked for that tell what LRU misses
_EDGES = EDGES[1:BINS].tolist()


def hint_kind(hint: CacheHint | None) -> int:
    """Which of `HINTS` kinds a request is of by what its client said."""
    if hint is None:
        return NONE
    if hint.single:
        return SINGLE
    if hint.ends:
        return ENDS
    return SOON + bisect_right(WITHIN, hint.next_within) if hint.next_within > 0 else NONE


class Learned:
    """By class of pages (how often used again, turn of the conversation, hint of the last request) the least
    recently used leaf, and among these the one whose index at its age is least.

    Until a class has data it is like all others, and before there is any the order is LRU's. So it is while LRU, which
    is followed beside, would have had more hits of late. All that it can have more from now on are the pages that it
    holds and that were evicted here: there are never more of these than `spare`.
    """

    watches = True

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.model, self.shadow = ReuseModel(TURNS * HINTS), LruShadow()
        self.ghosts = Ghosts(REMEMBERED * capacity)
        self.plain = False                  # LRU for now
        self._asked = self._behind = 0.0    # pages: asked for of late, and how many more of them LRU would have had
        self._asked_ever = self._behind_ever = 0.0  # the same since the beginning
        self._most = CREDIT * capacity  # of the latter: what learning may cost
        self._missed = 0.0              # pages of late that LRU would have had, had it been larger
        self._index: list[list[float]] = self.model.index.tolist()
        self._heaps: dict[int, list[tuple[int, int, Node]]] = {}
        self._entries, self._limit = 0, 1024
        self._kind = [0] * RING
        self._used = self._learned = 0
        self._events: list[int] = []
        self._cached = self._page_bytes = 0

    def tick(self, now: float) -> None:
        if self._used - self._learned >= REBUILD:
            self._learn()

    def use(self, node: Node, depth: int, rest: bytes, hint: CacheHint | None, priority: int) -> Use:
        if self._used - self._learned >= 16 * REBUILD:  # nobody called `tick`
            self._learn()
        self._used = number = self._used + 1
        events, turn, seam, hits = self._events, node.turn, depth, 0
        first = len(events)
        if rest:
            for ghost in self.ghosts.recall(node, rest, self._page_bytes):
                events += (ghost.mark, ghost.hits + 1, ghost.pages, -number)
                seam, hits = seam + ghost.pages, ghost.hits + 1
        while (parent := node.parent) is not None:
            again = node.hits + 1
            events += (node.mark, again, node.size, number)
            node.hits, node.mark, node = again, number, parent
        behind = self.shadow.use(number, events, first) - depth
        asked = depth + len(rest) // self._page_bytes if rest and self._page_bytes else depth
        self._missed += self.shadow.missed - self._missed * min(1.0, asked / (RECENT * self.capacity))
        self._behind += behind
        self._asked += asked
        self._behind_ever += behind
        self._asked_ever += asked
        self._kind[number % RING] = min(max(turn - 1, 0), TURNS - 1) * HINTS + hint_kind(hint)
        return Use(number, seam, hits)

    def grow(self, node: Node, end: int, use: Use) -> None:
        size = node.size
        node.mark, node.hits = use.number, use.hits if end <= use.seam else 0
        self._page_bytes = len(node.edge) // size
        self._cached += size
        self._events += (0, node.hits, size, use.number)
        self.shadow.grew(use.number, size, self._cached)

    def end(self, node: Node, use: Use) -> None:
        if node.parent is not None and node.turn == node.parent.turn:
            node.turn += 1

    def drop(self, node: Node, keep: int) -> None:
        gone = node.size - keep
        self._cached -= gone
        self.shadow.shrank(node.mark, gone, self._cached)
        self.ghosts.bury(node, keep)
        if keep:
            node.turn = node.parent.turn

    def add(self, node: Node) -> None:
        if node.queued == node.mark + 1:  # its place is that of its last use, and it has it
            return
        node.queued = node.mark + 1
        kind = group(node.hits) * self.model.kinds + self._kind[node.mark % RING]
        heap = self._heaps.get(kind)
        if heap is None:
            heap = self._heaps[kind] = []
        heappush(heap, (node.mark, id(node), node))
        self._entries += 1
        if self._entries > self._limit:
            self._compact()

    @property
    def spare(self) -> float:
        """Of the pages that LRU holds, how many may be out of the cache: what learning may cost and has not yet, and,
        the less the more of that is spent, as many as LRU has missed of late. Where it misses none, none can be won."""
        left = self._most - self._behind_ever
        return left + self._missed * min(1.0, max(0.0, left / self._most))

    def pop(self) -> Node | None:
        heads = []  # the least recently used leaf of each class: (its last use, class)
        for kind, heap in self._heaps.items():
            while heap:
                mark, _, node = heap[0]
                if mark == node.mark and not node.children and not node.locks and node.parent is not None:
                    heads.append((mark, kind))
                    break
                self._leave(heap)
        if not heads:
            return None
        kind = heads[0][1] if len(heads) == 1 else min(heads)[1] if self.plain else self._choose(heads)
        return self._leave(self._heaps[kind])

    def _choose(self, heads: list[tuple[int, int]]) -> int:
        """The class to evict from: whose leaf is worth least of all, or of those that LRU has not either."""
        index, used, shadow = self._index, self._used, self.shadow
        worth = [(index[kind][bisect_right(_EDGES, used - mark)], mark, kind) for mark, kind in heads]
        shadow.settle(used)
        least = min(worth)
        if least[1] >= shadow.bound and shadow.out >= self.spare:
            least = min((found for found in worth if found[1] < shadow.bound), default=(0.0, *min(heads)))
        return least[2]

    def _leave(self, heap: list[tuple[int, int, Node]]) -> Node:
        """Take the first entry out of a heap: its node."""
        self._entries -= 1
        mark, _, node = heappop(heap)
        if node.queued == mark + 1:
            node.queued = 0
        return node

    def _compact(self) -> None:
        for kind, heap in self._heaps.items():
            kept = [e for e in heap if e[0] == e[2].mark and e[2].evictable]
            for mark, _, node in heap:
                if node.queued == mark + 1 and not node.evictable:
                    node.queued = 0
            heapify(kept)
            self._heaps[kind] = kept
        self._entries = sum(map(len, self._heaps.values()))
        self._limit = 1024 + 2 * self._entries

    def _learn(self) -> None:
        kinds = [self._kind[n % RING] for n in range(self._learned + 1, self._used + 1)]
        self.model.learn(kinds, self._events)
        self._learned, self._events = self._used, []
        self._index = self.model.index.tolist()
        self._most = LOST * self._asked_ever + CREDIT * self.capacity
        self.plain = self._behind > (LEVEL if self.plain else BEHIND) * self._asked
        self._behind *= DECAY
        self._asked *= DECAY
