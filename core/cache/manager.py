"""Pages for requests: cached prefixes out of the radix tree, fresh pages out of the pool, eviction between the two.

The pages of a running request, front to back:

    row[: shared]         the tree's, under the lock of the request's node
    row[shared : count]   its own, until `commit` hands full ones to the tree

What the eviction policy learns from, in a request's order: `tick` before each step; `acquire`, as often as it takes;
`admit` once it runs, with the client's hint; `commit` and `release` with the `Use` that `admit` gave.
"""
from __future__ import annotations

import numpy as np

from ..messages import CacheHint
from .eviction import Use
from .node import ID_BYTES, Node
from .pins import Pin, Pins
from .pool import TREE, PagePool
from .radix import RadixTree


class CacheManager:
    """Pool and tree as one. `enabled` False keeps the tree empty: every prompt is computed."""

    def __init__(self, pages: int, page_size: int, policy: str = "lru", enabled: bool = True, strict: bool = False,
                 pin_share: float = 0.25):
        self.pool = PagePool(pages, strict)
        self.tree = RadixTree(page_size, policy, self.pool.capacity)
        self.pins = Pins(self.tree, pin_share)
        self.page_size, self.enabled = page_size, enabled
        self.evicted_pages = 0
        self.now = 0.0  # seconds; the cache has no other clock

    def tick(self, now: float) -> None:
        """It is `now`: called before each step."""
        self.now = now
        self.tree.policy.tick(now)
        self.pins.tick(now)

    @property
    def available(self) -> int:
        """Pages that a request could get now: free ones and those in the tree that nothing protects."""
        return self.pool.free + self.tree.evictable

    def cached_tokens(self, tokens: np.ndarray | bytes, domain: bytes, count: int | None = None) -> int:
        """Tokens of the prefix that `acquire` would find, without touching anything."""
        if not self.enabled:
            return 0
        key = tokens if isinstance(tokens, bytes) else tokens.tobytes()
        return self.tree.peek(key, domain, None if count is None else count * ID_BYTES) * self.page_size

    def acquire(self, tokens: np.ndarray | bytes, domain: bytes, count: int | None = None) -> tuple[np.ndarray, Node]:
        """Lock the longest cached prefix of the first `count` tokens: (its pages, read-only; the node for `forget`).

        tokens: int32, or their bytes, which are not copied. count None: all.
        """
        key = tokens if isinstance(tokens, bytes) else tokens.tobytes()
        end = (None if count is None else count * ID_BYTES) if self.enabled else 0
        node = self.tree.acquire(key, domain, end)
        return self.tree.path(node), node

    def forget(self, node: Node) -> None:
        """Undo `acquire`."""
        self.tree.unlock(node)

    def admit(self, tokens: np.ndarray, found: int, node: Node, hint: CacheHint | None = None,
              priority: int = 0) -> Use | None:
        """The request that has acquired `node`, `found` pages deep, runs now: one use of its prefix in the eyes of the
        eviction policy, whatever was acquired and forgotten before. tokens: the prompt, int32.

        hint: what the client says of the next use: advice that the policy weighs, never a pin. A request that is
        admitted again after a retraction is no new use: keep its `Use`. Returns what `commit` and `release` want.
        """
        policy = self.tree.policy
        if not (policy.watches and self.enabled):
            return None
        rest = tokens[found * self.page_size:]
        return policy.use(node, found, memoryview(rest).cast("B") if len(rest) else b"", hint, priority)

    def take(self, count: int, owner: int | np.ndarray) -> np.ndarray | None:
        """`count` fresh pages for `owner`, evicting cached ones as needed; None, and nothing changed, if too few."""
        while count <= self.available:
            short, violations = count - self.pool.free, self.pool.violations
            if short > 0:
                evicted = self.tree.evict(short)
                self.evicted_pages += len(evicted)
                self.pool.release(evicted, TREE)
            pages = self.pool.alloc(count, owner)
            if pages is not None or self.pool.violations == violations:
                return pages  # else free pages went into quarantine: look again
        return None

    def take_each(self, owners: np.ndarray) -> np.ndarray | None:
        """A fresh page for each of these owners (int32), or None as for `take`."""
        return self.take(len(owners), owners)

    def commit(self, tokens: np.ndarray, row: np.ndarray, shared: int, owner: int, domain: bytes,
               node: Node, use: Use | None = None) -> tuple[int, Node]:
        """Hand the full pages of `tokens` to the tree and lock them instead of `node`: (pages now shared, new node).

        `row` (int32, changed in place) are the request's pages. Where another request cached the same tokens first,
        its pages replace this request's, which go back to the pool: steps run in order, so nothing still reads them.
        """
        full = len(tokens) // self.page_size
        if not self.enabled or full <= shared:
            return shared, node
        size, had, seam = self.page_size, shared, full
        if use is not None and shared < use.seam < full:
            seam = use.seam  # pages that were cached once are a node of their own
        found = 0
        for stop in (seam, full) if seam < full else (full,):
            key = tokens[had * size:stop * size].tobytes()
            there, node = self.tree.extend(node, key, row[had:stop], domain, stop, use)
            found, had = found + there, stop
        if found:
            duplicates = row[shared:shared + found].copy()
            row[shared:shared + found] = self.tree.path(node)[shared:shared + found]
            self.pool.release(duplicates, owner)
        self.pool.transfer(row[shared + found:full], owner, TREE)
        return full, node

    def release(self, row: np.ndarray, shared: int, owner: int, node: Node, use: Use | None = None,
                hint: CacheHint | None = None) -> None:
        """A request ends: its own pages go back, its prefix is unlocked and stays cached while memory lasts."""
        if hint is not None and hint.session:
            self.pins.ended(hint.session, node, hint.ends, self.now)
        if use is not None:
            self.tree.policy.end(node, use)
        self.pool.release(row[shared:], owner)
        self.tree.unlock(node)

    def pin(self, session: str, ttl: float, now: float) -> Pin:
        """Keep what a session has left in the cache for `ttl` seconds; see `core.cache.pins`."""
        self.pins.tick(now)
        return self.pins.pin(session, ttl, now)

    def flush(self) -> int:
        """Drop every cached page that no running request uses; how many."""
        dropped = self.tree.evict(self.tree.evictable)
        self.pool.release(dropped, TREE)
        return len(dropped)

    def shrink(self, pages: int) -> None:
        """Go on with fewer pages, nothing cached. `OwnershipError` while a request holds any."""
        self.flush()
        self.pool.shrink(pages)
        self.tree.policy.capacity = self.pool.capacity

    def verify(self, held: dict[int, np.ndarray]) -> None:
        """The ledger by identity, the tree by structure. `held`: each running request's own pages by owner."""
        self.tree.check()
        named = self.pool.verify(self.tree.pages(), held)
        total = self.pool.free + self.tree.evictable + self.tree.protected + self.pool.quarantined
        total += sum(len(pages) for pages in held.values()) - named
        assert total == self.pool.capacity, f"{total} pages counted, {self.pool.capacity} exist"
