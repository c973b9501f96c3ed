"""A node of the radix tree."""
from __future__ import annotations

ID_BYTES = 4  # of a page number and of a token id


class Node:
    """Pages that follow the parent's; `edge` are their tokens, `pages` their numbers, both as int32 bytes.

    A root has no parent and no pages; its edge is the domain's name.
    hits, turn, mark, ghosts: the eviction policy's: how often the pages were used again, how many requests ended on
    the path up to here, what else it keeps of the last use, and what it remembers of evicted pages behind the node.
    """

    __slots__ = ("edge", "pages", "parent", "children", "locks", "stamp", "hits", "turn", "mark", "ghosts")

    def __init__(self, edge: bytes, pages: bytes, parent: Node | None, stamp: int):
        self.edge, self.pages, self.parent, self.stamp = edge, pages, parent, stamp
        self.children: dict[bytes, Node] = {}
        self.locks = self.hits = self.turn = self.mark = 0
        self.ghosts: dict | None = None

    @property
    def size(self) -> int:
        """Pages in this node."""
        return len(self.pages) // ID_BYTES

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree."""
        return self.parent is not None and not self.children and not self.locks
