"""A state machine over the pool, the radix tree and the cache manager, with a shadow of what every page holds.

`fork` and `turn` are there for the risky shapes: splits of locked edges and deep chains under a lock.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import FREE, TREE, OwnershipError
from isthmus.core.cache.radix import Node

DOMAINS = (b"", b"", b"salt")


@dataclass
class Live:
    """A running request: its tokens, its pages and where its lock is."""

    tokens: list[int]
    domain: bytes
    row: np.ndarray
    count: int
    shared: int
    node: Node


def refused(call: Callable[[], None], words: str) -> None:
    """The call must raise `OwnershipError` with these words."""
    try:
        call()
    except OwnershipError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"accepted what should be refused with {words!r}")


class CacheMachine(RuleBasedStateMachine):
    """Requests by owner number; owners are never used again. content[page] = (generation, domain, tokens up to it)."""

    @initialize(page=st.sampled_from([1, 2, 4]), pages=st.integers(6, 40))
    def begin(self, page: int, pages: int) -> None:
        self.page, self.cache = page, CacheManager(pages, page, strict=True)
        self.live: dict[int, Live] = {}
        self.history: list[tuple[list[int], bytes]] = [([0], b"")]
        self.content: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}
        self.old: list[tuple[int, int, int]] = []
        self.owner = 0

    # ---- rules

    @rule(base=st.integers(0, 30), cut=st.integers(0, 12), more=st.lists(st.integers(0, 2), min_size=1, max_size=9),
          domain=st.sampled_from(DOMAINS), times=st.integers(1, 2))
    def start(self, base: int, cut: int, more: list[int], domain: bytes, times: int) -> None:
        """Extend something seen before, perhaps in another domain, perhaps twice at once."""
        tokens, _ = self.history[base % len(self.history)]
        for _ in range(times):
            owner = self._start(tokens[:max(0, len(tokens) - cut)] + more, domain)
            if owner and times > 1:
                self._commit(owner, len(self.live[owner].tokens))

    @rule(base=st.integers(0, 30), keep=st.integers(0, 40), tail=st.integers(3, 6))
    def fork(self, base: int, keep: int, tail: int) -> None:
        """Part ways inside something that is cached or still runs."""
        known = [(r.tokens, r.domain) for r in self.live.values()] + self.history
        tokens, domain = known[base % len(known)]
        self._start(tokens[:1 + keep % len(tokens)] + [tail], domain)

    @rule(base=st.integers(0, 30), more=st.lists(st.integers(0, 2), min_size=2, max_size=8))
    def turn(self, base: int, more: list[int]) -> None:
        """One whole request on top of another."""
        tokens, domain = self.history[base % len(self.history)]
        owner = self._start(tokens + more, domain)
        if owner:
            self._commit(owner, len(self.live[owner].tokens))
            self._finish(owner)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9), token=st.integers(0, 2))
    def grow(self, pick: int, token: int) -> None:
        owner = self._pick(pick)
        request = self.live[owner]
        if len(request.tokens) % self.page == 0:
            pages = self._take(1, owner)
            if pages is None:
                return
            request.row[request.count:request.count + 1] = pages
            request.count += 1
        request.tokens.append(token)
        self._write(owner, len(request.tokens) - 1)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9), length=st.integers(0, 40))
    def commit(self, pick: int, length: int) -> None:
        owner = self._pick(pick)
        self._commit(owner, length % (len(self.live[owner].tokens) + 1))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9), cached=st.booleans())
    def finish(self, pick: int, cached: bool) -> None:
        owner = self._pick(pick)
        if cached:
            self._commit(owner, len(self.live[owner].tokens))
        self._finish(owner)

    @rule(count=st.integers(1, 12))
    def press(self, count: int) -> None:
        """Somebody takes pages for a moment, which evicts."""
        pages = self._take(count, 10**6)
        if pages is not None:
            self.cache.pool.release(pages, 10**6)

    @rule()
    def press_all(self) -> None:
        """All that is said to be available can be had."""
        self.press(max(1, self.cache.available))

    @rule()
    def flush(self) -> None:
        cached = self.cache.tree.evictable
        assert self.cache.flush() == cached and self.cache.tree.evictable == 0

    @precondition(lambda self: self.old)
    @rule(pick=st.integers(0, 50))
    def misuse(self, pick: int) -> None:
        """A finished request's handle can be neither released, used nor handed on."""
        page, generation, owner = self.old[pick % len(self.old)]
        pool, pages = self.cache.pool, np.array([page], np.int32)
        refused(lambda: pool.release(pages, owner), f"page {page} ")
        refused(lambda: pool.transfer(pages, owner, TREE), f"page {page} ")
        refused(lambda: pool.check(pages, np.array([generation]), owner), f"page {page} ")
        if pool.owner[page] in (FREE, *self.live):
            refused(lambda: pool.check(pages, np.array([generation]), int(pool.owner[page])), "stale generation")

    # ---- what must hold

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.verify({owner: r.row[r.shared:r.count] for owner, r in self.live.items()})
        for domain, path, node in self._nodes():
            first = len(path) // self.page - node.size
            for i, page in enumerate(np.frombuffer(node.pages, np.int32).tolist()):
                self._holds(page, domain, path[:(first + i + 1) * self.page])
            anchored = sum(1 for r in self.live.values() if r.node is node)
            below = sum(1 for child in node.children.values() if child.locks)
            assert node.locks == anchored + below, f"{node.locks} locks, {anchored} requests, {below} children"
        for r in self.live.values():
            locked = self.cache.tree.path(r.node)[:r.shared]
            assert r.row[:r.shared].tolist() == locked.tolist(), "a locked prefix moved"
            for i, page in enumerate(r.row[:r.count].tolist()):
                self._holds(page, r.domain, tuple(r.tokens[:(i + 1) * self.page]))
            assert self.cache.cached_tokens(np.array(r.tokens, np.int32), r.domain) >= r.shared * self.page

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for owner in list(self.live):
            self._finish(owner)
        self.cache.flush()
        pool = self.cache.pool
        assert sorted(pool._free[:pool.free].tolist()) == list(range(1, pool.total)), "a page is lost"
        assert not self.cache.tree._roots, "a domain is left without pages"

    # ---- steps of a request

    def _start(self, tokens: list[int], domain: bytes) -> int:
        ids = np.array(tokens, np.int32)
        before = self.cache.cached_tokens(ids[:-1], domain)
        pages, node = self.cache.acquire(ids[:-1], domain)
        assert len(pages) * self.page == before < len(tokens), "peek and match differ"
        self.owner += 1
        need = -(-len(tokens) // self.page) - len(pages)
        fresh = self._take(need, self.owner)
        if fresh is None:
            self.cache.forget(node)
            return 0
        row = np.zeros(len(tokens) // self.page + 40, np.int32)
        row[:len(pages) + need] = np.concatenate([pages, fresh])
        self.live[self.owner] = Live(list(tokens), domain, row, len(pages) + need, len(pages), node)
        for i in range(len(pages) * self.page, len(tokens)):
            self._write(self.owner, i)
        self.history = [*self.history[-11:], (list(tokens), domain)]
        return self.owner

    def _take(self, count: int, owner: int) -> np.ndarray | None:
        available = self.cache.available
        pages = self.cache.take(count, owner)
        assert (pages is not None) == (count <= available), f"{count} of {available} pages: {pages}"
        if pages is not None:
            assert len(set(pages.tolist())) == count and 0 not in pages, f"took {pages}"
            assert (self.cache.pool.owner[pages] == owner).all()
        return pages

    def _write(self, owner: int, i: int) -> None:
        request = self.live[owner]
        page = int(request.row[i // self.page])
        assert self.cache.pool.owner[page] == owner, f"page {page} is written and not owned"
        generation = int(self.cache.pool.generation[page])
        self.content[page] = (generation, request.domain, tuple(request.tokens[:i + 1]))

    def _commit(self, owner: int, length: int) -> None:
        r = self.live[owner]
        had = r.shared
        r.shared, r.node = self.cache.commit(np.array(r.tokens[:length], np.int32), r.row, had, owner, r.domain, r.node)
        assert r.shared == max(had, length // self.page)

    def _finish(self, owner: int) -> None:
        r = self.live.pop(owner)
        own = r.row[r.shared:r.count].copy()
        self.old = [*self.old[-30:], *((int(p), int(self.cache.pool.generation[p]), owner) for p in own)]
        self.cache.release(r.row[:r.count], r.shared, owner, r.node)
        self.history = [*self.history[-11:], (r.tokens, r.domain)]

    def _pick(self, pick: int) -> int:
        return list(self.live)[pick % len(self.live)]

    def _nodes(self) -> Iterator[tuple[bytes, tuple[int, ...], Node]]:
        for path, node in self.cache.tree.nodes():
            root = node
            while root.parent is not None:
                root = root.parent
            yield root.edge, tuple(np.frombuffer(path, np.int32).tolist()), node

    def _holds(self, page: int, domain: bytes, tokens: tuple[int, ...]) -> None:
        want = (int(self.cache.pool.generation[page]), domain, tokens)
        assert self.content[page] == want, f"page {page} holds {self.content[page]}, not {want}"
