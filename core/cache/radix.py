"""The radix tree over cached pages: the longest prefix of a prompt whose K and V are already there.

Keys are token ids as little-endian int32 bytes; an edge is a whole number of pages, so a partial page is never shared.
Comparing an edge is one `bytes.startswith`; only the edge where two prompts part is looked at in numpy.
Domains (adapter, salt, images) have roots of their own, so that their pages never mix.

A node is protected while a request below it is locked: `locks` counts requests anchored at the node plus children that
are protected. Ancestors of a protected node are therefore protected, and only unlocked leaves are ever evicted.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .events import CacheListener
from .eviction import EVICTION, EvictionPolicy, Use
from .node import ID_BYTES, Node


class RadixTree:
    """Prefix tree with locks and page-granular eviction. Knows page numbers, not the pool: callers move ownership."""

    def __init__(self, page_size: int, policy: str = "lru", capacity: int = 65536):
        self.page_size, self.page_bytes = page_size, page_size * ID_BYTES
        self.policy: EvictionPolicy = EVICTION.create(policy, capacity)
        self.choose_by()
        self._watch = self.policy.watches
        self._roots: dict[bytes, Node] = {}
        self.listener: CacheListener | None = None
        self._clock = 0
        self.evictable = 0   # pages in nodes that no lock protects
        self.protected = 0   # pages in nodes under a lock

    def choose_by(self, pop: Callable[[], Node | None] | None = None) -> None:
        """Which leaf goes next: `pop` tells, in place of the policy; None: the policy, which may name many at once."""
        self.pop, self.run = (pop, None) if pop else (self.policy.pop, getattr(self.policy, "run", None))

    def match(self, key: bytes, domain: bytes = b"", end: int | None = None) -> tuple[int, Node]:
        """The longest cached prefix of `key[:end]`, in whole pages: (pages, the node where it ends; a root when 0).

        Counts as a use. Splits an edge when the prefix ends inside it, so that exactly the prefix can be locked.
        """
        self._clock += 1
        root = self._roots.get(domain)
        if root is None:
            return 0, Node(domain, b"", None, 0)
        node, at = self._descend(root, key, len(key) if end is None else end)
        if node.evictable:
            self.policy.add(node)
        return at // self.page_bytes, node

    def acquire(self, key: bytes, domain: bytes = b"", end: int | None = None) -> Node:
        """`match`, and `lock` the node where the prefix ends."""
        self._clock += 1
        root = self._roots.get(domain)
        if root is None:
            return Node(domain, b"", None, 0)
        node, _ = self._descend(root, key, len(key) if end is None else end)
        self.lock(node)
        return node

    def peek(self, key: bytes, domain: bytes = b"", end: int | None = None) -> int:
        """Pages of the prefix of `key[:end]` that are cached, without counting as a use or changing the tree."""
        node, at, page_bytes = self._roots.get(domain), 0, self.page_bytes
        end, matches = len(key) if end is None else end, key.startswith
        while node is not None:
            child = node.last
            if child is None or not matches(child.edge, at, end):
                child = node.children.get(key[at:at + page_bytes])
                if child is None:
                    break
                if not matches(child.edge, at, end):
                    at += self._shared_bytes(child.edge, key, at, end)
                    break
            node, at = child, at + len(child.edge)
        return at // page_bytes

    def insert(self, key: bytes, pages: np.ndarray, domain: bytes = b"") -> tuple[int, Node]:
        """Add the whole pages of `key`: `pages` int32, one a page, at least len(key) // page bytes of them.

        Returns (how many pages of the prefix were there already, the node where the key ends). The tree takes the
        pages after those; for the others the caller's are duplicates of the tree's, which `path` gives.
        """
        self._clock += 1
        root = self._roots.get(domain) or Node(domain, b"", None, 0)
        stop = len(key) // self.page_bytes * self.page_bytes
        node, at = self._descend(root, key, stop)
        if at < stop:
            node = self._attach(node, key[at:stop], pages[at // self.page_bytes:stop // self.page_bytes], domain)
            self.evictable += node.size
            self.policy.add(node)
        elif node.evictable:
            self.policy.add(node)
        return at // self.page_bytes, node

    def extend(self, node: Node, key: bytes, pages: np.ndarray, domain: bytes, end: int = 0,
               use: Use | None = None) -> tuple[int, Node]:
        """`insert` below a node that the caller has locked, and hand its lock to the node where `key` ends.

        key: the tokens after the node's. A policy that watches is told `end`, pages from the prompt's start to the end
        of `key`, and `use`, what it made of the request that the pages are of.
        """
        self._clock += 1
        page_bytes = self.page_bytes
        stop = len(key) // page_bytes * page_bytes
        start = self._roots.get(domain, node) if node.parent is None else node
        below, at = self._descend(start, key, stop)
        if below is not node:
            self.lock(below)
            self.unlock(node)
        if at < stop:  # the new leaf takes the lock over: a protected child counts as one of its parent's
            below = self._attach(below, key[at:stop], pages[at // page_bytes:stop // page_bytes], domain)
            below.locks = 1
            self.protected += below.size
            if self._watch and use is not None:
                self.policy.grow(below, end, use)
        return at // page_bytes, below

    def _attach(self, node: Node, edge: bytes, pages: np.ndarray, domain: bytes) -> Node:
        """A new leaf below `node`, counted neither as evictable nor as protected yet."""
        key = edge[:self.page_bytes]
        child = Node(edge, pages.tobytes(), node, self._clock, key)
        child.turn = node.turn
        node.children[key] = node.last = child
        if node.parent is None:  # a domain is kept only while it has pages, so that many salts cost nothing
            self._roots[domain] = node
        if self.listener is not None:
            self.listener.stored(edge, child.pages, node.pages, domain)
        return child

    def _descend(self, node: Node, key: bytes, end: int) -> tuple[Node, int]:
        """Follow `key[:end]` down from `node` as far as it is cached: (the node where that ends, bytes of `key`)."""
        at, page_bytes, clock, matches = 0, self.page_bytes, self._clock, key.startswith
        while True:
            child = node.last
            if child is None or not matches(child.edge, at, end):
                child = node.children.get(key[at:at + page_bytes])
                if child is None:
                    return node, at
                if not matches(child.edge, at, end):
                    shared = self._shared_bytes(child.edge, key, at, end)
                    if not shared:
                        return node, at
                    child = self._split(child, shared)
                node.last = child
            node = child
            at += len(child.edge)
            child.stamp = clock

    def path(self, node: Node) -> np.ndarray:
        """Page numbers from the root to `node`, int32, read-only."""
        parts = []
        while (parent := node.parent) is not None:
            parts.append(node.pages)
            node = parent
        parts.reverse()
        return np.frombuffer(b"".join(parts), np.int32)

    def lock(self, node: Node) -> None:
        """Protect the node and its ancestors from eviction until `unlock`. Locks are counted."""
        pages = 0
        while (parent := node.parent) is not None:
            locks = node.locks
            node.locks = locks + 1
            if locks:
                break
            pages += node.size
            node = parent
        self.evictable -= pages
        self.protected += pages

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node. What nothing protects any more was in use until now."""
        pages = 0
        self._clock = clock = self._clock + 1
        while (parent := node.parent) is not None:
            locks = node.locks - 1
            if locks < 0:
                raise AssertionError(f"unlock of a node of {node.size} pages that is not locked")
            node.locks = locks
            if locks:
                break
            node.stamp = clock
            pages += node.size
            if not node.children:
                self.policy.add(node)
            node = parent
        self.evictable += pages
        self.protected -= pages

    def evict(self, count: int) -> np.ndarray:
        """Drop up to `count` pages, tail pages of the least valuable unlocked leaves first: their numbers, int32.

        In reverse: the one that went first is last. So pages of a prompt stand in its order, and the last is the first
        that `PagePool.release` has used again.
        """
        policy, run, freed, need = self.policy, self.run, [], count
        while need > 0:
            nodes, keep = run(need) if run is not None else ([], 0)
            if not nodes:
                if (node := self.pop()) is None:
                    break
                nodes, keep = [node], max(0, node.size - need)
                if self._watch:
                    policy.drop(node, keep)
            last = nodes.pop() if keep else None
            for node in nodes:
                need -= node.size
                freed.append(node.pages)
                self._remove(node)
            if last is not None:
                need -= last.size - keep
                freed.append(last.pages[keep * ID_BYTES:])
                last.edge, last.pages = last.edge[:keep * self.page_bytes], last.pages[:keep * ID_BYTES]
                last.size = keep
                policy.add(last)
        self.evictable -= count - need
        freed.reverse()
        dropped = b"".join(freed)
        if dropped and self.listener is not None:
            if self._roots:
                self.listener.removed(dropped)
            else:
                self.listener.cleared()
        return np.frombuffer(dropped, np.int32)

    def tell(self, listener: CacheListener) -> None:
        """Name every page to a listener that does not know the tree yet, parents first."""
        for domain, root in self._roots.items():
            stack = [root]
            while stack:
                node = stack.pop()
                if node.parent is not None:
                    listener.stored(node.edge, node.pages, node.parent.pages, domain)
                stack += node.children.values()

    def nodes(self) -> Iterator[tuple[bytes, Node]]:
        """Every node but the roots, parents first, with the tokens of its path as bytes."""
        stack = [(b"", root) for root in self._roots.values()]
        while stack:
            prefix, node = stack.pop()
            for child in node.children.values():
                path = prefix + child.edge
                yield path, child
                stack.append((path, child))

    def pages(self) -> np.ndarray:
        """All page numbers in the tree, int32."""
        return np.frombuffer(b"".join(node.pages for _, node in self.nodes()), np.int32)

    def check(self) -> None:
        """Structure and counters from an independent walk. Raises AssertionError that names the node."""
        evictable = protected = 0
        for path, node in self.nodes():
            where = f"node of {node.size} pages at depth {len(path) // self.page_bytes}"
            assert node.size == len(node.pages) // ID_BYTES > 0, f"{where}: it has {len(node.pages)} bytes of them"
            assert len(node.edge) == node.size * self.page_bytes, f"{where}: edge of {len(node.edge)} bytes"
            assert node.key == node.edge[:self.page_bytes], f"{where}: its key is another page's"
            assert node.parent.children.get(node.key) is node, f"{where}: not under its key"
            assert node.last is None or node.last.parent is node, f"{where}: its last child is not its child"
            below = sum(1 for child in node.children.values() if child.locks)
            assert node.locks >= below, f"{where}: {node.locks} locks, {below} protected children"
            if node.locks:
                protected += node.size
            else:
                evictable += node.size
        counted, kept = (evictable, protected), (self.evictable, self.protected)
        assert counted == kept, f"(evictable, protected) pages: counted {counted}, kept {kept}"

    def _shared_bytes(self, edge: bytes, key: bytes, offset: int, end: int) -> int:
        """Bytes of whole pages that `edge` and `key[offset:end]` have in common."""
        limit = min(len(edge), end - offset) // self.page_bytes * self.page_bytes
        if limit <= 0:
            return 0
        a = np.frombuffer(edge, np.int32, limit // ID_BYTES)
        b = np.frombuffer(key, np.int32, limit // ID_BYTES, offset)
        differs = a != b
        first = int(differs.argmax())
        return limit if not differs[first] else first // self.page_size * self.page_bytes

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` bytes of its edge: a new parent takes the front and the protection, not the count."""
        cut = at // self.page_bytes * ID_BYTES
        front = Node(node.edge[:at], node.pages[:cut], node.parent, node.stamp, node.key)
        front.locks = 1 if node.locks else 0
        front.hits, front.mark, front.turn = node.hits, node.mark, node.parent.turn
        node.parent.children[front.key] = front
        node.edge, node.pages, node.parent = node.edge[at:], node.pages[cut:], front
        node.size, node.key = node.size - front.size, node.edge[:self.page_bytes]
        front.children[node.key] = front.last = node
        return front

    def _remove(self, node: Node) -> None:
        parent = node.parent
        del parent.children[node.key]
        node.parent = None
        if parent.last is node:
            parent.last = None
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.edge]
        elif not parent.children and not parent.locks:
            self.policy.add(parent)
