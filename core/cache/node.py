"""A node of the radix tree."""
from __future__ import annotations

ID_BYTES = 4  # of a page number and of a token id


class Node:
    """Pages that follow the parent's; `edge` are their tokens, `pages` their numbers, both as int32 bytes.

    A root has no parent and no pages; its edge is the domain's name. key: its first page's tokens, the very object that
    it stands under in its parent, so that they are hashed once. size: pages in this node.
    last: the child that a prompt went on with last, None when there is none: the next is tried there first.
    hits, turn, mark, ghosts, queued: the eviction policy's: how often the pages were used again, how many requests
    ended on the path up to here, what else it keeps of the last use, what it remembers of evicted pages behind the
    node, and where the node is in its index, if it is.
    """

    __slots__ = ("key", "edge", "pages", "size", "parent", "children", "last", "locks", "stamp", "hits", "turn",
                 "mark", "ghosts", "queued")

    def __init__(self, edge: bytes, pages: bytes, parent: Node | None, stamp: int, key: bytes = b""):
        self.key, self.edge, self.pages, self.size = key, edge, pages, len(pages) // ID_BYTES
        self.parent, self.stamp = parent, stamp
        self.children: dict[bytes, Node] = {}
        self.last: Node | None = None
        self.locks = self.hits = self.turn = self.mark = 0
        self.ghosts: dict | None = None
        self.queued = 0

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree."""
        return self.parent is not None and not self.children and not self.locks
