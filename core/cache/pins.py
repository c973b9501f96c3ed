"""Sessions, and pins: somebody asked that what a session left in the cache be kept for a while.

A pin is no lock. Its pages go after all others, the soonest to expire first, and pins hold a bounded share of the
cache: they cannot exhaust memory, whatever clients ask for. Only the last leaf of a session is marked: what is before
it cannot be evicted while it is there.
"""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..errors import RequestError
from .node import Node
from .radix import RadixTree

SESSIONS = 4096  # of which the last place in the tree is known
SWEEP = 10.0     # seconds between looks for what was evicted


@dataclass(frozen=True)
class Pin:
    """A session's prefix of `pages` pages, which ends with `node`; kept until `until`, by the scheduler's clock."""

    session: str
    node: Node
    pages: int
    ttl: float
    until: float


class Pins:
    """Stands between the tree and its eviction policy where victims are chosen, while there are pins. share: of the
    cache, at most."""

    def __init__(self, tree: RadixTree, share: float):
        self._tree, self._policy, self._share = tree, tree.policy, share
        self._last: OrderedDict[str, Node] = OrderedDict()
        self._pins: dict[str, Pin] = {}
        self._by_node: dict[Node, set[str]] = {}
        self._aside: dict[Node, None] = {}  # pinned leaves that the policy has given up already
        self.pages = 0
        self._next, self._sweep = float("inf"), 0.0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def limit(self) -> int:
        """Pages that pins may hold."""
        return int(self._share * self._policy.capacity)

    def pop(self) -> Node | None:
        """The leaf to evict next: the first that the policy gives and nobody has pinned, as long as there is one."""
        node = self._policy.pop()
        while node is not None and node in self._by_node:
            self._aside[node] = None
            node = self._policy.pop()
        return self._give_way() if node is None else node

    def ended(self, session: str, node: Node, ends: bool, now: float) -> None:
        """A request of the session has left `node` as its last place. A pin moves there and lasts as long again, or is
        over if the session ends."""
        if node.parent is None:
            return
        self._last[session] = node
        self._last.move_to_end(session)
        if len(self._last) > SESSIONS:
            self._last.popitem(last=False)
        pin = self._pins.get(session)
        if pin is not None and ends:
            self._drop(pin)
        elif pin is not None and depth(node) <= self.limit:
            self._set(session, node, pin.ttl, now)

    def pin(self, session: str, ttl: float, now: float) -> Pin:
        """Keep what the session has left for `ttl` seconds. Raises `RequestError` when nothing is left, or when it is
        more than all pins may hold. Pins that expire sooner make room for it."""
        node = self._last.get(session)
        if node is None or node.parent is None:
            raise RequestError("nothing of this session is cached: a pin keeps what a request with its session_id left",
                               status=404, param="session_id", code="session_not_found")
        pages = depth(node)
        if pages > self.limit:
            raise RequestError(f"the session has {pages} pages cached, more than the {self.limit} that all pins may "
                               "hold (--pin-share)", status=409, param="session_id", code="pin_too_large")
        return self._set(session, node, ttl, now)

    def unpin(self, session: str) -> bool:
        """End the session's pin; was there one?"""
        pin = self._pins.get(session)
        if pin is not None:
            self._drop(pin)
        return pin is not None

    def tick(self, now: float) -> None:
        """It is `now`: let expired pins go, and forget places that are no longer in the tree."""
        if now < self._next and now < self._sweep:
            return
        for pin in [pin for pin in self._pins.values() if pin.until <= now or pin.node.parent is None]:
            self._drop(pin)
        self._next = min((pin.until for pin in self._pins.values()), default=float("inf"))
        if now >= self._sweep:
            self._sweep = now + SWEEP
            for session in [session for session, node in self._last.items() if node.parent is None]:
                del self._last[session]

    def _set(self, session: str, node: Node, ttl: float, now: float) -> Pin:
        self.unpin(session)
        pin = Pin(session, node, depth(node), ttl, now + ttl)
        while self.pages + pin.pages > self.limit:
            self._drop(min(self._pins.values(), key=lambda other: other.until))
        self._pins[session] = pin
        self._by_node.setdefault(node, set()).add(session)
        self._tree.choose_by(self.pop)
        self.pages += pin.pages
        self._next = min(self._next, pin.until)
        return pin

    def _drop(self, pin: Pin) -> None:
        """The pin is over; a leaf that the policy has given up goes back to it."""
        del self._pins[pin.session]
        self.pages -= pin.pages
        others = self._by_node[pin.node]
        others.discard(pin.session)
        if not others:
            del self._by_node[pin.node]
            if pin.node in self._aside:
                del self._aside[pin.node]
                if pin.node.evictable:
                    self._policy.add(pin.node)
        if not self._pins:
            self._tree.choose_by()

    def _give_way(self) -> Node | None:
        """Nothing but pinned leaves is left: the one whose pins are over first."""
        left = {node: max(self._pins[session].until for session in self._by_node[node])
                for node in self._aside if node.evictable}
        self._aside = dict.fromkeys(left)
        if not left:
            return None
        node = min(left, key=left.__getitem__)
        del self._aside[node]
        for session in list(self._by_node[node]):
            self._drop(self._pins[session])
        return node


def depth(node: Node) -> int:
    """Pages from the root to the end of `node`."""
    pages = 0
    while node.parent is not None:
        pages, node = pages + node.size, node.parent
    return pages
