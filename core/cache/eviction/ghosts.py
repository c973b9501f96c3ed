"""What is remembered of evicted pages: where they were in the tree, how often and when they were used last."""
from __future__ import annotations

from collections import deque

from ..node import Node


class Ghost:
    """Evicted pages that followed each other, told by the first one's tokens alone; `behind` are ghosts after them.

    again: they had been used again while they were cached, or were ghosts once before.
    """

    __slots__ = ("key", "home", "pages", "hits", "again", "turn", "mark", "behind")

    def __init__(self, key: bytes, home: dict[bytes, Ghost], pages: int, node: Node):
        self.key, self.home, self.pages = key, home, pages
        self.hits, self.turn, self.mark = node.hits, node.turn, node.mark
        self.again = node.hits > 0
        self.behind: dict[bytes, Ghost] | None = None


class Ghosts:
    """Ghosts hang where the tree would have their pages. The oldest are forgotten beyond `limit` pages.

    pages: how many are remembered, of those used once and of those used again.
    """

    def __init__(self, limit: int):
        self.limit, self.pages = limit, [0, 0]
        self._roots: dict[bytes, dict[bytes, Ghost]] = {}
        self._order: deque[Ghost] = deque()

    def bury(self, node: Node, keep: int) -> None:
        """The pages of the leaf after the first `keep` are evicted."""
        size, behind = node.size, node.ghosts
        if keep:
            page_bytes = len(node.edge) // size
            key, home = node.edge[keep * page_bytes:(keep + 1) * page_bytes], {}
            node.ghosts = home
        else:
            home, key, node.ghosts = node.parent.ghosts, node.key, None
            if home is None or node.parent.parent is None:
                home = self._home(node.parent)
        ghost = Ghost(key, home, size - keep, node)
        pages = self.pages
        pages[ghost.again] += ghost.pages
        if behind and len(behind) == 1:
            (last,) = behind.values()
            if last.mark == ghost.mark and last.hits == ghost.hits:  # trimmed off the same node just before
                ghost.pages, ghost.turn, behind = ghost.pages + last.pages, last.turn, last.behind
                last.pages = 0
        ghost.behind = behind or None
        if key in home:
            self._leave(home[key])
        home[key] = ghost
        self._order.append(ghost)
        while pages[0] + pages[1] > self.limit or len(self._order) > self.limit:
            self._leave(self._order.popleft())

    def recall(self, node: Node, rest: bytes, page_bytes: int) -> list[Ghost]:
        """Ghosts of the tokens `rest` behind `node`, front to back; they are forgotten. Their pages are cut to it."""
        found: list[Ghost] = []
        here, at = (self._roots.get(node.edge) if node.parent is None else node.ghosts), 0
        while here and (ghost := here.get(rest[at:at + page_bytes])):
            pages = min(ghost.pages, (len(rest) - at) // page_bytes)
            self._leave(ghost)
            ghost.pages, here, at = pages, ghost.behind, at + pages * page_bytes
            found.append(ghost)
        return found

    def _home(self, node: Node) -> dict[bytes, Ghost]:
        if node.parent is None:
            return self._roots.setdefault(node.edge, {})
        if node.ghosts is None:
            node.ghosts = {}
        return node.ghosts

    def _leave(self, ghost: Ghost) -> None:
        """Take a ghost out, if it is still there. Those behind it go when their turn comes."""
        if ghost.home.get(ghost.key) is ghost:
            del ghost.home[ghost.key]
            self.pages[ghost.again] -= ghost.pages
            ghost.pages = 0
