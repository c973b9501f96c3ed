"""What is remembered of evicted pages: where they were in the tree, how often and when they were used last."""
from __future__ import annotations

from collections import deque

from ..node import Node


class Ghost:
    """Evicted pages that followed each other, told by the first one's tokens alone; `behind` are ghosts after them.

    hits: of the pages, 0 when they were used once only; those of ghosts once before count on.
    """

    __slots__ = ("key", "home", "pages", "hits", "mark", "behind")

    def __init__(self, key: bytes, home: dict[bytes, Ghost], pages: int, hits: int, mark: int,
                 behind: dict[bytes, Ghost] | None):
        self.key, self.home, self.pages, self.hits, self.mark, self.behind = key, home, pages, hits, mark, behind


class Ghosts:
    """Ghosts hang where the tree would have their pages. The oldest are forgotten beyond `limit` pages.

    pages: how many are remembered, of those used once and of those used again.
    """

    def __init__(self, limit: int):
        self.limit, self.pages = limit, [0, 0]
        self._roots: dict[bytes, dict[bytes, Ghost]] = {}
        self._order: deque[Ghost] = deque()

    def bury(self, nodes: list[Node], keep: int = 0) -> None:
        """These leaves are evicted, but for the first `keep` pages of the last."""
        pages, order = self.pages, self._order
        for node in nodes:
            count, behind, home = node.size, node.ghosts, node.parent.ghosts
            if keep and node is nodes[-1]:
                page_bytes, count = len(node.edge) // count, count - keep
                key, node.ghosts = node.edge[keep * page_bytes:(keep + 1) * page_bytes], (home := {})
            else:
                key, node.ghosts = node.key, None
                if home is None or node.parent.parent is None:
                    home = self._home(node.parent)
            hits, mark = node.hits, node.mark
            pages[hits > 0] += count
            if behind and len(behind) == 1:
                (last,) = behind.values()
                if last.mark == mark and last.hits == hits:  # trimmed off the same node just before
                    count, behind, last.pages = count + last.pages, last.behind, 0
            if key in home:
                self._leave(home[key])
            home[key] = ghost = Ghost(key, home, count, hits, mark, behind or None)
            order.append(ghost)
        while pages[0] + pages[1] > self.limit or len(order) > self.limit:
            self._leave(order.popleft())

    def recall(self, node: Node, rest: bytes | memoryview, page_bytes: int) -> list[Ghost]:
        """Ghosts of the tokens `rest` behind `node`, front to back; they are forgotten. Their pages are cut to it."""
        found: list[Ghost] = []
        here, at = (self._roots.get(node.edge) if node.parent is None else node.ghosts), 0
        while here and (ghost := here.get(bytes(rest[at:at + page_bytes]))):
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
            self.pages[ghost.hits > 0] -= ghost.pages
            ghost.pages = 0
