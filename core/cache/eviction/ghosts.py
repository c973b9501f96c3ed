"""What is remembered of evicted pages: where they were in the tree, how often and when they were used last."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..node import ID_BYTES, Node


class Ghost:
    """Evicted pages that followed each other, told by the first one's tokens alone; `behind` are ghosts after them."""

    __slots__ = ("key", "home", "pages", "hits", "turn", "mark", "behind")

    def __init__(self, key: bytes, home: dict[bytes, Ghost], pages: int, node: Node):
        self.key, self.home, self.pages = key, home, pages
        self.hits, self.turn, self.mark = node.hits, node.turn, node.mark
        self.behind: dict[bytes, Ghost] | None = None


class Ghosts:
    """Ghosts hang where the tree would have their pages. The oldest are forgotten beyond `limit` pages.

    forgotten: called with each that is.
    """

    def __init__(self, limit: int, forgotten: Callable[[Ghost], None] | None = None):
        self.limit, self.pages, self._forgotten = limit, 0, forgotten
        self._roots: dict[bytes, dict[bytes, Ghost]] = {}
        self._order: deque[Ghost] = deque()

    def bury(self, node: Node, keep: int) -> None:
        """The pages of the leaf after the first `keep` are evicted."""
        size = len(node.pages) // ID_BYTES
        page_bytes = len(node.edge) // size
        key, above = node.edge[keep * page_bytes:(keep + 1) * page_bytes], node if keep else node.parent
        behind = node.ghosts
        if keep:
            home = node.ghosts = {}
        else:
            home, node.ghosts = self._home(above), None
        ghost = Ghost(key, home, size - keep, node)
        if behind:
            last = next(iter(behind.values()))
            if len(behind) == 1 and last.mark == ghost.mark and last.hits == ghost.hits:
                ghost.pages, behind = ghost.pages + last.pages, last.behind
                ghost.turn = last.turn
                self.pages -= last.pages
                last.pages = 0
        ghost.behind = behind
        if key in home:
            self.pages -= home[key].pages
        home[key] = ghost
        self._order.append(ghost)
        self.pages += ghost.pages
        while self.pages > self.limit or len(self._order) > self.limit:
            self._forget(self._order.popleft())

    def raise_from(self, node: Node, rest: bytes, page_bytes: int) -> list[Ghost]:
        """Ghosts of the tokens `rest` behind `node`, front to back; they are taken out, with their pages cut to it."""
        found: list[Ghost] = []
        here, at = (self._roots.get(node.edge) if node.parent is None else node.ghosts), 0
        while here:
            ghost = here.pop(rest[at:at + page_bytes], None)
            if ghost is None:
                break
            self.pages -= ghost.pages
            pages, ghost.pages = min(ghost.pages, (len(rest) - at) // page_bytes), 0
            ghost.home = {}
            found.append(ghost)
            ghost.pages, here, at = pages, ghost.behind, at + pages * page_bytes
        return found

    def _home(self, node: Node) -> dict[bytes, Ghost]:
        if node.parent is None:
            return self._roots.setdefault(node.edge, {})
        if node.ghosts is None:
            node.ghosts = {}
        return node.ghosts

    def _forget(self, ghost: Ghost) -> None:
        if ghost.home.get(ghost.key) is ghost:
            del ghost.home[ghost.key]
            self.pages -= ghost.pages
            if self._forgotten:
                self._forgotten(ghost)
