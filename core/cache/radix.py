"""The radix tree over cached pages: the longest prefix of a prompt whose K and V are already there.

Keys are token ids as little-endian int32 bytes; an edge is a whole number of pages, so a partial page is never shared.
Comparing an edge is one `bytes.startswith`; only the edge where two prompts part is looked at in numpy.
Domains (adapter, salt, images) have roots of their own, so that their pages never mix.

A node is protected while a request below it is locked: `locks` counts requests anchored at the node plus children that
are protected. Ancestors of a protected node are therefore protected, and only unlocked leaves are ever evicted.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from .events import CacheListener
from .eviction import EVICTION, EvictionPolicy, Use
from .node import ID_BYTES, Node


class RadixTree:
    """Prefix tree with locks and page-granular eviction. Knows page numbers, not the pool: callers move ownership."""

    def __init__(self, page_size: int, policy: str = "lru", capacity: int = 65536):
        self.page_size, self.page_bytes = page_size, page_size * ID_BYTES
        self.policy: EvictionPolicy = EVICTION.create(policy, capacity)
        self._watch = self.policy.watches
        self._roots: dict[bytes, Node] = {}
        self.listener: CacheListener | None = None
        self._clock = 0
        self.evictable = 0   # pages in nodes that no lock protects
        self.protected = 0   # pages in nodes under a lock

    def match(self, key: bytes, domain: bytes = b"") -> tuple[int, Node]:
        """The longest cached prefix of `key`, in whole pages: (pages, the node where it ends; a root when 0).

        Counts as a use. Splits an edge when the prefix ends inside it, so that exactly the prefix can be locked.
        """
        self._clock += 1
        node, offset, page_bytes = self._roots.get(domain) or Node(domain, b"", None, 0), 0, self.page_bytes
        while True:
            child = node.children.get(key[offset:offset + page_bytes])
            if child is None:
                break
            if key.startswith(child.edge, offset):
                shared = len(child.edge)
            else:
                shared = self._shared_bytes(child.edge, key, offset)
                if not shared:
                    break
                child = self._split(child, shared)
            node, offset = child, offset + shared
            node.stamp = self._clock
        if node.evictable:
            self.policy.add(node)
        return offset // page_bytes, node

    def peek(self, key: bytes, domain: bytes = b"") -> int:
        """Pages of `key`'s prefix that are cached, without counting as a use or changing the tree."""
        node, offset = self._roots.get(domain), 0
        while node is not None:
            node = node.children.get(key[offset:offset + self.page_bytes])
            if node is None:
                break
            if not key.startswith(node.edge, offset):
                offset += self._shared_bytes(node.edge, key, offset)
                break
            offset += len(node.edge)
        return offset // self.page_bytes

    def insert(self, key: bytes, pages: np.ndarray, domain: bytes = b"",
               use: Use | None = None) -> tuple[int, Node]:
        """Add the whole pages of `key`: `pages` int32, one a page, at least len(key) // page bytes of them.

        Returns (how many pages of the prefix were there already, the node where the key ends). The tree takes the
        pages after those; for the others the caller's are duplicates of the tree's, which `path` gives.
        use: what the policy made of the request that the pages are of, if it watches.
        """
        count = len(key) // self.page_bytes
        key = key[:count * self.page_bytes]
        found, node = self.match(key, domain)
        if found < count:
            new = np.ascontiguousarray(pages[found:count], np.int32).tobytes()
            child = Node(key[found * self.page_bytes:], new, node, self._clock)
            node.children[child.edge[:self.page_bytes]] = child
            if node.parent is None:  # a domain is kept only while it has pages, so that many salts cost nothing
                self._roots[domain] = node
            self.evictable += child.size
            if self.listener is not None:
                self.listener.stored(child.edge, child.pages, _last_page(node), domain)
            child.turn = node.turn
            if self._watch and use is not None:
                self.policy.grow(child, count, use)
            self.policy.add(child)
            node = child
        return found, node

    def path(self, node: Node) -> np.ndarray:
        """Page numbers from the root to `node`, int32."""
        parts = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.frombuffer(b"".join(reversed(parts)), np.int32)

    def lock(self, node: Node) -> None:
        """Protect the node and its ancestors from eviction until `unlock`. Locks are counted."""
        while node.parent is not None:
            node.locks += 1
            if node.locks > 1:
                return
            self.evictable -= node.size
            self.protected += node.size
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node."""
        while node.parent is not None:
            if node.locks < 1:
                raise AssertionError(f"unlock of a node of {node.size} pages that is not locked")
            node.locks -= 1
            if node.locks:
                return
            self.evictable += node.size
            self.protected -= node.size
            if not node.children:
                self.policy.add(node)
            node = node.parent

    def evict(self, count: int) -> np.ndarray:
        """Drop up to `count` pages, tail pages of the least valuable unlocked leaves first: their numbers, int32."""
        freed, need = [], count
        while need > 0:
            node = self.policy.pop()
            if node is None:
                break
            drop = min(need, node.size)
            keep = node.size - drop
            if self._watch:
                self.policy.drop(node, keep)
            freed.append(node.pages[keep * ID_BYTES:])
            self.evictable -= drop
            need -= drop
            if keep:
                node.pages, node.edge = node.pages[:keep * ID_BYTES], node.edge[:keep * self.page_bytes]
                self.policy.add(node)
            else:
                self._remove(node)
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
                    listener.stored(node.edge, node.pages, _last_page(node.parent), domain)
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
            assert node.size > 0, f"{where} is empty"
            assert len(node.edge) == node.size * self.page_bytes, f"{where}: edge of {len(node.edge)} bytes"
            assert node.parent.children.get(node.edge[:self.page_bytes]) is node, f"{where}: not under its key"
            below = sum(1 for child in node.children.values() if child.locks)
            assert node.locks >= below, f"{where}: {node.locks} locks, {below} protected children"
            if node.locks:
                protected += node.size
            else:
                evictable += node.size
        counted, kept = (evictable, protected), (self.evictable, self.protected)
        assert counted == kept, f"(evictable, protected) pages: counted {counted}, kept {kept}"

    def _shared_bytes(self, edge: bytes, key: bytes, offset: int) -> int:
        """Bytes of whole pages that `edge` and `key` from `offset` on have in common."""
        limit = min(len(edge), len(key) - offset) // self.page_bytes * self.page_bytes
        if not limit:
            return 0
        a = np.frombuffer(edge, np.int32, limit // ID_BYTES)
        b = np.frombuffer(key, np.int32, limit // ID_BYTES, offset)
        differs = a != b
        first = int(differs.argmax())
        return limit if not differs[first] else first // self.page_size * self.page_bytes

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` bytes of its edge: a new parent takes the front and the protection, not the count."""
        cut = at // self.page_bytes * ID_BYTES
        front = Node(node.edge[:at], node.pages[:cut], node.parent, node.stamp)
        front.locks = 1 if node.locks else 0
        front.hits, front.mark, front.turn = node.hits, node.mark, node.parent.turn
        node.parent.children[front.edge[:self.page_bytes]] = front
        node.edge, node.pages, node.parent = node.edge[at:], node.pages[cut:], front
        front.children[node.edge[:self.page_bytes]] = node
        return front

    def _remove(self, node: Node) -> None:
        parent = node.parent
        del parent.children[node.edge[:self.page_bytes]]
        node.parent = None
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.edge]
        elif parent.evictable:
            self.policy.add(parent)


def _last_page(node: Node) -> int:
    """The number of the node's last page; 0 for a root, since page 0 is nobody's."""
    return int.from_bytes(node.pages[-ID_BYTES:], sys.byteorder)
