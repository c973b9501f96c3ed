"""The default: evict the leaf that is least worth its memory, by what was learned of pages like it."""
from __future__ import annotations

from bisect import bisect_right
from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
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
LOST, CREDIT = 0.0015, 0.003  # of all pages ever asked for, and of the cache's: what learning may cost
AHEAD = 6                     # times what it may still cost: so much may be risked in advance
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


class Leaves:
    """The leaves of a class by their last use, entries of (use, id, leaf). Nearly all come in this order and stand in a
    line; the others in a heap. What is no leaf any more, or has been used since, stays until it is the first."""

    __slots__ = ("line", "late")

    def __init__(self) -> None:
        self.line: deque[tuple[int, int, Node]] = deque()
        self.late: list[tuple[int, int, Node]] = []

    def add(self, mark: int, node: Node) -> bool:
        """Put the leaf in; may it be the first now?"""
        line, node.queued = self.line, mark + 1
        if line and mark >= line[-1][0]:
            line.append((mark, id(node), node))
            return False
        if not line or mark <= line[0][0]:
            line.appendleft((mark, id(node), node))
        else:
            heappush(self.late, (mark, id(node), node))
        return True

    def first(self) -> int:
        """The last use of the leaf that `take` would give; 0 when there is none."""
        line, late = self.line, self.late
        while line or late:
            mark, _, node = late[0] if late and (not line or late[0] < line[0]) else line[0]
            if mark == node.mark and not node.children and not node.locks and node.parent is not None:
                return mark
            self.take()
        return 0

    def take(self) -> Node:
        """Take out the first entry: its node."""
        line, late = self.line, self.late
        mark, _, node = heappop(late) if late and (not line or late[0] < line[0]) else line.popleft()
        if node.queued == mark + 1:
            node.queued = 0
        return node

    def compact(self) -> int:
        """Drop what does not count any more; how many are left."""
        entries = sorted([*self.line, *self.late])
        self.line, self.late = deque(), []
        for mark, _, node in entries:
            if mark == node.mark and node.evictable:
                self.add(mark, node)
            elif node.queued == mark + 1:
                node.queued = 0
        return len(self.line)


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
        self._slack = 0.0               # so many more pages may go out, whatever happens until the next use
        self._missed = 0.0              # pages of late that LRU would have had, had it been larger
        self._index: list[list[float]] = self.model.index.tolist()
        self._leaves: dict[int, Leaves] = {}
        self._ranked: list[tuple[float, int, int]] = []  # a heap of classes: worth and last use of the first leaf
        self._ranked_at = 0                              # the use that it is for; 0 when it is out of date
        self._added, self._limit = 0, 1024  # entries since they were compacted, and how many there may be
        self._kind = [0] * RING
        self._used = self._learned = 0
        self._events: list[int] = []
        self._cached = self._page_bytes = 0

    def tick(self, now: float) -> None:
        if self._used - self._learned >= REBUILD:
            self._learn()

    def use(self, node: Node, depth: int, rest: bytes | memoryview, hint: CacheHint | None, priority: int) -> Use:
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
        self._slack = 0.0
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
        self._gone([node], keep, node.size - keep)

    def _gone(self, nodes: list[Node], keep: int, pages: int) -> None:
        """These leaves go, `pages` pages in all, but for the first `keep` pages of the last."""
        self._cached = cached = self._cached - pages
        self._slack -= pages
        self.shadow.shrank(nodes, keep, cached)
        self.ghosts.bury(nodes, keep)
        if keep:
            nodes[-1].turn = nodes[-1].parent.turn

    def add(self, node: Node) -> None:
        if node.queued == node.mark + 1:  # its place is that of its last use, and it has it
            return
        kind = group(node.hits) * self.model.kinds + self._kind[node.mark % RING]
        leaves = self._leaves.get(kind)
        if leaves is None:
            leaves = self._leaves[kind] = Leaves()
        if leaves.add(node.mark, node):
            first = leaves.first() or node.mark
            others = [found for found in self._ranked if found[2] != kind]
            self._ranked = [(self._worth(kind, first), first, kind), *others]
            heapify(self._ranked)
        self._added += 1
        if self._added > self._limit:
            self._added, self._limit = 0, 1024 + sum(leaves.compact() for leaves in self._leaves.values())

    @property
    def spare(self) -> float:
        """Of the pages that LRU holds, how many may be out of the cache: what learning may cost and has not yet, and
        `AHEAD` times as many in advance, no more than half of what LRU has missed of late: what can be won."""
        left = self._most - self._behind_ever
        return left + min(self._missed / 2, AHEAD * max(0.0, left))

    def pop(self) -> Node | None:
        if self._ranked_at != self._used or not self._used:
            self._rank()
        ranked, leaves = self._ranked, self._leaves
        while ranked:
            _, mark, kind = ranked[0]
            queue = leaves[kind]
            if (first := queue.first()) == mark:
                if len(ranked) > 1 and mark > min([other for _, other, _ in ranked]) and not self._may(mark):
                    return self._instead()
                node = queue.take()
                self._advance(kind, queue.first())
                return node
            self._advance(kind, first)  # of late its first leaf was used again, or locked
        return None

    def run(self, pages: int) -> tuple[list[Node], int]:
        """All from one class, as long as its first is worth least and no leaf of another class is bared."""
        if self._ranked_at != self._used or not self._used:
            self._rank()
        found: list[Node] = []
        if not (ranked := self._ranked):
            return found, 0
        kind, keep, worth, until, left = ranked[0][2], 0, 0.0, -1, pages
        leaves, index, used, second, oldest = self._leaves[kind], self._index[kind], self._used, None, self._used
        if others := ranked[1:]:
            second, oldest = min(others), min([mark for _, mark, _ in others])
        line, free, bared = leaves.line, 0 if self.plain else self._slack, None
        while line and not leaves.late:
            mark, _, node = line[0]
            parent = node.parent
            if mark != node.mark or node.locks or parent is None or node.children and node is not bared:
                leaves.take()
                continue
            if second:
                if mark > until:  # older ones have another worth
                    at = bisect_right(_EDGES, used - mark)
                    worth, until = index[at], used - _EDGES[at - 1] if at else used
                if (worth, mark, kind) > second or mark > oldest and free <= 0 and (found or not self._may(mark)):
                    break
            found.append(node)
            size = node.size
            left -= size
            free -= size
            if left < 0:
                keep, left = -left, 0
                break
            line.popleft()
            if len(parent.children) <= len(found) and parent.parent is not None:
                if len(parent.children) > 1 or parent.locks or parent.mark != mark \
                        or group(parent.hits) != group(node.hits):
                    break
                parent.queued, bared = mark + 1, parent  # bared by this leaf, and the next of its class
                line.appendleft((mark, id(parent), parent))
            if not left:
                break
        if found:
            self._gone(found, keep, pages - left)
        self._advance(kind, leaves.first())
        return found, keep

    def _rank(self) -> None:
        self._ranked = [(self._worth(kind, mark), mark, kind) for kind, leaves in self._leaves.items()
                        if (mark := leaves.first())]
        heapify(self._ranked)
        self._ranked_at = self._used

    def _worth(self, kind: int, mark: int) -> float:
        return self._index[kind][bisect_right(_EDGES, self._used - mark)]

    def _advance(self, kind: int, mark: int) -> None:
        """The first of the ranked classes, `kind`, has another first leaf now, used last at `mark`, or none: 0."""
        if mark:
            heapreplace(self._ranked, (self._worth(kind, mark), mark, kind))
        else:
            heappop(self._ranked)

    def _may(self, mark: int) -> bool:
        """May a leaf go that was used last then, though others are older?"""
        if self._slack <= 0 and not self.plain:
            self.shadow.settle(self._used)
            if mark < self.shadow.bound:
                return True
            self._slack = self.spare - self.shadow.out
        return self._slack > 0 and not self.plain

    def _instead(self) -> Node:
        """That which is worth least of what LRU has not either, or the oldest."""
        self._rank()
        ranked, bound = self._ranked, self.shadow.bound
        free = [] if self.plain else [found for found in ranked if found[1] < bound]
        kind = min(free)[2] if free else min((mark, kind) for _, mark, kind in ranked)[1]
        self._ranked_at = 0
        return self._leaves[kind].take()

    def _learn(self) -> None:
        kinds = [self._kind[n % RING] for n in range(self._learned + 1, self._used + 1)]
        self.model.learn(kinds, self._events)
        self._learned, self._events = self._used, []
        self._index = self.model.index.tolist()
        self._most = LOST * self._asked_ever + CREDIT * self.capacity
        self.plain = self._behind > (LEVEL if self.plain else BEHIND) * self._asked
        self._behind *= DECAY
        self._asked *= DECAY
