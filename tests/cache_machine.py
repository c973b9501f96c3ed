"""A state machine over pool, radix tree and cache manager, beside cache_model.py, which it must agree with in every
page number.

`fork` and `turn` are there for the risky shapes: splits of locked edges and deep chains under a lock. `together` has
requests commit the same prompt in turn, so that duplicates arise, and `rejoin` one that has only a part of it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from isthmus.core.cache.events import CacheEvents, Cleared, Removed
from isthmus.core.cache.eviction import Use
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.node import Node
from isthmus.core.cache.pool import FREE, TREE, OwnershipError
from isthmus.core.messages import CacheHint

from .cache_model import Cached, Model, Prefix

DOMAINS = (b"", b"", b"salt")
HINTS = (None, None, CacheHint(ends=True), CacheHint(single=True), CacheHint(next_within=5.0))
EXTERN = 10**6  # an owner that is no request


@dataclass
class Live:
    """A running request: its tokens, its pages, where its lock is."""

    tokens: list[int]
    domain: bytes
    row: np.ndarray
    count: int
    shared: int
    node: Node
    use: Any = None


class Below:
    """What a tier of memory below the pages would know by the tree's hooks: the prefix of every cached page, in time to
    copy it. Passes on to `events`."""

    def __init__(self, events: CacheEvents, page: int):
        self.events, self.page, self.held = events, page, {}

    def stored(self, tokens: bytes, pages: bytes, before: bytes, domain: bytes) -> None:
        self.events.stored(tokens, pages, before, domain)
        ids, numbers = np.frombuffer(tokens, np.int32).tolist(), np.frombuffer(pages, np.int32).tolist()
        path = self.held[int(np.frombuffer(before, np.int32)[-1])][1] if before else ()
        assert not self.held.keys() & set(numbers), "a page comes in that has not gone out"
        for i, number in enumerate(numbers):
            path += tuple(ids[i * self.page:(i + 1) * self.page])
            self.held[number] = domain, path

    def removed(self, pages: bytes) -> None:
        self.events.removed(pages)
        for number in np.frombuffer(pages, np.int32).tolist():
            del self.held[number]

    def cleared(self) -> None:
        self.events.cleared()
        self.held = {}


def refused(call: Callable[[], None], words: str) -> None:
    """The call must raise `OwnershipError` with these words."""
    try:
        call()
    except OwnershipError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"accepted what should be refused with {words!r}")


class CacheMachine(RuleBasedStateMachine):
    """Requests by owner number; owners are never used again."""

    @initialize(page=st.sampled_from([1, 2, 4]), pages=st.integers(6, 40), policy=st.sampled_from(["lru", "learned"]))
    def begin(self, page: int, pages: int, policy: str = "lru") -> None:
        self.page, self.cache, self.model = page, CacheManager(pages, page, policy, strict=True), Model(pages, page)
        self.exact, self.live, self.owner = policy == "lru", {}, 0
        self.history: list[tuple[list[int], bytes]] = [([0], b"")]
        self.old: list[tuple[int, int, int]] = []
        self.events = CacheEvents(pages, page)
        self.cache.tree.listener = self.below = Below(self.events, page)
        self.blocks: set[int] = set()
        evict = self.cache.tree.evict
        self.cache.tree.evict = lambda count: self._evicted(evict(count), count)

    # ---- rules

    @rule(base=st.integers(0, 30), cut=st.integers(0, 12), more=st.lists(st.integers(0, 2), min_size=1, max_size=9),
          domain=st.sampled_from(DOMAINS), hint=st.sampled_from(HINTS))
    def start(self, base: int, cut: int, more: list[int], domain: bytes, hint: CacheHint | None) -> None:
        """Extend something seen before, perhaps in another domain."""
        tokens, _ = self.history[base % len(self.history)]
        self._start(tokens[:max(0, len(tokens) - cut)] + more, domain, hint)

    @rule(base=st.integers(0, 30), more=st.lists(st.integers(0, 2), min_size=1, max_size=12), short=st.integers(0, 9),
          swap=st.booleans())
    def together(self, base: int, more: list[int], short: int, swap: bool) -> None:
        """Two requests of one prompt, admitted before either has cached anything; the first to commit commits less."""
        tokens, domain = self.history[base % len(self.history)]
        owners = [self._start(tokens + more, domain) for _ in range(2)][::-1 if swap else 1]
        for owner, less in zip(owners, (short, 0), strict=True):
            if owner:
                self._commit(owner, max(0, len(self.live[owner].tokens) - less))

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
    @rule(pick=st.integers(0, 9), part=st.integers(0, 40), more=st.lists(st.integers(0, 2), max_size=6))
    def rejoin(self, pick: int, part: int, more: list[int]) -> None:
        """A part of a running request is cached, then another extends it whole: commits below a node that has grown."""
        owner = self._pick(pick)
        tokens, domain = list(self.live[owner].tokens), self.live[owner].domain
        self._commit(owner, part % (len(tokens) + 1))
        other = self._start(tokens + more, domain)
        if other:
            self._commit(other, len(self.live[other].tokens))
        self._commit(owner, len(tokens))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9), token=st.integers(0, 2))
    def grow(self, pick: int, token: int) -> None:
        owner = self._pick(pick)
        request = self.live[owner]
        if len(request.tokens) % self.page == 0:
            pages = self._take(1, owner)
            if pages is None:
                return
            request.row[request.count] = pages[0]
            request.count += 1
        request.tokens.append(token)
        page = request.row[(len(request.tokens) - 1) // self.page]
        assert self.cache.pool.owner[page] == owner, f"page {page} is written and not owned"

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

    @rule(count=st.integers(1, 12), each=st.booleans())
    def press(self, count: int, each: bool) -> None:
        """Somebody takes pages for a moment, which evicts."""
        if each and count <= self.cache.available:
            owners = np.arange(EXTERN, EXTERN + count, dtype=np.int32)
            pages = self.cache.take_each(owners)
            assert self.cache.pool.owner[pages].tolist() == owners.tolist()
            self.cache.pool.owner[pages] = EXTERN
            assert pages.tolist() == self.model.take(count)
        else:
            pages = self._take(count, EXTERN)
        if pages is not None:
            self.cache.pool.release(pages, EXTERN)
            self.model.release(pages.tolist())

    @rule()
    def press_all(self) -> None:
        """All that is said to be available can be had."""
        self.press(max(1, self.cache.available), False)

    @rule()
    def flush(self) -> None:
        cached = self.model.evictable()
        assert self.cache.flush() == cached and self.cache.tree.evictable == 0

    @precondition(lambda self: self.old)
    @rule(pick=st.integers(0, 50))
    def misuse(self, pick: int) -> None:
        """A finished request's handle can be neither released, used nor handed on; nor is a page released twice."""
        page, generation, owner = self.old[pick % len(self.old)]
        pool, pages = self.cache.pool, np.array([page], np.int32)
        refused(lambda: pool.release(pages, owner), f"page {page} ")
        refused(lambda: pool.transfer(pages, owner, TREE), f"page {page} ")
        refused(lambda: pool.check(pages, np.array([generation]), owner), f"page {page} ")
        if pool.owner[page] in (FREE, *self.live):
            refused(lambda: pool.check(pages, np.array([generation]), int(pool.owner[page])), "stale generation")
        mine = self._take(1, EXTERN)
        if mine is not None:
            refused(lambda: pool.release(np.repeat(mine, 2), EXTERN), "released twice")
            pool.release(mine, EXTERN)
            self.model.released += 2  # numbers of the release that was refused
            self.model.release(mine.tolist())

    # ---- what must hold

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.verify({owner: r.row[r.shared:r.count] for owner, r in self.live.items()})
        assert self._tree() == {prefix: held.page for prefix, held in model.cached.items()}
        assert cache.pool._free[:cache.pool.free].tolist() == model.free, "the free pages, or their order"
        assert cache.pool.generation.tolist() == model.generation
        assert cache.available == len(model.free) + model.evictable()
        for r in self.live.values():
            shared = model.prefixes(r.domain, r.tokens)[:r.shared]
            assert r.row[:r.shared].tolist() == [model.cached[prefix].page for prefix in shared], "a prefix moved"
            assert cache.tree.path(r.node).tolist() == r.row[:r.shared].tolist(), "another prefix is locked"
            found = len(model.found(model.prefixes(r.domain, r.tokens))) * self.page
            assert cache.cached_tokens(np.array(r.tokens, np.int32), r.domain) == found
        self._routers()

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

    def _start(self, tokens: list[int], domain: bytes, hint: CacheHint | None = None) -> int:
        ids, model = np.array(tokens, np.int32), self.model
        self.cache.tick(self.cache.now + 1.0)
        known = model.found(model.prefixes(domain, tokens[:-1]))
        assert self.cache.cached_tokens(ids.tobytes(), domain, len(ids) - 1) == len(known) * self.page
        pages, node = self.cache.acquire(ids.tobytes(), domain, len(ids) - 1)
        assert pages.tolist() == model.lock(known)
        self.owner += 1
        need = -(-len(tokens) // self.page) - len(pages)
        fresh = self._take(need, self.owner)
        if fresh is None:
            self.cache.forget(node)
            model.unlock(known)
            return 0
        row = np.zeros(len(tokens) // self.page + 40, np.int32)
        row[:len(pages) + need] = np.concatenate([pages, fresh])
        self.live[self.owner] = Live(list(tokens), domain, row, len(pages) + need, len(pages), node)
        use = self.cache.admit(ids, len(pages), node, hint)
        self.live[self.owner].use = use or Use(0, seam=self.owner % 5)  # LRU makes none: a seam all the same
        self.history = [*self.history[-11:], (list(tokens), domain)]
        return self.owner

    def _take(self, count: int, owner: int) -> np.ndarray | None:
        available, free = self.cache.available, self.cache.pool.free
        pages = self.cache.take(count, owner)
        assert (pages is not None) == (count <= available), f"{count} of {available} pages: {pages}"
        if pages is not None:
            assert pages.tolist() == self.model.take(count)
            assert self.cache.pool.free == max(0, free - count), "more was evicted than was needed"
            assert (self.cache.pool.owner[pages] == owner).all()
        return pages

    def _commit(self, owner: int, length: int) -> None:
        r, model = self.live[owner], self.model
        had, new = r.shared, model.prefixes(r.domain, r.tokens[:length])[r.shared:]
        there, before = model.found(new), r.row[:r.count].tolist()
        r.shared, r.node = self.cache.commit(np.array(r.tokens[:length], np.int32), r.row, had, owner, r.domain, r.node,
                                             r.use)
        assert r.shared == had + len(new)
        model.lock(there)
        model.release(before[had:had + len(there)])
        for prefix, page in zip(new[len(there):], before[had + len(there):], strict=False):
            model.cached[prefix] = Cached(page, 1)

    def _finish(self, owner: int) -> None:
        r = self.live.pop(owner)
        own = r.row[r.shared:r.count].tolist()
        self.old = [*self.old[-30:], *((page, int(self.cache.pool.generation[page]), owner) for page in own)]
        self.cache.release(r.row[:r.count], r.shared, owner, r.node, r.use)
        self.model.release(own)
        self.model.unlock(self.model.prefixes(r.domain, r.tokens)[:r.shared])
        self.history = [*self.history[-11:], (r.tokens, r.domain)]

    def _evicted(self, pages: np.ndarray, count: int) -> np.ndarray:
        """The tree has evicted: these must be the model's next victims, or with another policy such as may go."""
        gone = pages[::-1].tolist()
        assert self.model.evict(None if self.exact else gone, count) == gone, "other victims, or in another order"
        return pages

    def _pick(self, pick: int) -> int:
        return list(self.live)[pick % len(self.live)]

    def _tree(self) -> dict[Prefix, int]:
        found: dict[Prefix, int] = {}
        for path, node in self.cache.tree.nodes():
            root = node
            while root.parent is not None:
                root = root.parent
            tokens = tuple(np.frombuffer(path, np.int32).tolist())
            first = len(tokens) // self.page - node.size
            for i, page in enumerate(np.frombuffer(node.pages, np.int32).tolist()):
                found[root.edge, tokens[:(first + i + 1) * self.page]] = page
            anchored = sum(1 for r in self.live.values() if r.node is node)
            below = sum(1 for child in node.children.values() if child.locks)
            assert node.locks == anchored + below, f"{node.locks} locks, {anchored} requests, {below} children"
        return found

    def _routers(self) -> None:
        """Whoever follows the events knows as many blocks as are cached."""
        if self.cache.tree.listener is not self.below:
            return  # a machine that extends this one listens itself
        assert self.below.held == {held.page: prefix for prefix, held in self.model.cached.items()}
        for event in self.events.drain(self.cache.tree):
            if isinstance(event, Cleared):
                self.blocks = set()
            elif isinstance(event, Removed):
                assert self.blocks.issuperset(event.hashes)
                self.blocks -= set(event.hashes)
            else:
                assert event.parent is None or event.parent in self.blocks
                self.blocks |= set(event.hashes)
        assert len(self.blocks) == len(self.model.cached)
